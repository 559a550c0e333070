"""Episode handling for every simulator: masks, freezing, step limits, numbered initial states, checks, endings.

A simulator that subclasses `EpisodeEngine` defines `begin`, `advance` and `observe`; with `save` and `restore` it is a
`RestorableEngine`. Letters in shape comments: N environments, K executed actions of a chunk, A action dimension, M
selected environments.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.contract import Contract
from embodied.environment import OVERFLOW, Transition
from embodied.environments.wrapping import keep_capabilities
from embodied.errors import UserError

log = logging.getLogger(__name__)

STARTS_PER_SEED = 1 << 24
"""Initial states of seed s are numbered from s times this number."""
_FIRST: ContextVar[int] = ContextVar("first", default=0)
Light = Any
"""NumPy array or tensor; only operators and methods that both have are used."""
FLAGS = ("terminated", "truncated", "success", "diverged")


@dataclass
class Outcome:
    """Result of one chunk, on the CPU in NumPy's arrays or in tensors; the flags of frozen environments are ignored.

    `truncated` ends an episode before the step limit without a failure; `diverged` marks a simulation that blew up,
    which ends the episode as a failure.
    """

    reward: Light  # [N, K] float32, zero where not executed
    executed: Light  # [N, K] bool
    terminated: Light  # [N] bool
    success: Light  # [N] bool
    truncated: Light | None = None  # [N] bool
    diverged: Light | None = None  # [N] bool
    metrics: dict[str, Tensor] = field(default_factory=dict)  # see Transition, of all N environments
    actions: Tensor | None = None
    has_success: bool = True  # see Transition
    failures: dict[str, Tensor] = field(default_factory=dict)  # see Transition, of all N environments
    overflow: Light | None = None  # [N] bool, diverged environments whose simulator had no room for all contacts
    signals: dict[str, Light] = field(default_factory=dict)  # see Transition
    events: dict[str, Light] = field(default_factory=dict)  # see Transition, without "diverged"


class EpisodeEngine(ABC):
    """N episodes from numbered initial states; implements `embodied.environment.NumberedStarts`.

    Args:
        contract: of each environment; K is its `executed`.
        num_envs: N.
        step_limit: control steps after which an episode is truncated.
        task_names: names of the tasks; environment i runs task i modulo their number.
        instructions: each task as a sentence; its name if None.
        num_starts: initial states of each task; None: unlimited.
        seed: chooses the initial states of a reset without `starts`.
        device: of observations, rewards and flags.

    Raises:
        UserError: for impossible sizes or an impossible seed.
    """

    group = 1
    """Number of consecutive environments that share a world, see `embodied.environment.group_size`."""

    def __init__(
        self,
        contract: Contract,
        num_envs: int,
        step_limit: int,
        *,
        task_names: tuple[str, ...],
        instructions: tuple[str, ...] | None = None,
        num_starts: int | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        if min(num_envs, step_limit, len(task_names)) < 1:
            got = f"{len(task_names)} tasks, num_envs={num_envs}, step_limit={step_limit}"
            raise UserError(f"expected at least one task, one environment and one step, got {got}")
        if not 0 <= seed < 1 << 31:
            raise UserError(f"expected a seed in [0, 2^31), got {seed}")
        self.contract = contract
        self.num_envs = num_envs
        self.step_limit = step_limit
        self.task_names = task_names
        self.instructions = instructions or task_names
        self.num_starts = num_starts
        self.device = torch.device(device)
        self.seed = seed
        self.task_index = torch.arange(_FIRST.get(), _FIRST.get() + num_envs, device=self.device) % len(task_names)
        self.start = torch.full((num_envs,), -1, device=self.device)
        self.steps = torch.zeros(num_envs, dtype=torch.int64, device=self.device)
        self.terminated, self.truncated, self.success, self.diverged = torch.zeros(
            len(FLAGS), num_envs, dtype=torch.bool, device=self.device
        )
        self._chunk = (num_envs, contract.executed, *contract.action.shape)
        self._running = light(torch.ones(num_envs, dtype=torch.bool, device=self.device))  # no episode has ended
        self._used_starts = torch.zeros(len(task_names), dtype=torch.int64)
        self._all_started = False

    @abstractmethod
    def begin(self, ids: Tensor, starts: Tensor) -> None:
        """Set environments `ids` [M] to the initial states `starts` [M] of their tasks."""

    @abstractmethod
    def advance(self, actions: Tensor, remaining_steps: Tensor) -> Outcome:
        """Execute the first `remaining_steps` [N] actions of the chunk `actions` [N, K, A]; frozen environments have 0.

        Actions are finite and on the engine's device; the simulator enforces their limits.
        """

    @abstractmethod
    def observe(self) -> TensorDict:
        """Observations [N] of all environments, of frozen ones from the end of their episode.

        The caller owns the tensors.
        """

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Release all resources; no method may be called afterwards."""

    @property
    def done(self) -> Tensor:
        """Whether the episode was terminated or truncated, [N] bool."""
        return self.terminated | self.truncated

    def reset(self, mask: Tensor | None = None, starts: Tensor | None = None) -> TensorDict:
        """Start new episodes where `mask` [N] is True (everywhere if None); returns the observations of all.

        Args:
            mask: environments to reset; of a shared world all or none.
            starts: [N] initial states by number; the next ones of the stream if None.

        Raises:
            UserError: for initial states that do not exist.
            ValueError: for shapes other than [N], parts of worlds, or negative initial states.
        """
        ids = self._chosen(mask)
        if len(ids):
            numbers = self.next_starts(ids) if starts is None else self._vector("starts", starts)[ids].long()
            if bool((numbers < 0).any()):
                raise ValueError(f"expected initial states >= 0, got {numbers.tolist()}")
            if self.num_starts:
                check_starts(int(numbers.max()), self.num_starts)
            self.begin(ids, numbers)
            self.start, self.steps = self.start.index_copy(0, ids, numbers), self.steps.index_fill(0, ids, 0)
            self._set({name: getattr(self, name).index_fill(0, ids, False) for name in FLAGS})
        return self.observe()

    def step(self, actions: Tensor) -> Transition:
        """Execute the chunk `actions` [N, K, A]; environments whose episode has ended stay frozen.

        Raises:
            ValueError: for another shape, an action that is not finite, or before the first reset.
        """
        self._check(actions)
        # actions left until the step limit, at most a chunk, and 0 for frozen environments
        remaining_steps = least(self.step_limit - light(self.steps), self.contract.executed) * self._running
        return self.settle(self.advance(actions.to(self.device), tensor(remaining_steps)))

    def restart(self) -> None:
        """Count the steps of all environments from 0 again, in episodes that have not ended.

        Engines whose simulator can go on from where it is call it in their method `go_on`.
        """
        self.check_started()
        self.steps = torch.zeros_like(self.steps)
        self._set({name: torch.zeros_like(getattr(self, name)) for name in FLAGS})

    def settle(self, outcome: Outcome) -> Transition:
        """Update steps and flags with `outcome`, and return the transition."""
        steps = light(self.steps) + light(outcome.executed).sum(1)
        self.steps = tensor(steps)
        failed = light(outcome.terminated)
        succeeded = light(outcome.success)
        over = steps >= self.step_limit
        failures = dict(outcome.failures)
        if outcome.diverged is not None:
            failed = failed | light(outcome.diverged)
        if outcome.overflow is not None and bool(outcome.overflow.any()):
            failures[OVERFLOW] = tensor(light(outcome.overflow) & self._running)
        if outcome.truncated is not None:
            over = over | light(outcome.truncated)
        if (failed | over | succeeded).any():  # in most steps there is nothing to write down
            self._end(failed, over, succeeded, outcome.diverged, failures.get(OVERFLOW))
        events = {name: tensor(flags) for name, flags in outcome.events.items()}
        if outcome.diverged is not None:
            events["diverged"] = self.diverged
        return Transition(
            self.observe(),
            tensor(outcome.reward),
            tensor(outcome.executed),
            self.terminated,
            self.truncated,
            self.success,
            outcome.metrics,
            outcome.actions,
            has_success=outcome.has_success,
            failures=failures,
            signals={name: tensor(values) for name, values in outcome.signals.items()},
            events=events,
        )

    def next_starts(self, ids: Tensor) -> Tensor:
        """Numbers [M] of the next unused initial states of the tasks of environments `ids` [M], in order."""
        tasks = self.task_index[ids].cpu()
        index = self._used_starts[tasks] + rank(tasks)
        self._used_starts = self._used_starts + torch.bincount(tasks, minlength=len(self._used_starts))
        # seeds have disjoint streams of unlimited starts; limited ones are shared, and seeds begin at different ones
        numbers = (self.seed + index) % self.num_starts if self.num_starts else self.seed * STARTS_PER_SEED + index
        return numbers.to(self.device)

    def check_started(self) -> None:
        """Raise ValueError if an environment has no episode yet."""
        self._all_started = self._all_started or bool((self.start >= 0).all())
        if not self._all_started:
            raise ValueError("an environment has no episode yet; call reset() before step()")

    def _end(self, failed: Light, over: Light, won: Light, diverged: Light | None, overflow: Tensor | None) -> None:
        """Set the flags of running environments that failed (or diverged), are over or succeeded, [N] bool each.

        `overflow` flags environments that diverged for lack of contacts.
        """
        running = self._running
        flags = {
            "terminated": tensor(light(self.terminated) | (running & failed)),
            "truncated": tensor(light(self.truncated) | (running & over & ~failed)),
            "success": tensor(light(self.success) | (running & won)),
        }
        if diverged is not None:
            newly_diverged = running & light(diverged)
            self._report(tensor(newly_diverged), overflow)
            flags["diverged"] = tensor(light(self.diverged) | newly_diverged)
        self._set(flags)

    def _set(self, flags: Mapping[str, Tensor]) -> None:
        """Set flags [N] by name, as new tensors, because transitions hold the old ones."""
        vars(self).update(flags)
        self._running = ~light(self.done)

    def _report(self, diverged: Tensor, overflow: Tensor | None) -> None:
        for i in diverged.nonzero().flatten().tolist():
            cause = f" ({OVERFLOW})" if overflow is not None and bool(overflow[i]) else ""
            log.warning(
                f"the simulation diverged{cause} in {self.task_names[self.task_index[i]]}, initial state"
                f" {int(self.start[i])}, control step {int(self.steps[i])}: counted as a failure"
            )

    def _check(self, actions: Tensor) -> None:
        if actions.shape != self._chunk:
            raise ValueError(f"expected actions of shape {self._chunk}, got {tuple(actions.shape)}")
        self.check_started()
        # one maximum is cheaper than isfinite; the full check runs only if it is not finite
        largest = abs(light(actions.detach().float())).max()
        if not math.isfinite(largest) and not bool(actions.isfinite().all()):
            broken = (~actions.isfinite().all(-1).all(-1)).nonzero().flatten().tolist()
            raise ValueError(f"actions of environments {broken} are not finite; check the policy's output")

    def _vector(self, name: str, values: Tensor) -> Tensor:
        if values.shape != (self.num_envs,):
            raise ValueError(f"expected {name} of shape ({self.num_envs},), got {tuple(values.shape)}")
        return values.to(self.device)

    def _chosen(self, mask: Tensor | None) -> Tensor:
        """Indices [M] of the environments selected by `mask`."""
        if mask is None:
            return torch.arange(self.num_envs, device=self.device)
        mask = self._vector("mask", mask).bool()
        worlds = mask.view(-1, self.group)
        if bool((parts := worlds.any(1) != worlds.all(1)).any()):
            raise ValueError(
                f"the {self.group} environments of a world begin together; expected a mask of whole worlds, got parts "
                f"of {parts.nonzero().flatten().tolist()}"
            )
        return mask.nonzero().squeeze(1)


class RestorableEngine(EpisodeEngine):
    """EpisodeEngine whose state can be saved and restored; implements `embodied.environment.Restorable`."""

    @abstractmethod
    def save(self) -> dict[str, Any]:
        """Save the simulator's state as a tree that shares no memory with it."""

    @abstractmethod
    def restore(self, state: dict[str, Any]) -> None:
        """Restore the result of `save`; `start` and `steps` are already set."""

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue bit for bit, as a tree of tensors, arrays and numbers."""
        counters = {name: getattr(self, name).clone() for name in ("start", "steps", *FLAGS)}
        return {"simulator": self.save(), **counters, "seed": self.seed, "taken": self._used_starts.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> TensorDict:
        """Continue from `state_dict`; returns the observations of all environments.

        Raises:
            UserError: if the state is of other environments; then nothing is changed.
        """
        if len(state["start"]) != self.num_envs:
            saved = len(state["start"])
            raise UserError(f"the saved state has num_envs={saved}, got {self.num_envs}; use the saved number")
        for name, saved, expected in _pairs(state, self.state_dict()):
            if saved != expected:
                raise UserError(
                    f"the saved {name} has shape {saved}, expected {expected}; use the options and the release that it"
                    " was saved with, or go on from the run's weights with start_from="
                )
        self.start, self.steps = (state[name].to(self.device, copy=True) for name in ("start", "steps"))
        self._set({name: state[name].to(self.device, copy=True) for name in FLAGS})
        self.seed, self._used_starts, self._all_started = state["seed"], state["taken"].clone(), False
        self.restore(state["simulator"])
        return self.observe()


class Unnumbered:
    """Engine whose initial states cannot be chosen: an Environment with the other capabilities of `engine`.

    The engine still numbers and tracks its episodes.
    """

    def __init__(self, engine: EpisodeEngine) -> None:
        self.engine = engine
        self.contract = engine.contract
        self.num_envs = engine.num_envs
        self.device = engine.device
        self.task_names = engine.task_names
        self.instructions = engine.instructions
        self.task_index = engine.task_index
        self.close = engine.close
        keep_capabilities(self, engine)

    def reset(self, mask: Tensor | None = None) -> TensorDict:
        """See `Environment.reset`."""
        return self.engine.reset(mask)

    def step(self, actions: Tensor) -> Transition:
        """See `Environment.step`."""
        return self.engine.step(actions)


def check_starts(last: int, num_starts: int) -> None:
    """Raise UserError unless the initial state `last` is one of `num_starts`."""
    if last >= num_starts:
        raise UserError(
            f"initial state {last} does not exist: each task has {num_starts}, numbered 0 to {num_starts - 1}; use "
            "fewer episodes, or an earlier first one"
        )


@contextmanager
def first_environment(number: int) -> Iterator[None]:
    """Context in which engines begin with environment `number`, so that tasks are distributed over all processes."""
    token = _FIRST.set(number)
    try:
        yield
    finally:
        _FIRST.reset(token)


def light(values: Light) -> Light:
    """NumPy array that shares the memory of `values` on the CPU; `values` themselves on other devices.

    For a few environments the call dominates an operation, and torch's call takes several times as long as NumPy's:
    after a millisecond in a simulator, little of torch is left in the processor's caches.
    """
    return values.numpy() if isinstance(values, Tensor) and values.is_cpu else values


def least(values: Light, bound: int) -> Light:
    """Minimum of `values` and `bound`; NumPy's own clip looks up the limits of the type first."""
    return np.minimum(values, bound) if isinstance(values, np.ndarray) else values.clamp(max=bound)


def tensor(values: Light) -> Tensor:
    """Tensor of the `light` values, which shares their memory."""
    return torch.from_numpy(values) if isinstance(values, np.ndarray) else values


def rank(keys: Tensor) -> Tensor:
    """Number of equal entries that precede each of the numbers [M], [M]."""
    order = keys.argsort(stable=True)
    counts = torch.bincount(keys)
    ranks = torch.empty_like(keys)
    # in sorted order the rank is the position minus the position of the first equal key
    ranks[order] = torch.arange(len(keys)) - (counts.cumsum(0) - counts)[keys[order]]
    return ranks


def _pairs(saved: Mapping[str, Any], mine: Mapping[str, Any]) -> Iterator[tuple[str, tuple, tuple]]:
    """Names and shapes of the tensors and arrays in both; raises UserError if `saved` lacks one."""
    for name, value in mine.items():
        if name not in saved:
            raise UserError(f"the saved state has no {name}; use the options that it was saved with")
        if isinstance(value, Mapping):
            yield from _pairs(saved[name], value)
        elif hasattr(value, "shape") and hasattr(saved[name], "shape"):
            yield name, tuple(saved[name].shape), tuple(value.shape)
