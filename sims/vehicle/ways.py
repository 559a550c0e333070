"""How far it is to the goal of a room along the free way, on a grid: for the reward and the critic, not for robots."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from sims.native import choose
from sims.vehicle.compiled import given, library

CELL_M, CLEAR_M = 0.25, 0.2
"""Width of a cell, and how far its middle is from every shape where it is free: a little less than robots need."""
BLOCKED_M = 1e3
AROUND = [(i, j) for i in (-1, 0, 1) for j in (-1, 0, 1)]


def ways(circles: Tensor, segments: Tensor, goal: Tensor, half_m: float, backend: str | None = None) -> Tensor:
    """Distances [M, G, G] from the middles of cells (x, y) to goals [M, 2], `BLOCKED_M` where there is no way.

    Args:
        circles: [M, C, 3], see `geometry`; on the CPU.
        segments: [M, S, 4].
        goal: m, world.
        half_m: half the width of the rooms.
        backend: "c" or "torch" in place of the usual one.
    """
    size = math.ceil(2.0 * half_m / CELL_M)
    axis = (torch.arange(size) + 0.5) * CELL_M - half_m
    x, y = axis.view(1, -1, 1), axis.view(1, 1, -1)
    free = _free(circles, segments, half_m, x, y, choose(backend, goal.device))
    straight = ((x - goal[:, :1, None]).square() + (y - goal[:, 1:, None]).square()).sqrt()
    start = torch.where(free & (straight < 1.5 * CELL_M), straight, torch.inf)
    return spread(start, torch.where(free, 1.0, torch.inf), CELL_M, backend).clamp_max(BLOCKED_M)


def spread(start: Tensor, cost: Tensor, cell_m: float, backend: str | None = None) -> Tensor:
    """Distances [M, G, G] to wherever `start` [M, G, G] knows them: shortest ways over cells and their corners.

    Every cell takes the best of its eight neighbours, with the step from there times its own `cost` [M, G, G], until
    none changes (Bellman and Ford), all grids at once. Infinite where a cell cannot be entered, or nothing leads there.
    """
    size = start.shape[1]
    if choose(backend, start.device) == "c":
        found, cost = start.contiguous().clone(), cost.contiguous()
        library().spread(len(start), size, cell_m, *given(cost, found))
        return found
    found = functional.pad(start, (1, 1, 1, 1), value=torch.inf)
    inner = found[:, 1:-1, 1:-1]
    while True:
        before = inner.clone()
        for i, j in AROUND[:4] + AROUND[5:]:
            neighbour = found[:, 1 + i : 1 + i + size, 1 + j : 1 + j + size]
            inner.copy_(torch.minimum(inner, neighbour + cell_m * math.hypot(i, j) * cost))
        if torch.equal(before, inner):
            return before


def remaining(way: Tensor, position: Tensor, half_m: float) -> Tensor:
    """Distance [N] to the goal from `position` [N, 2] with `way` [N, G, G]; infinite where no free cell is near."""
    rows = torch.arange(len(way), device=way.device)
    cell = ((position + half_m) / CELL_M).floor().long()
    found = []
    for around in AROUND:
        near = (cell + torch.tensor(around, device=way.device)).clamp(0, way.shape[1] - 1)
        from_there = way[rows, near[:, 0], near[:, 1]]
        total = from_there + ((near + 0.5) * CELL_M - half_m - position).norm(dim=1)
        found.append(torch.where(from_there < BLOCKED_M, total, torch.inf))
    return torch.stack(found).amin(0)


def _free(circles: Tensor, segments: Tensor, half_m: float, x: Tensor, y: Tensor, backend: str) -> Tensor:
    """Cells [M, G, G] that are free, with middles at `x` and `y`."""
    if backend == "torch":
        return _clearance(circles, segments, x, y) > CLEAR_M
    size, circles, segments = x.shape[1], circles.contiguous(), segments.contiguous()
    free = torch.empty(len(circles), size, size, dtype=torch.bool)
    library().open_cells(
        len(circles), size, CELL_M, half_m, CLEAR_M, circles.shape[1], *given(circles),
        segments.shape[1], *given(segments, free),
    )  # fmt: skip
    return free


def _clearance(circles: Tensor, segments: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Distance [M, G, G] of points `x` [1, G, 1], `y` [1, 1, G] from the nearest shape."""
    found = torch.full((len(circles), x.shape[1], y.shape[2]), torch.inf)
    for circle in circles.unbind(1):
        cx, cy, radius = (part.view(-1, 1, 1) for part in circle.unbind(1))
        found = torch.minimum(found, ((x - cx).square() + (y - cy).square()).sqrt() - radius)
    for segment in segments.unbind(1):
        ax, ay, bx, by = (part.view(-1, 1, 1) for part in segment.unbind(1))
        ex, ey = bx - ax, by - ay
        share = (((x - ax) * ex + (y - ay) * ey) / (ex * ex + ey * ey).clamp_min(1e-9)).clamp(0.0, 1.0)
        found = torch.minimum(found, ((x - ax - share * ex).square() + (y - ay - share * ey).square()).sqrt())
    return found
