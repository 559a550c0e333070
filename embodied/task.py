"""Protocols of the parts of a training run: the task, the learner, and the configs of policy and learner."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from numpy.typing import NDArray

from embodied.contract import Contract
from embodied.data.episodes import Episodes
from embodied.environment import Environment
from embodied.errors import UserError
from embodied.policy import Policy, TrainablePolicy
from embodied.rollout.rollout import Collector, Rollout
from embodied.rollout.starts import Starts
from embodied.world import World

STARTS = 50
"""Default number of initial states of each task in an evaluation."""


class Task(Protocol):
    """A task to learn; training uses the first of its `distributions`, evaluation all of them."""

    name: str
    distributions: tuple[str, ...]

    @property
    def asset_kind(self) -> str | None:
        """Kind of the objects' assets: "official" or "stand-in"; None without assets."""
        ...

    def contract(self, distribution: str) -> Contract:
        """Contract of environments of `distribution`, without creating one."""
        ...

    def environment(
        self, num_envs: int, distribution: str, split: str, seed: int = 0, device: str = "cpu"
    ) -> Environment:
        """Create environments that start from the `split` ("train" or "eval") of `distribution`.

        They run on `device`, the policy's, if the simulator can, else on the CPU.
        """
        ...

    def demonstrations(self, directory: Path, seed: int) -> Episodes | None:
        """Successful episodes with an observation before every step; recorded once, then read from `directory`.

        None: the task has none and is learned from scratch.
        """
        ...

    def video(
        self, path: Path, policies: Mapping[str, Policy], device: str, distribution: str | None = None, first: int = 0
    ) -> None:
        """Write a video of each policy, by caption, from the same starts, and optionally a picture of paths next to it.

        The starts are the initial states from `first` on of `distribution`, by default that of training.
        """
        ...


@runtime_checkable
class BaselineTask(Task, Protocol):
    """A task with planners or controllers to compare learned policies with, on the same episodes."""

    def baselines(self) -> Mapping[str, Policy]:
        """Baselines by name, tuned on training episodes only."""
        ...


def planners(task: Task) -> dict[str, Policy]:
    """Baselines of `task`, by name.

    Raises:
        UserError: if it has none.
    """
    if not isinstance(task, BaselineTask):
        raise UserError(f"{task.name} has no planners to compare with; use baselines=false")
    return dict(task.baselines())


@runtime_checkable
class VariedTask(Task, Protocol):
    """A task with variants, such as other wordings of instructions, on which only the final policy is evaluated."""

    @property
    def variants(self) -> tuple[str, ...]:
        """Names of the variants, which `environment` accepts as distributions."""
        ...


@runtime_checkable
class RecordedTask(Task, Protocol):
    """A task whose benchmark has files of demonstrations in a format of its own."""

    def demonstration_files(self, source: Path) -> list[Path]:
        """Files of that format: `source` itself, or those in it; none if there are none."""
        ...

    def recorded_demonstrations(self, source: Path, directory: Path) -> Episodes:
        """Episodes of those files in `source`; read once, then from `directory`."""
        ...


@runtime_checkable
class DemonstratingTask(Task, Protocol):
    """A task with a known upper bound of the size of its own demonstrations."""

    @property
    def most_demonstrated(self) -> int:
        """Largest number of control steps of all demonstrations."""
        ...


class Convention(Protocol):
    """Meaning of a benchmark's published LeRobot datasets; ours contain their contract instead."""

    rates_hz: Sequence[float]
    """Rates that they declare, which may differ from the rate of the actions."""
    cameras: Mapping[str, Sequence[str]]
    """Names of the features by picture of the contract."""
    mirrored: bool
    """Whether left and right are exchanged in their pictures."""
    features: Sequence[str]
    """Optional features that `convert` reads, in addition to the state and the action."""

    absent: Mapping[str, str]
    """Advice about observations that they lack, by name."""

    @property
    def names(self) -> Sequence[str]:
        """Names of the run's tasks."""
        ...

    def task_index(self, text: str) -> int | None:
        """Index of the task that a dataset describes by `text`; None if it is not one of the run's."""
        ...

    def convert(self, columns: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Convert an episode's features to observations and "action" of the contract, without pictures and text.

        Raises:
            UserError: for features of other sizes or meanings.
        """
        ...


@runtime_checkable
class PublishedTask(Task, Protocol):
    """A task whose benchmark is published as LeRobot datasets."""

    def convention(self) -> Convention:
        """Convention of those datasets."""
        ...


def measured(task: Task, *others: Task) -> tuple[str, ...]:
    """Distributions of `task`, then its variants; for several tasks those that all have."""
    own = (*task.distributions, *(task.variants if isinstance(task, VariedTask) else ()))
    return tuple(name for name in own if all(name in measured(other) for other in others))


@runtime_checkable
class SimulatedTask(Task, Protocol):
    """A task that several simulators can run, one of which its option `sim` chooses."""

    @property
    def sims(self) -> tuple[str, ...]:
        """Names of the available simulators."""
        ...

    @property
    def usual_starts(self) -> int | None:
        """Number of initial states of each task in evaluations in the chosen simulator; None: the default."""
        ...


@dataclass(frozen=True)
class Sweep:
    """Values of one condition, ascending, in `unit`; `means` describes their meaning."""

    unit: str
    means: str
    values: tuple[float, ...]


@runtime_checkable
class MarginTask(Task, Protocol):
    """A task whose conditions can be swept: the point 1.2 of "mass" is its distribution "mass=1.2"."""

    @property
    def margins(self) -> Mapping[str, Sweep]:
        """Sweeps by the condition's name."""
        ...


def usual_starts(tasks: Sequence[Task]) -> int:
    """Default number of initial states of each task in an evaluation of all `tasks`."""
    return min((task.usual_starts or STARTS for task in tasks if isinstance(task, SimulatedTask)), default=STARTS)


def check_sims(task: Task, sims: Sequence[str]) -> None:
    """Check that `task` can run in each of `sims`.

    Raises:
        UserError: with the simulators in which it can run.
    """
    available = task.sims if isinstance(task, SimulatedTask) else ()
    for name in sims:
        if not available:
            raise UserError(f"{task.name} runs in one simulator only; leave out sim={name}")
        if name not in available:
            raise UserError(f"{task.name} does not run in sim={name}; expected one of {', '.join(available)}")


class PolicyConfig(Protocol):
    """Config that builds a policy for a contract."""

    def build(self, contract: Contract) -> TrainablePolicy:
        """Build the policy."""
        ...


class Learner(Protocol):
    """Reinforcement learner; `starts`, if not None, chooses the initial states of episodes."""

    @property
    def collector(self) -> Callable[[Environment, Policy, torch.Generator, Starts | None], Collector]:
        """Factory of the collector, from environment, policy, noise generator and `starts`."""
        ...

    @property
    def starts(self) -> Starts | None:
        """Choice of initial states when environments restart; None: the environment's own."""
        ...

    @property
    def gradient_steps(self) -> int:
        """Gradient steps taken so far."""
        ...

    def parts(self) -> Mapping[str, Any]:
        """Networks, optimisers, replays and nested learners by name; `algorithms.parts.Composite` lists them."""
        ...

    def update(self, rollout: Rollout, progress: float, world: World = ...) -> dict[str, float]:
        """Learn from one rollout of each process of `world`; `progress` is the share of training done, 0 to 1.

        Returns metrics.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue, except the policy."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        ...


class LearnerConfig(Protocol):
    """Config that builds a learner, which collects `rollout_length` chunks per environment and iteration."""

    rollout_length: int

    @property
    def reads_demonstrations(self) -> bool:
        """Whether its learner uses demonstrations; otherwise runs without SFT do not record them."""
        ...

    @property
    def max_staleness(self) -> int:
        """Updates that a rollout's policy may be behind; 0: each rollout is used before the next one is collected."""
        ...

    def build(
        self,
        policy: TrainablePolicy,
        demonstrations: Episodes | None,
        env: Environment,
        generator: torch.Generator,
    ) -> Learner:
        """Build the learner of `policy` in `env`.

        Raises:
            UserError: if it needs demonstrations and there are none.
        """
        ...


@runtime_checkable
class RemotelyCollected(LearnerConfig, Protocol):
    """A learner of independent rollouts: each may come from another collector, and be some updates old.

    Learners that assemble episodes from successive rollouts do not qualify.
    """

    def remote_starts(self, env: Environment, generator: torch.Generator) -> Starts | None:
        """Choice of the initial states of a collector in another process, in its own environments `env`.

        Raises:
            UserError: if only the learner's process can choose them.
        """
        ...


class OfflineLearner(Protocol):
    """Learner of stored episodes, such as supervised fine-tuning or offline reinforcement learning."""

    @property
    def gradient_steps(self) -> int:
        """Gradient steps taken so far."""
        ...

    def parts(self) -> Mapping[str, Any]:
        """Networks and optimisers by name; `algorithms.parts.Composite` lists them."""
        ...

    def fit(self, episodes: Episodes, steps: int, world: World = ...) -> Mapping[str, float]:
        """Take `steps` gradient steps on `episodes`, whose samples the processes of `world` share; returns metrics."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue, except the policy."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        ...


class OfflineLearnerConfig(Protocol):
    """Config that builds an offline learner, which takes `steps` gradient steps."""

    steps: int

    def build(self, policy: TrainablePolicy, generator: torch.Generator) -> OfflineLearner:
        """Build the learner of `policy`; `generator` draws minibatches, the same in every process."""
        ...
