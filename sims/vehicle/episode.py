"""Protocol of vehicle tasks: worlds, observations besides the lidar, rewards, endings of episodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.contract import TensorSpec
from sims.vehicle.geometry import Lidar
from sims.vehicle.vehicles import Model
from sims.vehicle.worlds import Maker

X, Y, YAW, FORWARD, LEFTWARD, YAW_RATE, STEERING = range(7)
"""Columns of the state, see `dynamics`."""


@dataclass
class Moment:
    """State of N vehicles at one time; `memory` [N, R] is the task's state of the episode."""

    state: Tensor  # [N, 7]
    ranges: Tensor  # [N, B] m, of the lidar
    steps: Tensor  # [N] int32, control steps so far
    memory: Tensor  # [N, R]
    world: TensorDict  # [N], see `worlds.Maker`
    map: Tensor = field(default_factory=lambda: torch.empty(0, 0))  # [N, M], see `local_map.LocalMap`; M = 0 without
    replaced: Tensor = field(default_factory=lambda: torch.empty(0))  # [N], 1 where a guard replaced the last command


@dataclass
class Outcome:
    """Result of a control step, all [N]: `done` ends an episode as a success; next `memory` [N, R]."""

    reward: Tensor
    done: Tensor
    memory: Tensor


class Mdp(Maker, Protocol):
    """A Markov decision process of one vehicle in numbered worlds, a frozen dataclass of its parameters."""

    INSTRUCTION: ClassVar[str]
    MODEL: ClassVar[Model]
    DT_S: ClassVar[float]
    SUBSTEPS: ClassVar[int]
    LIDAR: ClassVar[Lidar]
    ACTION: ClassVar[tuple[str, str]]
    OBSERVED: ClassVar[Mapping[str, TensorSpec]]
    STEP_LIMIT: ClassVar[int]
    ENDLESS: ClassVar[bool]
    """Whether a success truncates the episode (the task could continue) or terminates it."""

    def circles(self, now: Moment) -> Tensor:
        """Circles [N, C, 3] that the lidar may hit and the vehicle may touch, m, world."""
        ...

    def begin(self, state: Tensor, world: TensorDict) -> Tensor:
        """Memory [M, R] of episodes beginning in `state` [M, 7]."""
        ...

    def observe(self, now: Moment) -> dict[str, Tensor]:
        """Observations with the names in `OBSERVED`."""
        ...

    def outcome(self, before: Moment, after: Moment, hit: Tensor, action: Tensor, previous: Tensor) -> Outcome:
        """Reward and memory of the step from `before` to `after`, in which `hit` [N] touched something.

        The memory of `after` is not set yet. `action` and `previous` [N, 2] are in half ranges around the middle.
        """
        ...

    def metrics(self, now: Moment, success: Tensor, hit: Tensor) -> dict[str, Tensor]:
        """Metrics of the episodes, [N] each."""
        ...
