"""What training needs of a simulator or a robot, and what some of them can do beyond that.

An `Environment` speaks Gymnasium's words in torch tensors, with an action chunk as the only unit of stepping. What not
every one can do is a capability of its own: `NumberedStarts` repeats evaluations, `Restorable` continues a run bit for
bit. Both are used where they are, and a report says where they were not. Letters in shape comments: N environments, K
executed actions of a chunk, A action dimension.
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
    """N environments stepped together by action chunks; there is no automatic reset.

    All but the observations can be read before the first reset. What `reset` and `step` return may be written over by
    the next call of either: simulators on GPUs have buffers, who keeps something copies it.
    """

    contract: Contract
    num_envs: int
    device: torch.device
    task_names: tuple[str, ...]
    instructions: tuple[str, ...]  # what each task asks for, in words
    task_index: Tensor  # [N] int, the task that environment i runs

    def reset(self, mask: Tensor | None = None) -> TensorDict:
        """Start new episodes where `mask` [N] is True (everywhere if None); returns observations of all, batch [N]."""
        ...

    def step(self, actions: Tensor) -> Transition:
        """Execute the chunk `actions` [N, K, A]; environments whose episode has ended stay frozen."""
        ...

    def close(self) -> None:
        """Free what the simulator holds; nothing else may be called after."""
        ...


@runtime_checkable
class NumberedStarts(Environment, Protocol):
    """An Environment whose episodes start from numbered initial states.

    Initial state `start` of task `task_index` is the same in every run, which makes evaluations repeatable and lets
    a learner return to a state it failed from.
    """

    start: Tensor  # [N] int, the initial state of its running episode
    step_limit: int  # control steps after which an episode is truncated
    num_starts: int | None  # initial states of each task; None: no end of them

    def reset(self, mask: Tensor | None = None, starts: Tensor | None = None) -> TensorDict:
        """As Environment.reset; `starts` [N] names initial states, else the next ones of a seeded stream are used."""
        ...


@runtime_checkable
class Restorable(Protocol):
    """An Environment that can be put back to where it was."""

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue bit for bit, as a tree of tensors and JSON values."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> TensorDict:
        """Continue from `state_dict`; returns the observations of all environments."""
        ...


@runtime_checkable
class SharedWorlds(Protocol):
    """An Environment in which `group` consecutive environments share a world, and begin and end together.

    The initial state of a world is that of the number that its first environment is given.
    """

    group: int


@runtime_checkable
class SwitchableEnvironment(Environment, Protocol):
    """An Environment that serves every distribution and split by turns.

    For simulators of which a process can hold one alone: training and all evaluations share it.
    """

    def switch(self, distribution: str, split: str) -> None:
        """From the next reset on, which must be of all, begin episodes of `split` ("train", "eval") there."""
        ...


@runtime_checkable
class DifferentiableEnvironment(Environment, Protocol):
    """An Environment whose `step` carries gradients from actions and state to reward and observation."""

    def detach(self) -> None:
        """Cut the graph: what follows carries gradients from the present state on alone."""
        ...
