"""The Environment protocol: Gymnasium's words, torch tensors, an action chunk as the only unit of stepping.

Letters in shape comments: N environments, K executed actions of a chunk, A action dimension.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.contract import Contract


@dataclass
class Transition:
    """What one chunk did.

    A finished environment freezes until its reset: `executed` is False after the step at which its episode ended,
    `reward` is zero there, and `observation` is the true observation at the end of what ran, never that of the next
    episode. `terminated`, `truncated` and `success` stay as they were when it ended. `metrics` are quantities of the
    episode so far, by names that carry their unit; NaN where one is not defined.
    """

    observation: TensorDict  # [N]
    reward: Tensor  # [N, K] float, zero where not executed
    executed: Tensor  # [N, K] bool
    terminated: Tensor  # [N] bool, the task ended (no bootstrap)
    truncated: Tensor  # [N] bool, the step limit was reached (bootstrap from `observation`)
    success: Tensor  # [N] bool
    metrics: dict[str, Tensor] = field(default_factory=dict)  # [N] each
    actions: Tensor | None = None  # [N, K, A] what was executed, where a person may take over; None: what was given
    human: Tensor | None = None  # [N, K] bool, which of `actions` are the person's
    diverged: Tensor | None = None  # [N] bool, terminated because the simulator's numbers blew up; None: none ever are

    @property
    def done(self) -> Tensor:
        """Episode ended either way, [N] bool."""
        return self.terminated | self.truncated


@runtime_checkable
class Environment(Protocol):
    """N environments stepped together by action chunks; there is no automatic reset."""

    contract: Contract
    num_envs: int
    device: torch.device

    def reset(self, mask: Tensor | None = None, seed: int | None = None) -> TensorDict:
        """Start new episodes where `mask` [N] is True (everywhere if None); returns observations of all, batch [N]."""
        ...

    def step(self, actions: Tensor) -> Transition:
        """Execute the chunk `actions` [N, K, A]; environments whose episode has ended stay frozen."""
        ...


@runtime_checkable
class StartEnvironment(Environment, Protocol):
    """An Environment whose episodes start from numbered initial states of numbered tasks.

    Initial state `start` of task `task_index` is the same in every run, which makes evaluations repeatable and lets
    a learner return to a state it failed from.
    """

    task_names: tuple[str, ...]
    task_index: Tensor  # [N] int, the task that environment i runs
    start: Tensor  # [N] int, the initial state of its running episode
    steps: Tensor  # [N] int, control steps executed in it
    step_limit: int
    num_starts: int | None  # initial states of each task; None: no end of them

    def reset(self, mask: Tensor | None = None, seed: int | None = None, starts: Tensor | None = None) -> TensorDict:
        """As Environment.reset; `starts` [N] names initial states, else the next ones of a seeded stream are used."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue bit for bit, as a tree of tensors and JSON values."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> TensorDict:
        """Continue from `state_dict`; returns the observations of all environments."""
        ...


@runtime_checkable
class SharedEnvironment(Protocol):
    """Also a StartEnvironment: `group` consecutive environments share a world, in which they begin and end together.

    The initial state of a world is that of the number that its first environment is given.
    """

    group: int


@runtime_checkable
class DifferentiableEnvironment(StartEnvironment, Protocol):
    """A StartEnvironment whose `step` carries gradients from actions and state to reward and observation."""

    def detach(self) -> None:
        """Cut the graph: what follows carries gradients from the present state on alone."""
        ...
