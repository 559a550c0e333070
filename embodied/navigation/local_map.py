"""Maps that vehicles make of their own lidar while they drive, and shortest paths to the goal on them.

A small version of Nav2's costmap and NavFn: lidar hits are stored on a grid around the line from start to goal, until
beams go through them; the vehicle's pose on it comes from odometry and the goal's direction; cells near hits cost more,
unknown ones are free. Hits of the last seconds are kept exactly, too: walls seen end-on are between two beams.
What a vehicle knows is a row of a memory [N, M]. Letters: N vehicles, B beams, G cells along a side of a map, W
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

HEADING, CENTRE, COUNT, AGE, MAP = 0, 1, 6, 7, 8
VELOCITY, GOAL = slice(2, 4), slice(4, 6)
"""Memory before the map: heading (rad) and half the initial goal distance (m), its position; last velocity, goal;
control periods since the last plan, and since the beginning.
"""
FADES, APART = 0.34, 2
"""What a hit of 1 loses when a beam goes through; every how many beams are looked along for that."""
LONGEST_M = 50.0
"""Costs of paths are told up to this length."""
SECTORS, NOWHERE_M = 1024, 1e3
"""Divisions of the full turn in which remembered hits are looked up; position of what is no hit."""
AROUND = [(i, j) for i in (-1, 0, 1) for j in (-1, 0, 1)]


def shortest_distances(start: Tensor, cost: Tensor, cell_m: float) -> Tensor:
    """Shortest distances [M, G, G] on the 8-connected grid to the cells of finite `start` [M, G, G], plus `start`.

    Bellman-Ford on all grids at once: every cell takes the minimum over its eight neighbours of their distance plus the
    step length times its own `cost` [M, G, G], until none changes. Infinite if unreachable.
    """
    size = start.shape[1]
    found = functional.pad(start, (1, 1, 1, 1), value=torch.inf)
    inner = found[:, 1:-1, 1:-1]
    while True:
        before = inner.clone()
        for i, j in AROUND[:4] + AROUND[5:]:
            neighbour = found[:, 1 + i : 1 + i + size, 1 + j : 1 + j + size]
            inner.copy_(torch.minimum(inner, neighbour + cell_m * math.hypot(i, j) * cost))
        if torch.equal(before, inner):
            return before


@dataclass(frozen=True)
class LocalMap:
    """Sensor, grid and costs of a map.

    Attributes:
        angles: of the B beams from the front, rad.
        range_m: ranges from here on are no hits.
        dt_s: control period.
        lidar_x_m: distance of the lidar in front of the vehicle's middle.
        side, cell_m: cells along a side, and their width.
        every: control periods between plans.
        blocked_m, near_m: cells nearer to a hit than the first cost `blocked` times their width, decreasing to once at
            the second.
        blocked, near: cost factors of blocked cells and of those just beyond.
        ahead_m: distances of the waypoints.
        scans, scans_every: K scans are remembered, and control periods between them.
        remembered_m: hits that are farther away are not told.
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
        """What `observe` returns."""
        names = tuple(f"{axis}_{ahead_m:g}_m" for ahead_m in self.ahead_m for axis in "xy")
        return {
            "waypoints": TensorSpec((len(names),), unit="m", frame="base", names=names),
            "path_cost": TensorSpec((1,), unit="m"),
            "remembered": TensorSpec((len(self.angles),), unit="m", frame="lidar"),
        }

    @property
    def size(self) -> int:
        """M: elements of a memory."""
        return MAP + 2 * self.side * self.side + self.scans * len(self.angles) * 2

    def begin(self, lidar: Tensor, velocity: Tensor, goal: Tensor) -> Tensor:
        """Memory [N, M] of vehicles that measure ranges [N, B], speed and yaw rate [N, 2], the goal [N, 2], m, base."""
        memory = torch.zeros(len(goal), self.size, device=goal.device)
        memory[:, HEADING] = -torch.atan2(goal[:, 1], goal[:, 0])
        memory[:, CENTRE] = 0.5 * goal.norm(dim=1)
        memory[:, VELOCITY], memory[:, GOAL] = velocity, goal
        self._scans(memory).fill_(NOWHERE_M)
        self._mark(memory, lidar)
        self._plan(memory, torch.ones_like(memory[:, COUNT], dtype=torch.bool))
        return memory

    def expected(self, memory: Tensor, velocity: Tensor) -> Tensor:
        """Where the goal [N, 2], m, base, is in the next period, if the vehicles drive `velocity` [N, 2]."""
        moved, turn = self._moved(memory, velocity)
        return turned(memory[:, GOAL] - moved, -turn)

    def update(self, memory: Tensor, lidar: Tensor, velocity: Tensor, goal: Tensor) -> None:
        """Take the measurements of the next period, as for `begin`, into `memory`; plan when it is time to."""
        moved, turn = self._moved(memory, velocity)
        # the change of the goal's direction measures the rotation better than the yaw rate, unless the goal is near
        before = memory[:, GOAL] - moved
        off = torch.atan2(before[:, 1], before[:, 0]) - torch.atan2(goal[:, 1], goal[:, 0]) - turn
        off = torch.atan2(off.sin(), off.cos())
        memory[:, HEADING] += turn + torch.where(goal.norm(dim=1) > 1.0, off, 0.0)
        memory[:, VELOCITY], memory[:, GOAL] = velocity, goal
        memory[:, COUNT : AGE + 1] += 1.0
        self._mark(memory, lidar)
        if (due := memory[:, COUNT] >= self.every).any():
            memory[:, COUNT].masked_fill_(due, 0.0)
            self._plan(memory, due)

    def observe(self, memory: Tensor) -> dict[str, Tensor]:
        """Waypoints [N, 2 W] on the path at distances `ahead_m`, or the goal where that is nearer; its cost [N, 1]; and
        for each beam the distance of the nearest remembered hit in its direction [N, B], `range_m` if there is none.
        """  # noqa: D205
        left = self._grids(memory)[:, 1].flatten(1)
        heading, goal, at = memory[:, HEADING], memory[:, GOAL], self._at(memory)
        end = self._end(memory)
        cell = self._cell(at)
        cost = left.gather(1, self._index(cell).unsqueeze(1))
        around = torch.tensor(AROUND, device=memory.device)
        rows = torch.arange(len(memory), device=memory.device)
        targets = [end.clone() for _ in self.ahead_m]
        going = [torch.ones(len(memory), dtype=torch.bool, device=memory.device) for _ in self.ahead_m]
        for _ in range(math.ceil(max(self.ahead_m) / self.cell_m) + 1):
            near = (cell.unsqueeze(1) + around).clamp(0, self.side - 1)
            cell = near[rows, left.gather(1, self._index(near)).argmin(1)]
            place = (cell + 0.5 - 0.5 * self.side) * self.cell_m
            far = (place - at).norm(dim=1)
            for index, ahead_m in enumerate(self.ahead_m):
                targets[index] = torch.where(going[index].unsqueeze(1), place, targets[index])
                going[index] &= far < ahead_m
        found = []
        for target in targets:
            arrived = (target - end).norm(dim=1, keepdim=True) < 1.5 * self.cell_m
            found.append(torch.where(arrived, goal, turned(target - at, -heading)))
        told = {"waypoints": torch.cat(found, 1), "path_cost": cost.clamp_max(LONGEST_M)}
        return told | {"remembered": self._remembered(memory).sqrt().clamp_max(self.range_m)}

    def seen(self, memory: Tensor) -> Tensor:
        """Cells [N, G, G] of hits, above 0; a view of `memory`."""
        return self._grids(memory)[:, 0]

    def _grids(self, memory: Tensor) -> Tensor:
        """Hits, and costs of paths from there, [N, 2, G, G]; a view of `memory`."""
        return memory[:, MAP : MAP + 2 * self.side * self.side].unflatten(1, (2, self.side, self.side))

    def _scans(self, memory: Tensor) -> Tensor:
        """Remembered hits [N, K, B, 2], m from the map's centre; a view of `memory`."""
        return memory[:, MAP + 2 * self.side * self.side :].unflatten(1, (self.scans, len(self.angles), 2))

    def _remembered(self, memory: Tensor) -> Tensor:
        """Squared distance [N, B] of the nearest remembered hit in the direction of each beam, infinite without one."""
        heading, away = memory[:, HEADING], self._scans(memory).flatten(1, 2) - self._at(memory).unsqueeze(1)
        cos, sin = heading.cos().unsqueeze(1), heading.sin().unsqueeze(1)
        x, y = cos * away[..., 0] + sin * away[..., 1] - self.lidar_x_m, cos * away[..., 1] - sin * away[..., 0]
        squared, around = x * x + y * y, x.abs() + y.abs()
        near = (squared < self.remembered_m**2) & (around > 0.0)
        share = torch.where(near, y / around, 0.0)  # a quarter turn is 1, as an angle, but not as evenly
        turn = torch.where(x < 0.0, torch.where(y < 0.0, -2.0 - share, 2.0 - share), share)
        sector = ((turn + 2.0) * (0.25 * SECTORS)).long().clamp_max(SECTORS - 1)
        # hits that are too far away or that no beam looks at fall into a column of their own
        beam = torch.where(near, self._beam_of_sector.to(memory.device)[sector].long(), len(self.angles))
        nearest = memory.new_full((len(memory), len(self.angles) + 1), torch.inf)
        return nearest.scatter_reduce_(1, beam, squared, "amin")[:, :-1]

    @cached_property
    def _beam_of_sector(self) -> Tensor:
        """Index [SECTORS] of the beam nearest to the middle of each sector; B for those that no beam is near."""
        share = 4.0 * (torch.arange(SECTORS) + 0.5) / SECTORS - 2.0
        x, y = 1.0 - share.abs(), torch.where(share.abs() <= 1.0, share, share.sign() * 2.0 - share)
        beams = torch.tensor(self.angles)
        off = torch.atan2(y, x).unsqueeze(1) - beams
        nearest = torch.atan2(off.sin(), off.cos()).abs().min(1)
        spacing = (beams[1:] - beams[:-1]).max()
        return torch.where(nearest.values <= 0.51 * spacing, nearest.indices, len(beams)).int()

    def _moved(self, memory: Tensor, velocity: Tensor) -> tuple[Tensor, Tensor]:
        """How far [N, 2], m, in the frame before, and by which angle [N] vehicles have moved in a period."""
        speed, rate = (0.5 * (memory[:, VELOCITY] + velocity)).unbind(1)
        turn, way = rate * self.dt_s, speed * self.dt_s
        return torch.stack((way * (0.5 * turn).cos(), way * (0.5 * turn).sin()), 1), turn

    def _plan(self, memory: Tensor, due: Tensor) -> None:
        """Find costs of the shortest paths to the goal from all cells, for the rows that are `due` [N]."""
        planned = memory[due]
        seen, left = self._grids(planned).unbind(1)
        apart = shortest_distances(torch.where(seen > 0.0, 0.0, torch.inf), torch.ones_like(seen), self.cell_m)
        share = (self.near_m - apart) / (self.near_m - self.blocked_m)
        cost = 1.0 + (self.near - 1.0) * share.clamp(0.0, 1.0).square()
        cost = torch.where(apart < self.blocked_m, self.blocked, cost)
        start = torch.full_like(cost, torch.inf).flatten(1)
        start.scatter_(1, self._index(self._cell(self._end(planned))).unsqueeze(1), 0.0)
        left.copy_(shortest_distances(start.view_as(cost), cost, self.cell_m))
        memory[due] = planned

    def _mark(self, memory: Tensor, lidar: Tensor) -> None:
        """Store the hits of ranges [N, B]; forget those that beams go through again and again, for they have moved.

        Exact hits of every `scans_every`th scan replace those of the oldest one.
        """
        seen = memory[:, MAP : MAP + self.side * self.side]  # flat
        far = self.cell_m * torch.arange(1, math.ceil(self.range_m / self.cell_m), device=lidar.device)
        free = far < lidar[:, ::APART, None] - 1.5 * self.cell_m
        cells, inside = self._cells(self._places(memory, far.expand(free.shape), slice(None, None, APART)))
        through = (free & inside).flatten(1).float()
        seen.sub_(FADES * torch.zeros_like(seen).scatter_reduce_(1, cells.flatten(1), through, "amax"))
        seen.clamp_min_(0.0)
        places, hit = self._places(memory, lidar.unsqueeze(2)).squeeze(2), lidar < self.range_m
        cells, inside = self._cells(places)
        seen.scatter_reduce_(1, cells, (inside & hit).float(), "amax")
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
    """`points` [..., 2] rotated by `angle` [...], rad."""
    cos, sin = angle.cos(), angle.sin()
    x, y = points.unbind(-1)
    return torch.stack((cos * x - sin * y, sin * x + cos * y), -1)
