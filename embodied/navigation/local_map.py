"""Maps that vehicles build from their own lidar while they drive, and shortest paths to the goal on them.

A small version of Nav2's costmap and NavFn: lidar hits are stored on a grid around the line from start to goal, until
beams pass through them; the vehicle's pose on it comes from odometry and the goal's direction; cells near hits cost
more, unknown ones are free. Hits of the last seconds are also stored exactly: walls seen end-on are between two beams.
The state of a vehicle's map is a row of a memory [N, M]. Letters: N vehicles, B beams, G cells along a side of a map, W
waypoints, K scans.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from embodied.contract import TensorSpec

HEADING = 0
CENTRE = 1
COUNT = 6
AGE = 7
MAP = 8
VELOCITY = slice(2, 4)
GOAL = slice(4, 6)
"""Memory before the map: heading (rad) and half the initial goal distance (m), its position; last velocity, goal;
control periods since the last plan, and since the beginning.
"""
FADES = 0.34
BEAM_STRIDE = 2
"""Decay of a cell when a beam passes it; stride of the beams used for clearing."""
LONGEST_M = 50.0
"""Largest observed cost of a path, m."""
SECTORS = 1024
NOWHERE_M = 1e3
"""Number of sectors of the full turn in which remembered hits are looked up; position of missing hits, m."""
AROUND = [(i, j) for i in (-1, 0, 1) for j in (-1, 0, 1)]


def shortest_distances(start: Tensor, cost: Tensor, cell_m: float) -> Tensor:
    """Shortest distances [M, G, G] on the 8-connected grid to the cells of finite `start` [M, G, G], plus `start`.

    Bellman-Ford on all grids at once: every cell takes the minimum over its eight neighbours of their distance plus the
    step length times its own `cost` [M, G, G], until none changes. Infinite if unreachable.
    """
    size = start.shape[1]
    padded = functional.pad(start, (1, 1, 1, 1), value=torch.inf)
    inner = padded[:, 1:-1, 1:-1]
    while True:
        before = inner.clone()
        for i, j in AROUND[:4] + AROUND[5:]:
            neighbour = padded[:, 1 + i : 1 + i + size, 1 + j : 1 + j + size]
            # d(cell) <- min(d(cell), d(neighbour) + |step| cost(cell))
            inner.copy_(torch.minimum(inner, neighbour + cell_m * math.hypot(i, j) * cost))
        if torch.equal(before, inner):
            return before


@dataclass(frozen=True)
class LocalMap:
    """Sensor, grid and costs of a map.

    Attributes:
        angles: of the B beams from the front, rad.
        range_m: ranges of at least this length are not hits.
        dt_s: control period.
        lidar_x_m: distance of the lidar in front of the vehicle's middle.
        side, cell_m: cells along a side, and their width.
        every: control periods between plans.
        blocked_m, near_m: cells nearer to a hit than the first cost `blocked` times their width, decreasing to once at
            the second.
        blocked, near: cost factors of blocked cells and of those just beyond.
        ahead_m: distances of the waypoints.
        scans, scans_every: K scans are remembered, and control periods between them.
        remembered_m: hits that are farther away are not observed.
    """

    angles: tuple[float, ...]
    range_m: float
    dt_s: float
    lidar_x_m: float = 0.0
    side: int = 64
    cell_m: float = 0.25
    every: int = 5
    blocked_m: float = 0.3
    near_m: float = 0.7
    blocked: float = 50.0
    near: float = 4.0
    ahead_m: tuple[float, ...] = (0.5, 1.0, 2.0)
    scans: int = 8
    scans_every: int = 2
    remembered_m: float = 3.0

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Specs of the observations that `observe` returns."""
        names = tuple(f"{axis}_{ahead_m:g}_m" for ahead_m in self.ahead_m for axis in "xy")
        return {
            "waypoints": TensorSpec((len(names),), unit="m", frame="base", names=names),
            "path_cost": TensorSpec((1,), unit="m"),
            "remembered": TensorSpec((len(self.angles),), unit="m", frame="lidar"),
        }

    @property
    def size(self) -> int:
        """Number M of elements of a memory."""
        return MAP + 2 * self.side * self.side + self.scans * len(self.angles) * 2

    def begin(self, lidar: Tensor, velocity: Tensor, goal: Tensor) -> Tensor:
        """Initial memory [N, M] from ranges [N, B], speed and yaw rate [N, 2], and the goal [N, 2], m, base."""
        memory = torch.zeros(len(goal), self.size, device=goal.device)
        memory[:, HEADING] = -torch.atan2(goal[:, 1], goal[:, 0])
        memory[:, CENTRE] = 0.5 * goal.norm(dim=1)
        memory[:, VELOCITY] = velocity
        memory[:, GOAL] = goal
        self._scans(memory).fill_(NOWHERE_M)
        self._mark(memory, lidar)
        self._plan(memory, torch.ones_like(memory[:, COUNT], dtype=torch.bool))
        return memory

    def expected(self, memory: Tensor, velocity: Tensor) -> Tensor:
        """Expected goal [N, 2], m, base, in the next period, if the vehicles drive `velocity` [N, 2]."""
        moved, turn = self._moved(memory, velocity)
        return turned(memory[:, GOAL] - moved, -turn)

    def update(self, memory: Tensor, lidar: Tensor, velocity: Tensor, goal: Tensor) -> None:
        """Update `memory` with the measurements of the next period, as in `begin`; plan when it is due."""
        moved, turn = self._moved(memory, velocity)
        # the change of the goal's direction measures the rotation better than the yaw rate, unless the goal is near
        before = memory[:, GOAL] - moved
        off = torch.atan2(before[:, 1], before[:, 0]) - torch.atan2(goal[:, 1], goal[:, 0]) - turn
        off = torch.atan2(off.sin(), off.cos())
        memory[:, HEADING] += turn + torch.where(goal.norm(dim=1) > 1.0, off, 0.0)
        memory[:, VELOCITY] = velocity
        memory[:, GOAL] = goal
        memory[:, COUNT : AGE + 1] += 1.0
        self._mark(memory, lidar)
        if (due := memory[:, COUNT] >= self.every).any():
            memory[:, COUNT].masked_fill_(due, 0.0)
            self._plan(memory, due)

    def observe(self, memory: Tensor) -> dict[str, Tensor]:
        """Waypoints [N, 2 W] on the path at distances `ahead_m`, or the goal where that is nearer; its cost [N, 1]; and
        for each beam the distance of the nearest remembered hit in its direction [N, B], `range_m` if there is none.
        """  # noqa: D205
        path_costs = self._grids(memory)[:, 1].flatten(1)
        heading = memory[:, HEADING]
        goal = memory[:, GOAL]
        position = self._at(memory)
        end = self._end(memory)
        cell = self._cell(position)
        cost = path_costs.gather(1, self._index(cell).unsqueeze(1))
        around = torch.tensor(AROUND, device=memory.device)
        rows = torch.arange(len(memory), device=memory.device)
        targets = [end.clone() for _ in self.ahead_m]
        going = [torch.ones(len(memory), dtype=torch.bool, device=memory.device) for _ in self.ahead_m]
        for _ in range(math.ceil(max(self.ahead_m) / self.cell_m) + 1):
            neighbours = (cell.unsqueeze(1) + around).clamp(0, self.side - 1)
            cell = neighbours[rows, path_costs.gather(1, self._index(neighbours)).argmin(1)]
            centre = (cell + 0.5 - 0.5 * self.side) * self.cell_m
            far = (centre - position).norm(dim=1)
            for index, ahead_m in enumerate(self.ahead_m):
                targets[index] = torch.where(going[index].unsqueeze(1), centre, targets[index])
                going[index] &= far < ahead_m
        waypoints = []
        for target in targets:
            arrived = (target - end).norm(dim=1, keepdim=True) < 1.5 * self.cell_m
            waypoints.append(torch.where(arrived, goal, turned(target - position, -heading)))
        observation = {"waypoints": torch.cat(waypoints, 1), "path_cost": cost.clamp_max(LONGEST_M)}
        return observation | {"remembered": self._remembered(memory).sqrt().clamp_max(self.range_m)}

    def hit_cells(self, memory: Tensor) -> Tensor:
        """Cells [N, G, G] with hits, which are above 0; a view of `memory`."""
        return self._grids(memory)[:, 0]

    def _grids(self, memory: Tensor) -> Tensor:
        """Hits of cells, and costs of paths from them, [N, 2, G, G]; a view of `memory`."""
        return memory[:, MAP : MAP + 2 * self.side * self.side].unflatten(1, (2, self.side, self.side))

    def _scans(self, memory: Tensor) -> Tensor:
        """Remembered hits [N, K, B, 2], m from the map's centre; a view of `memory`."""
        return memory[:, MAP + 2 * self.side * self.side :].unflatten(1, (self.scans, len(self.angles), 2))

    def _remembered(self, memory: Tensor) -> Tensor:
        """Squared distance [N, B] of the nearest remembered hit in the direction of each beam, infinite without one."""
        heading = memory[:, HEADING]
        offset = self._scans(memory).flatten(1, 2) - self._at(memory).unsqueeze(1)
        cos = heading.cos().unsqueeze(1)
        sin = heading.sin().unsqueeze(1)
        x = cos * offset[..., 0] + sin * offset[..., 1] - self.lidar_x_m
        y = cos * offset[..., 1] - sin * offset[..., 0]
        squared = x * x + y * y
        manhattan = x.abs() + y.abs()
        near = (squared < self.remembered_m**2) & (manhattan > 0.0)
        share = torch.where(near, y / manhattan, 0.0)  # a pseudo-angle, monotonic in the angle: 1 for a quarter turn
        turn = torch.where(x < 0.0, torch.where(y < 0.0, -2.0 - share, 2.0 - share), share)
        sector = ((turn + 2.0) * (0.25 * SECTORS)).long().clamp_max(SECTORS - 1)
        # hits that are too far away or outside of all beams are collected in an extra column
        beam = torch.where(near, self._beam_of_sector.to(memory.device)[sector].long(), len(self.angles))
        nearest = memory.new_full((len(memory), len(self.angles) + 1), torch.inf)
        return nearest.scatter_reduce_(1, beam, squared, "amin")[:, :-1]

    @cached_property
    def _beam_of_sector(self) -> Tensor:
        """Index [SECTORS] of the beam nearest to the middle of each sector; B for sectors without a near beam."""
        share = 4.0 * (torch.arange(SECTORS) + 0.5) / SECTORS - 2.0
        x = 1.0 - share.abs()
        y = torch.where(share.abs() <= 1.0, share, share.sign() * 2.0 - share)
        beams = torch.tensor(self.angles)
        off = torch.atan2(y, x).unsqueeze(1) - beams
        nearest = torch.atan2(off.sin(), off.cos()).abs().min(1)
        spacing = (beams[1:] - beams[:-1]).max()
        return torch.where(nearest.values <= 0.51 * spacing, nearest.indices, len(beams)).int()

    def _moved(self, memory: Tensor, velocity: Tensor) -> tuple[Tensor, Tensor]:
        """Displacement [N, 2], m, in the earlier frame, and angle [N] that vehicles have moved in a period."""
        speed, rate = (0.5 * (memory[:, VELOCITY] + velocity)).unbind(1)
        turn = rate * self.dt_s
        distance = speed * self.dt_s
        # an arc, approximated by its chord: the midpoint heading times the length
        return torch.stack((distance * (0.5 * turn).cos(), distance * (0.5 * turn).sin()), 1), turn

    def _plan(self, memory: Tensor, due: Tensor) -> None:
        """Compute costs of the shortest paths to the goal from all cells, for the rows that are `due` [N]."""
        planned = memory[due]
        hits, path_costs = self._grids(planned).unbind(1)
        distance = shortest_distances(torch.where(hits > 0.0, 0.0, torch.inf), torch.ones_like(hits), self.cell_m)
        share = (self.near_m - distance) / (self.near_m - self.blocked_m)
        # cost per length: 1 + (near - 1) s^2, s from 0 at near_m to 1 at blocked_m, and `blocked` below that
        cost = 1.0 + (self.near - 1.0) * share.clamp(0.0, 1.0).square()
        cost = torch.where(distance < self.blocked_m, self.blocked, cost)
        start = torch.full_like(cost, torch.inf).flatten(1)
        start.scatter_(1, self._index(self._cell(self._end(planned))).unsqueeze(1), 0.0)
        path_costs.copy_(shortest_distances(start.view_as(cost), cost, self.cell_m))
        memory[due] = planned

    def _mark(self, memory: Tensor, lidar: Tensor) -> None:
        """Store the hits of ranges [N, B], and reduce those that beams pass through repeatedly: they have moved.

        Exact hits of every `scans_every`th scan replace those of the oldest one.
        """
        hits = memory[:, MAP : MAP + self.side * self.side]  # flat
        far = self.cell_m * torch.arange(1, math.ceil(self.range_m / self.cell_m), device=lidar.device)
        free = far < lidar[:, ::BEAM_STRIDE, None] - 1.5 * self.cell_m
        cells, inside = self._cells(self._places(memory, far.expand(free.shape), slice(None, None, BEAM_STRIDE)))
        through = (free & inside).flatten(1).float()
        # once per cell and scan, however many beams pass it
        hits.sub_(FADES * torch.zeros_like(hits).scatter_reduce_(1, cells.flatten(1), through, "amax"))
        hits.clamp_min_(0.0)
        places = self._places(memory, lidar.unsqueeze(2)).squeeze(2)
        hit = lidar < self.range_m
        cells, inside = self._cells(places)
        hits.scatter_reduce_(1, cells, (inside & hit).float(), "amax")
        rows = (memory[:, AGE] % self.scans_every == 0.0).nonzero().squeeze(1)
        oldest = (memory[rows, AGE] / self.scans_every).long() % self.scans
        self._scans(memory)[rows, oldest] = torch.where(hit.unsqueeze(2), places, NOWHERE_M)[rows]

    def _places(self, memory: Tensor, far: Tensor, beams: slice = slice(None)) -> Tensor:
        """Positions [N, B, D, 2] at distances `far` [N, B, D], m, along `beams`."""
        angles = torch.tensor(self.angles, device=far.device)[beams].view(1, -1, 1)
        points = torch.stack((far * angles.cos() + self.lidar_x_m, far * angles.sin()), -1)
        return self._at(memory)[:, None, None] + turned(points, memory[:, HEADING].view(-1, 1, 1))

    def _cells(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Indices of the cells of `places` [..., 2], and whether they are on the map."""
        return self._index(self._cell(places)), (places.abs() < 0.5 * self.side * self.cell_m).all(-1)

    def _at(self, memory: Tensor) -> Tensor:
        """Position [N, 2], m from the map's centre, half way to the goal."""
        at = turned(-memory[:, GOAL], memory[:, HEADING])
        at[:, 0] += memory[:, CENTRE]
        return at

    def _end(self, memory: Tensor) -> Tensor:
        """Position [N, 2] of the goal on the map."""
        return torch.stack((memory[:, CENTRE], torch.zeros_like(memory[:, CENTRE])), 1)

    def _cell(self, place: Tensor) -> Tensor:
        """Cell [..., 2] of a position `place` [..., 2], m from the map's centre; the nearest cell if outside."""
        return (place / self.cell_m + 0.5 * self.side).floor().long().clamp(0, self.side - 1)

    def _index(self, cell: Tensor) -> Tensor:
        """Index of a `cell` [..., 2] in the flat map."""
        return cell[..., 0] * self.side + cell[..., 1]


def turned(points: Tensor, angle: Tensor) -> Tensor:
    """Rotate `points` [..., 2] by `angle` [...], rad."""
    cos = angle.cos()
    sin = angle.sin()
    x, y = points.unbind(-1)
    return torch.stack((cos * x - sin * y, sin * x + cos * y), -1)
