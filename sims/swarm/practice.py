"""Training aids of arXiv 2309.13285: an obstacle curriculum, and replay of collisions.

Letters: W worlds.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from sims.swarm.worlds import Worlds

FIRST_LEVEL = 0.5
RISE = 0.1
RISES_AT = 0.25
WINDOW = 64
"""Initial share of the obstacles, its increase, the share of collision-free worlds from which on it increases, and the
number of worlds over which that share is computed.
"""
EVERY = 50
SLOTS = 3
"""Control steps between snapshots, and their number: a collision is replayed from 1 to 1.5 s before."""
CAPACITY = 256
"""Number of stored collisions; the oldest are replaced."""


class Curriculum:
    """Share of the obstacles in new worlds, `level`, from `FIRST_LEVEL` to 1."""

    def __init__(self) -> None:
        self.level = FIRST_LEVEL
        self.ended = 0
        self.free = 0

    def add(self, ended: int, free: int) -> None:
        """Count worlds that `ended`, of which `free` had no collision."""
        self.ended, self.free = self.ended + ended, self.free + free
        if self.ended >= WINDOW:
            if self.free >= RISES_AT * self.ended:
                self.level = min(1.0, self.level + RISE)
            self.ended = self.free = 0


class Replay:
    """Snapshots of worlds shortly before a collision."""

    def __init__(self, worlds: Worlds) -> None:
        self.recent = [worlds.at(torch.arange(len(worlds.leg_s))) for _ in range(SLOTS)]
        self.archive = worlds.at(torch.arange(1).expand(CAPACITY))
        self.count = self.clock = 0

    def begin(self, worlds: Worlds, ids: Tensor) -> None:
        """Replace the snapshots of worlds `ids` [V], which have been reset."""
        for snapshot in self.recent:
            snapshot.put(ids, worlds.at(ids))

    def remember(self, worlds: Worlds) -> None:
        """Count a control step; store a snapshot of all `worlds` if one is due."""
        self.clock = (self.clock + 1) % EVERY
        if self.clock == 0:
            self.recent = [*self.recent[1:], worlds.at(torch.arange(len(worlds.leg_s)))]

    def keep(self, ids: Tensor) -> None:
        """Keep the oldest snapshot of worlds `ids` [V], which had a collision."""
        ids = ids[:CAPACITY]
        place = (self.count + torch.arange(len(ids))) % CAPACITY
        self.archive.put(place, self.recent[0].at(ids))
        self.count += len(ids)

    def take(self, u: Tensor) -> Worlds:
        """Stored worlds selected by uniform numbers [V]."""
        return self.archive.at((u * min(self.count, CAPACITY)).long())

    def state_dict(self) -> dict[str, Any]:
        """Snapshots and counters, as a tree."""
        return {
            "recent": {str(number): snapshot.tensors() for number, snapshot in enumerate(self.recent)},
            "kept": self.archive.tensors(),
            "count": self.count,
            "clock": self.clock,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.recent = [_worlds(state["recent"][str(number)]) for number in range(SLOTS)]
        self.archive = _worlds(state["kept"])
        self.count = state["count"]
        self.clock = state["clock"]


def _worlds(tensors: dict[str, Tensor]) -> Worlds:
    return Worlds(**{field.name: tensors[field.name].clone() for field in fields(Worlds)})
