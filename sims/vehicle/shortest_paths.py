"""Lengths of the shortest free paths to the goal of a room, on a grid: for the reward and the critic only."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from embodied.native import choose, pointers
from embodied.navigation import local_map
from embodied.navigation.compiled_map import maps
from embodied.navigation.local_map import AROUND
from sims.vehicle.compiled import library

CELL_M = 0.25
CLEAR_M = 0.2
"""Width of a cell, m, and clearance of the centres of free cells, m: slightly less than robots need."""
BLOCKED_M = 1e3


def path_lengths(circles: Tensor, segments: Tensor, goal: Tensor, half_m: float, backend: str | None = None) -> Tensor:
    """Path lengths [M, G, G], m, from the centres of cells (x, y) to goals [M, 2]; `BLOCKED_M` without a path.

    Args:
        circles: [M, C, 3], see `geometry`; on the CPU.
        segments: [M, S, 4].
        goal: positions [M, 2], m, world.
        half_m: half the width of the rooms.
        backend: "c" or "torch"; None: the default.
    """
    size = math.ceil(2.0 * half_m / CELL_M)
    axis = (torch.arange(size) + 0.5) * CELL_M - half_m
    x = axis.view(1, -1, 1)
    y = axis.view(1, 1, -1)
    free = _free(circles, segments, half_m, x, y, choose(backend, goal.device))
    straight = ((x - goal[:, :1, None]).square() + (y - goal[:, 1:, None]).square()).sqrt()
    start = torch.where(free & (straight < 1.5 * CELL_M), straight, torch.inf)
    return shortest_distances(start, torch.where(free, 1.0, torch.inf), CELL_M, backend).clamp_max(BLOCKED_M)


def shortest_distances(start: Tensor, cost: Tensor, cell_m: float, backend: str | None = None) -> Tensor:
    """Distances of `local_map.shortest_distances`, in compiled C if `backend` is "c" (None: the default)."""
    if choose(backend, start.device) != "c":
        return local_map.shortest_distances(start, cost, cell_m)
    distances = start.contiguous().clone()
    cost = cost.contiguous()
    maps().shortest_distances(len(start), start.shape[1], cell_m, cell_m * math.sqrt(2.0), *pointers(cost, distances))
    return distances


def path_length_at(lengths: Tensor, position: Tensor, half_m: float, backend: str | None = None) -> Tensor:
    """Path length [N], m, from `position` [N, 2], given `lengths` [N, G, G]; infinite if no free cell is near."""
    if choose(backend, position.device) == "c":
        out = torch.empty(len(position))
        inputs = (lengths.contiguous(), position.contiguous())
        maps().path_length_at(len(position), lengths.shape[1], CELL_M, half_m, BLOCKED_M, *pointers(*inputs, out))
        return out
    rows = torch.arange(len(lengths), device=lengths.device)
    cell = ((position + half_m) / CELL_M).floor().long()
    candidates = []
    for around in AROUND:
        neighbour = (cell + torch.tensor(around, device=lengths.device)).clamp(0, lengths.shape[1] - 1)
        cell_length = lengths[rows, neighbour[:, 0], neighbour[:, 1]]
        total = cell_length + ((neighbour + 0.5) * CELL_M - half_m - position).norm(dim=1)
        candidates.append(torch.where(cell_length < BLOCKED_M, total, torch.inf))
    return torch.stack(candidates).amin(0)


def _free(circles: Tensor, segments: Tensor, half_m: float, x: Tensor, y: Tensor, backend: str) -> Tensor:
    """Whether cells [M, G, G] with centres at `x` and `y` are free."""
    if backend == "torch":
        return _clearance(circles, segments, x, y) > CLEAR_M
    size = x.shape[1]
    circles = circles.contiguous()
    segments = segments.contiguous()
    free = torch.empty(len(circles), size, size, dtype=torch.bool)
    library().open_cells(
        len(circles),
        size,
        CELL_M,
        half_m,
        CLEAR_M,
        circles.shape[1],
        *pointers(circles),
        segments.shape[1],
        *pointers(segments, free),
    )
    return free


def _clearance(circles: Tensor, segments: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Distance [M, G, G], m, of points `x` [1, G, 1], `y` [1, 1, G] from the nearest shape."""
    clearance = torch.full((len(circles), x.shape[1], y.shape[2]), torch.inf)
    for circle in circles.unbind(1):
        cx, cy, radius = (part.view(-1, 1, 1) for part in circle.unbind(1))
        clearance = torch.minimum(clearance, ((x - cx).square() + (y - cy).square()).sqrt() - radius)
    for segment in segments.unbind(1):
        ax, ay, bx, by = (part.view(-1, 1, 1) for part in segment.unbind(1))
        ex = bx - ax
        ey = by - ay
        share = (((x - ax) * ex + (y - ay) * ey) / (ex * ex + ey * ey).clamp_min(1e-9)).clamp(0.0, 1.0)
        clearance = torch.minimum(clearance, ((x - ax - share * ex).square() + (y - ay - share * ey).square()).sqrt())
    return clearance
