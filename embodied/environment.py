"""Protocols of simulators and robots: what training needs, and optional capabilities.

An `Environment` has Gymnasium's vocabulary with torch tensors; a step executes a whole action chunk. Optional
capabilities are separate protocols: `NumberedStarts` makes evaluations repeatable, `Restorable` lets a run continue bit
for bit. They are used where available; reports list missing ones. Some environments have further members, which
functions look up: `group_size`, `own_resets`, `own_help`, `show_values`, `in_real_time`, `notes` for the report,
`go_on` of simulators that begin an episode where they are, `embodied.scene.viewable.view`, and `unroll` of
`embodied.rollout.differentiable`. Letters in shape comments: N environments, K executed actions of a chunk, A action
dimension.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.contract import Contract

OVERFLOW = "no room for contacts"
"""Failure of diverged episodes whose simulator had no room for all contacts or constraints."""
ODD_EVENTS = ("diverged", "lost", "pushed")
"""Events whose number of episodes is reported, if there are any; for other events the share is reported.

diverged: the episode terminated because the simulation blew up. lost: the episode terminated because the simulator's
process died, which counts as diverged, too. pushed: a person pushed a robot or object (`embodied.viewer`).
"""


@dataclass
class Transition:
    """Result of one chunk.

    A finished environment freezes until its reset: `executed` is False after the step at which its episode ended,
    `reward` is zero there, and `observation` is the true observation after the last executed step, never that of the
    next episode. `terminated`, `truncated` and `success` keep their values from its end. A chunk may be cut short in
    the middle of an episode, where a person hands a robot back: `executed` is False from there on, and `actions` repeat
    the last executed one. An episode may also end before the first action of a chunk, by a robot's fault: nothing is
    executed, and `truncated` is True. `metrics` are quantities of
    the episode so far, with the unit in their names; NaN where undefined. `failures` are flags by reason, where the
    simulator knows one: for an episode that ends without success the first that is True is reported, else whether it
    ended early or its time was over. Without `has_success` the environment does not define
    success: `success` is False, and returns are reported instead.

    `signals` are values by name in addition to the reward, such as costs or energy; `events` are flags by name of the
    chunk, or of the episode so far. Reports give the mean over episodes of a signal's sum, and the share of
    episodes with an event (`ODD_EVENTS`: their number). An environment has the same names in every step. The signal
    "human" marks actions of a person, "takeovers" the first of each sequence of them.
    """

    observation: TensorDict  # [N]
    reward: Tensor  # [N, K] float, zero where not executed
    executed: Tensor  # [N, K] bool
    terminated: Tensor  # [N] bool, the task ended (no bootstrap)
    truncated: Tensor  # [N] bool, the step limit was reached (bootstrap from `observation`)
    success: Tensor  # [N] bool
    metrics: dict[str, Tensor] = field(default_factory=dict)  # [N] each
    actions: Tensor | None = None  # [N, K, A] as executed, where a person may take over; None: as passed
    has_success: bool = True
    failures: dict[str, Tensor] = field(default_factory=dict)  # [N] bool each
    signals: dict[str, Tensor] = field(default_factory=dict)  # [N, K] each, zero where not executed
    events: dict[str, Tensor] = field(default_factory=dict)  # [N] bool each

    @property
    def done(self) -> Tensor:
        """Whether the episode was terminated or truncated, [N] bool."""
        return self.terminated | self.truncated


@runtime_checkable
class Environment(Protocol):
    """N environments stepped together by action chunks; there is no automatic reset.

    Every attribute can be read before the first reset. The next call of `reset` or `step` may overwrite the tensors
    that either returned (simulators on GPUs reuse buffers): copy what you keep.
    """

    contract: Contract
    num_envs: int
    device: torch.device
    task_names: tuple[str, ...]
    instructions: tuple[str, ...]  # each task as a sentence
    task_index: Tensor  # [N] int, the task that environment i runs

    def reset(self, mask: Tensor | None = None) -> TensorDict:
        """Start new episodes where `mask` [N] is True (everywhere if None); returns observations of all, batch [N]."""
        ...

    def step(self, actions: Tensor) -> Transition:
        """Execute the chunk `actions` [N, K, A]; environments whose episode has ended stay frozen."""
        ...

    def close(self) -> None:
        """Release all resources; no method may be called afterwards."""
        ...


@runtime_checkable
class NumberedStarts(Environment, Protocol):
    """An Environment whose episodes start from numbered initial states.

    Initial state `start` of task `task_index` is the same in every run, which makes evaluations repeatable and lets
    a learner return to a state it failed from.
    """

    start: Tensor  # [N] int, number of the running episode's initial state
    step_limit: int  # control steps after which an episode is truncated
    num_starts: int | None  # initial states of each task; None: unlimited

    def reset(self, mask: Tensor | None = None, starts: Tensor | None = None) -> TensorDict:
        """See Environment.reset; `starts` [N] are the initial states; None: the next ones of a seeded stream."""
        ...


@runtime_checkable
class Restorable(Protocol):
    """An Environment whose state can be saved and restored."""

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue bit for bit, as a tree of tensors and JSON values."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> TensorDict:
        """Continue from `state_dict`; returns the observations of all environments."""
        ...


@runtime_checkable
class SwitchableEnvironment(Environment, Protocol):
    """An Environment that can switch between distributions and splits.

    For simulators that can exist only once per process: training and all evaluations share one.
    """

    def switch(self, distribution: str, split: str) -> None:
        """Begin episodes of `distribution` and `split` ("train", "eval") from the next reset, which must be of all."""
        ...


@runtime_checkable
class DifferentiableEnvironment(Environment, Protocol):
    """An Environment whose `step` carries gradients from actions and state to reward and observation."""

    def detach(self) -> None:
        """Cut the graph: gradients of later steps end at the current state."""
        ...


class Resets(Protocol):
    """Resets of a scene by an Environment itself, its attribute `scene_resets`, with what is learned for them."""

    @property
    def note(self) -> str:
        """Text for a progress bar."""
        ...

    def metrics(self) -> dict[str, float]:
        """Metrics by name, of the time since the last call."""
        ...

    def record(self) -> dict[str, Any]:
        """Counts of the whole run for its report, as a JSON object."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue, which shares no memory with what goes on."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        ...


class Help(Protocol):
    """Help within a budget that an Environment's policy gets, its attribute `scripted_help`."""

    def state_dict(self) -> dict[str, Any]:
        """Part of the budget that is used, by name."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        ...


def own_resets(env: Environment) -> Resets | None:
    """How `env` brings its scene back: its attribute `scene_resets`, None without one."""
    return getattr(env, "scene_resets", None)


def own_help(env: Environment) -> Help | None:
    """Who helps the policy in `env` within a budget: its attribute `scripted_help`, None without one."""
    return getattr(env, "scripted_help", None)


def group_size(env: Environment) -> int:
    """Number of consecutive environments that share a world: attribute `group` of `env`, 1 without.

    They begin and end together; the start of a world's first environment is the initial state of the world.
    """
    return getattr(env, "group", 1)


def in_real_time(env: Environment) -> bool:
    """Whether `env` is a robot with a person: attribute `real_time` of `env`, False without.

    Its steps cannot be repeated, and a reset of no episode returns what is observed now. Once a stop of the run is
    requested (`embodied.runtime.interrupt.STOPPING`) it ends its episode and returns at once from then on, without
    executing anything.
    """
    return getattr(env, "real_time", False)


def show_values(env: Environment, value: Tensor | None, counts: Tensor | None) -> None:
    """Before a step, show people who watch `env` the policy's `value` [N], and which episodes count, [N] bool.

    None: no value; all episodes. Environments without a method `show_values` are not watched.
    """
    if (show := getattr(env, "show_values", None)) is not None:
        show(value, counts)


def clip_gradient(actions: Tensor, most: float) -> None:
    """Clip every environment's gradient with respect to `actions` [N, ...] to norm `most`, also for earlier steps."""
    if actions.requires_grad and most < math.inf:
        actions.register_hook(lambda grad: grad.flatten(1).renorm(2, 0, most).view_as(grad))


def capability_notes(env: Environment) -> list[str]:
    """Notes for a report on the capabilities that `env` lacks, and its own `notes`."""
    if in_real_time(env):
        return [
            "A robot's initial states are neither numbered nor restored: evaluations do not run the same episodes,"
            " gains are not paired, and a resumed run begins new episodes."
        ]
    notes = []
    if not isinstance(env, NumberedStarts):
        notes.append(
            "The simulator has no numbered initial states: evaluations do not run the same episodes, gains are"
            " not paired, and learners cannot retry failed states."
        )
    if not isinstance(env, Restorable):
        notes.append("The simulator's state cannot be restored: a resumed run begins new episodes.")
    return notes + list(getattr(env, "notes", ()))
