"""Shortest ways of drones to their goals around the obstacles that they have observed.

The length T of the shortest way to a goal solves the eikonal equation |grad T| = s with the slowness s, here by
Godunov's upwind differences on a grid (Zhao, "A fast sweeping method for eikonal equations", 2005). Ways are level, and
ignore other drones.

Letters in shape comments: W worlds, M drones of a world, V ways, G grid points along a side, C cells of the grid.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embodied import native
from sims.swarm.mdp import HALF_ROOM_M, OBSTACLE_RADIUS_M, RADIUS_M, Swarm, length
from sims.swarm.worlds import Worlds

SPACING_M = 0.25
POINTS = 1 + round(2.0 * HALF_ROOM_M / SPACING_M)
"""G, number of grid points along a side."""
CLEAR_M = 0.3
TIGHT_M = 0.15
SLOWEST = 10.0
"""Gap below which the slowness grows, gap at which it is largest, and its largest factor."""
NEAR_M = 0.6
"""Distance up to which drones fly straight to a goal: no obstacle is as near to one."""
FAR_M = 1e3


class Ways:
    """Planned ways of each drone of `worlds`.

    Attributes:
        maps: direction and length of the shortest way from each point, [W, M, 3, G, G].
    """

    def __init__(self, mdp: Swarm, worlds: Worlds, backend: str | None = None) -> None:
        self.mdp = mdp
        self.backend = native.choose(backend, worlds.state.device)
        self.maps = torch.zeros(*worlds.fate.shape, 3, POINTS, POINTS)
        self._planned_obstacles = torch.zeros_like(worlds.seen)
        self._goal = torch.full_like(worlds.goal(), torch.nan)

    @torch.no_grad()
    def update(self, worlds: Worlds, position: Tensor) -> None:
        """Add the obstacles near `position` [W, M, 3] to the observed ones; plan again after a new obstacle or goal."""
        gap = torch.cdist(position[..., :2], worlds.cylinders) - (OBSTACLE_RADIUS_M + RADIUS_M)
        worlds.seen = worlds.seen | (gap < self.mdp.obstacle_range_m)
        goal = worlds.goal()
        due = ((worlds.seen != self._planned_obstacles).any(-1) | (goal != self._goal).any(-1)).nonzero(as_tuple=True)
        if len(due[0]):
            observed = torch.where(worlds.seen[due].unsqueeze(-1), worlds.cylinders[due[0]], FAR_M)
            self.maps[due] = maps(observed, goal[due], self.backend)
            self._planned_obstacles = worlds.seen
            self._goal = goal

    def along(self, to_goal: Tensor, position: Tensor) -> Tensor:
        """Vector of the way's direction and length from `position`, m, instead of `to_goal`; all [W, M, 3].

        Its vertical part is that of `to_goal`. Gradients go through the length, and near the goal through `to_goal`.
        """
        grid_position = ((position[..., :2].detach() + HALF_ROOM_M) / SPACING_M).clamp(0.0, POINTS - 1.001)
        low = grid_position.long()
        (x, y), (i, j) = (grid_position - low).unbind(-1), low.unbind(-1)
        world, drone = (torch.arange(size, device=grid_position.device) for size in grid_position.shape[:2])
        corners = self.maps[
            world.view(-1, 1, 1),
            drone.unsqueeze(1),
            :,
            torch.stack((i, i, i + 1, i + 1), -1),
            torch.stack((j, j + 1, j, j + 1), -1),
        ]
        # Bilinear interpolation between the four grid points around the position.
        share = torch.stack(((1.0 - x) * (1.0 - y), (1.0 - x) * y, x * (1.0 - y), x * y), -1)
        interpolated = (share.unsqueeze(-1) * corners).sum(-2)
        direction = torch.nn.functional.normalize(interpolated[..., :2], dim=-1)
        level = to_goal[..., :2]
        nearer = (direction * (position - position.detach())[..., :2]).sum(-1, keepdim=True)  # 0, with a derivative
        way = direction * (interpolated[..., 2:] - nearer)
        return torch.cat((torch.where(length(level).unsqueeze(-1) < NEAR_M, level, way), to_goal[..., 2:]), -1)


def maps(cylinders: Tensor, goal: Tensor, backend: str) -> Tensor:
    """Direction and length of the ways from all points around `cylinders` [V, C, 2] to `goal` [V, 3]: [V, 3, G, G]."""
    axis = torch.linspace(-HALF_ROOM_M, HALF_ROOM_M, POINTS, device=goal.device)
    points = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), -1).flatten(0, 1)
    gap = torch.cdist(points.expand(len(goal), -1, -1), cylinders).amin(-1) - (OBSTACLE_RADIUS_M + RADIUS_M)
    gap = torch.minimum(gap, HALF_ROOM_M - RADIUS_M - points.abs().amax(-1)).unflatten(-1, (POINTS, POINTS))
    # The slowness rises linearly from 1 at the gap CLEAR_M to SLOWEST at TIGHT_M.
    tight = ((CLEAR_M - gap) / (CLEAR_M - TIGHT_M)).clamp(0.0, 1.0)
    step = SPACING_M * (1.0 + (SLOWEST - 1.0) * tight)
    start = length(points - goal[:, None, :2]).unflatten(-1, (POINTS, POINTS))
    T = lengths(torch.where(start < NEAR_M, start, FAR_M), step, backend)
    slope = torch.stack([_downhill(T, dim) for dim in (1, 2)], 1)
    return torch.cat((torch.nn.functional.normalize(slope, dim=1), T.unsqueeze(1)), 1)


def lengths(start: Tensor, step: Tensor, backend: str) -> Tensor:
    """Solution T [V, G, G] of |grad T| = `step` [V, G, G] / spacing with T <= `start` [V, G, G]."""
    if backend == "c":
        T = start.contiguous().clone()
        step = step.contiguous()
        _library().lengths(len(T), T.shape[1], FAR_M, step.data_ptr(), T.data_ptr())
        return T
    T = start
    while True:
        before = T
        a, b = (torch.minimum(*_neighbours(T, dim)) for dim in (1, 2))
        # Godunov: (T - a)^2 + (T - b)^2 = step^2 with the smaller neighbours a and b, or T = min(a, b) + step.
        both = 0.5 * (a + b + (2.0 * step.square() - (a - b).square()).clamp_min(0.0).sqrt())
        T = torch.minimum(torch.where((a - b).abs() < step, both, torch.minimum(a, b) + step), T)
        if torch.equal(before, T):
            return T


def _neighbours(T: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The neighbours before and after each point along `dim`, [V, G, G] each."""
    padded = torch.nn.functional.pad(T, (0, 0, 1, 1) if dim == 1 else (1, 1, 0, 0), value=FAR_M)
    return padded.narrow(dim, 0, T.shape[dim]), padded.narrow(dim, 2, T.shape[dim])


def _downhill(T: Tensor, dim: int) -> Tensor:
    """Descent of T towards the lower neighbour along `dim`; 0 where both are higher."""
    before, after = _neighbours(T, dim)
    return (T - torch.minimum(before, after)).clamp_min(0.0) * torch.where(after < before, 1.0, -1.0)


@cache
def _library() -> Any:  # noqa: ANN401 - a library has the functions it has
    compiled = native.load(Path(__file__).with_name("native.c").read_text(encoding="utf-8"))
    assert compiled is not None
    long = ctypes.c_long
    pointer = ctypes.c_void_p
    compiled.lengths.argtypes = [long, long, ctypes.c_float, pointer, pointer]
    compiled.lengths.restype = None
    return compiled
