"""`LocalMap` in C, which is compiled at first use: the same numbers, tens of times faster on the CPU."""

from __future__ import annotations

import ctypes
import math
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embodied import native
from embodied.native import choose, pointers
from embodied.navigation.local_map import (
    AGE,
    BEAM_STRIDE,
    FADES,
    GOAL,
    HEADING,
    LONGEST_M,
    MAP,
    NOWHERE_M,
    SECTORS,
    LocalMap,
)


@cache
def maps() -> Any:  # noqa: ANN401 - a library has the functions it has
    """Compile the functions of maps.c, without contraction of products and sums; needs a compiler."""
    source = Path(__file__).with_name("maps.c").read_text(encoding="utf-8")
    long = ctypes.c_long
    number = ctypes.c_float
    pointer = ctypes.c_void_p
    types = {
        "shortest_distances": [long, long, number, number, pointer, pointer],
        "path_length_at": [long, long, *[number] * 3, *[pointer] * 3],
        "map_mark": [pointer, long, *[pointer] * 5],
        "map_plan": [pointer, long, *[pointer] * 3],
        "map_observe": [pointer, long, *[pointer] * 8],
        "map_remembered": [pointer, long, *[pointer] * 5],
        "clearance": [long, number, number, long, pointer, long, pointer, pointer],
    }
    return native.declared(native.load(source, (*native.FLAGS, "-ffp-contract=off")), types)


class _Numbers(ctypes.Structure):
    """Structure `Map` of maps.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("length", "age", "hits", "scans_from", "side", "beams", "apart", "far")),
        *((name, ctypes.c_int64) for name in ("ahead", "scans", "scans_every", "sectors")),
        *((name, ctypes.c_float) for name in ("cell", "range", "lidar_x", "fades", "near_m", "blocked_m")),
        *((name, ctypes.c_float) for name in ("between_m", "near", "blocked", "aslant", "nowhere")),
        ("remembered_squared", ctypes.c_float),
    )


class CompiledMap(LocalMap):
    """LocalMap in C on the CPU where there is a compiler, else the same as `LocalMap`."""

    def observe(self, memory: Tensor) -> dict[str, Tensor]:
        """See `LocalMap.observe`."""
        if not _compiled(memory):
            return super().observe(memory)
        out = torch.empty(len(memory), 2 * len(self.ahead_m))
        cost = torch.empty(len(memory), 1)
        pose = self._at(memory), _direction(memory), self._end(memory)
        inputs = torch.tensor(self.ahead_m), *pose, memory[:, GOAL].contiguous(), memory
        maps().map_observe(ctypes.byref(self._numbers), len(memory), *pointers(*inputs, out, cost))
        observation = {"waypoints": out, "path_cost": cost.clamp_max(LONGEST_M)}
        return observation | {"remembered": self._remembered(memory).sqrt().clamp_max(self.range_m)}

    def _remembered(self, memory: Tensor) -> Tensor:
        if not _compiled(memory):
            return super()._remembered(memory)
        out = torch.empty(len(memory), len(self.angles))
        inputs = self._at(memory), _direction(memory), self._beam_of_sector, memory
        maps().map_remembered(ctypes.byref(self._numbers), len(memory), *pointers(*inputs, out))
        return out

    def _mark(self, memory: Tensor, lidar: Tensor) -> None:
        if not _compiled(memory):
            return super()._mark(memory, lidar)
        inputs = self._at(memory), _direction(memory), self._directions, lidar.contiguous(), memory
        maps().map_mark(ctypes.byref(self._numbers), len(memory), *pointers(*inputs))

    def _plan(self, memory: Tensor, due: Tensor) -> None:
        if not _compiled(memory):
            return super()._plan(memory, due)
        inputs = due, self._end(memory), memory  # alive until the call returns
        maps().map_plan(ctypes.byref(self._numbers), len(memory), *pointers(*inputs))

    @cached_property
    def _directions(self) -> Tensor:
        """Cosine and sine [B, 2] of the beams."""
        angles = torch.tensor(self.angles)
        return torch.stack((angles.cos(), angles.sin()), 1)

    @cached_property
    def _numbers(self) -> _Numbers:
        return _Numbers(
            self.size,
            AGE,
            MAP,
            MAP + 2 * self.side * self.side,
            self.side,
            len(self.angles),
            BEAM_STRIDE,
            math.ceil(self.range_m / self.cell_m) - 1,
            len(self.ahead_m),
            self.scans,
            self.scans_every,
            SECTORS,
            self.cell_m,
            self.range_m,
            self.lidar_x_m,
            FADES,
            self.near_m,
            self.blocked_m,
            self.near_m - self.blocked_m,
            self.near,
            self.blocked,
            self.cell_m * math.sqrt(2.0),
            NOWHERE_M,
            self.remembered_m * self.remembered_m,
        )


def _compiled(memory: Tensor) -> bool:
    return choose(None, memory.device) == "c"


def _direction(memory: Tensor) -> Tensor:
    """Cosine and sine [N, 2] of headings."""
    heading = memory[:, HEADING]
    return torch.stack((heading.cos(), heading.sin()), 1)
