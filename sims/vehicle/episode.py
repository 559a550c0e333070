"""Tasks of vehicles: worlds, observations besides the lidar, rewards, endings of episodes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor

import sims.mdp
from sims.vehicle.geometry import Lidar
from sims.vehicle.vehicles import Model

X, Y, YAW, FORWARD, LEFTWARD, YAW_RATE, STEERING = range(7)
"""Columns of the state, see `dynamics`."""


def _none() -> Tensor:
    return torch.empty(0)


@dataclass
class Moment:
    """State of N vehicles at one time; `memory` [N, R] is the task's state of the episode.

    `action` and `previous` are the last two commands in half ranges around the middle of their limits.
    """

    state: Tensor  # [N, 7]
    ranges: Tensor  # [N, B] m, of the lidar
    steps: Tensor  # [N] int32, control steps so far
    memory: Tensor  # [N, R]
    world: TensorDict  # [N], see `Mdp.worlds`
    map: Tensor = field(default_factory=lambda: torch.empty(0, 0))  # [N, M], see `local_map.LocalMap`; M = 0 without
    replaced: Tensor = field(default_factory=_none)  # [N], 1 where a guard replaced the last command
    hit: Tensor = field(default_factory=_none)  # [N] bool, whether the vehicle has touched something in the episode
    succeeded: Tensor = field(default_factory=_none)  # [N] bool, whether the episode has ended with success
    action: Tensor = field(default_factory=_none)  # [N, 2]
    previous: Tensor = field(default_factory=_none)  # [N, 2]
    before: Moment | None = None  # one control step earlier


class Mdp(sims.mdp.Mdp):
    """A task of one vehicle in numbered worlds; hashable, and equal to tasks with the same worlds.

    A vehicle that touches something has failed, which terminates the episode whatever the task's functions return.
    """

    MODEL: ClassVar[Model]
    DT_S: ClassVar[float]
    SUBSTEPS: ClassVar[int]
    LIDAR: ClassVar[Lidar]
    ACTION: ClassVar[tuple[str, str]]

    def worlds(self, rng: np.random.Generator, count: int) -> dict[str, NDArray[Any]]:
        """`count` worlds, each drawn from `rng`.

        They are circles [M, C, 3] (centre, radius), segments [M, S, 4] (both ends), the vehicle's initial pose [M, 3],
        the route [M, P, 2] to drive, all in m and rad, world, the route's length_m [M], and the vehicle's initial
        speed_m_s [M].
        """
        raise NotImplementedError

    def circles(self, now: Moment) -> Tensor:
        """Circles [N, C, 3] that the lidar may hit and the vehicle may touch, m, world."""
        return now.world["circles"]

    def reset(self, state: Tensor, world: TensorDict) -> Tensor:
        """Memory [M, R] of episodes that begin in `state` [M, 7]."""
        raise NotImplementedError

    def failures(self, now: Moment) -> dict[str, Tensor]:
        """Cause of failure: a collision."""
        return {"collision": now.hit}
