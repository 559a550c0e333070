"""Parts of a training run: the task, the learner, and the configs of policy and learner."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor

from embodied.contract import Contract
from embodied.data.episodes import Episodes
from embodied.environment import Environment
from embodied.errors import UserError
from embodied.export.conditions import Conditions
from embodied.policy import Policy, TrainablePolicy
from embodied.rollout.rollout import Collector, Rollout
from embodied.rollout.starts import Starts
from embodied.saving.starting_point import StartingPoint
from embodied.world import World

STARTS = 50
"""Default number of initial states of each task in an evaluation."""


class Convention:
    """Meaning of a benchmark's published LeRobot datasets and checkpoints; ours contain their contract instead.

    Datasets are converted to the contract of the run, and observations to the contract of checkpoints, which policies
    then have. Actions of both have the same meaning.

    Attributes:
        rates_hz: rates that datasets declare, which may differ from the rate of the actions.
        cameras: names of the features by picture of the contract.
        mirrored: whether left and right of their pictures are exchanged in comparison with the run's.
        features: optional features that `convert` reads, in addition to the state and the action.
        absent: advice about observations that they lack, by name.
        settling_steps: control steps that published evaluations wait before the first observation.
    """

    rates_hz: Sequence[float]
    cameras: Mapping[str, Sequence[str]]
    mirrored: bool = False
    features: Sequence[str] = ()
    absent: Mapping[str, str] = MappingProxyType({})
    settling_steps: int = 0

    @property
    def names(self) -> Sequence[str]:
        """Names of the run's tasks."""
        raise NotImplementedError

    def task_index(self, text: str) -> int | None:
        """Index of the task that a dataset describes by `text`; None if it is not one of the run's."""
        raise NotImplementedError

    def convert(self, columns: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Convert an episode's features to observations and "action" of the contract, without pictures and text.

        Raises:
            UserError: for features of other sizes or meanings.
        """
        raise NotImplementedError

    def contract(self, own: Contract) -> Contract:
        """Contract of published checkpoints for the environment with the contract `own`."""
        raise NotImplementedError

    def observation(self, own: TensorDict) -> TensorDict:
        """Observations [N] of `contract` from those of the environment, `own` [N]."""
        raise NotImplementedError


class Expert(Protocol):
    """Scripted expert of a simulator with one environment, which it may look into."""

    def reset(self) -> None:
        """Begin an episode."""
        ...

    def action(self) -> NDArray[Any]:
        """Action [A] for the present state; called once per control step, whoever acts."""
        ...

    def progress(self) -> float:
        """Measure of the progress in this episode, which rises towards success."""
        ...


@dataclass(frozen=True)
class Sweep:
    """Values of one condition, ascending, in `unit`; `means` describes their meaning."""

    unit: str
    means: str
    values: tuple[float, ...]


class Task:
    """A task to learn; training uses the first of its `distributions`, evaluation all of them.

    Subclasses define `name`, `distributions`, `contract` and `environment`, and override the other methods where the
    task has more than these defaults.
    """

    name: str
    distributions: tuple[str, ...]
    meanings: Mapping[str, str] = MappingProxyType({})
    """Meanings of distributions and variants, one sentence each; without one the name has to explain itself."""
    held_out_share: float | None = None
    """Share of the recorded episodes that is held out, if there is no simulator; None: there is one."""
    published_distribution: str | None = None
    """Distribution of published evaluations; None if there are none."""

    def contract(self, distribution: str) -> Contract:
        """Contract of environments of `distribution`, without creating one."""
        raise NotImplementedError

    def environment(
        self, num_envs: int, distribution: str, split: str, seed: int = 0, device: str = "cpu"
    ) -> Environment:
        """Create environments that start from the `split` ("train" or "eval") of `distribution`.

        They run on `device`, the policy's, if the simulator can, else on the CPU.
        """
        raise NotImplementedError

    @property
    def asset_kind(self) -> str | None:
        """Kind of the objects' assets: "official" or "stand-in"; None without assets."""
        return None

    @property
    def asset_source(self) -> str | None:
        """Where the objects' assets come from, as a sentence for the user; None without a choice of assets."""
        return None

    @property
    def variants(self) -> tuple[str, ...]:
        """Distributions for the final policy only, such as other wordings of instructions."""
        return ()

    @property
    def margins(self) -> Mapping[str, Sweep]:
        """Conditions that can be swept, by name: the point 1.2 of "mass" is the distribution "mass=1.2"."""
        return {}

    @property
    def conditions(self) -> Conditions | None:
        """Training conditions of this task's policies; None if they are not known."""
        return None

    @property
    def sims(self) -> tuple[str, ...]:
        """Names of the simulators among which the option `sim` chooses; empty if there is no choice."""
        return ()

    @property
    def default_starts(self) -> int:
        """Default number of initial states of each task in an evaluation."""
        return STARTS

    def baselines(self) -> Mapping[str, Policy]:
        """Planners and controllers, by name, tuned on training episodes only; evaluated on the same episodes."""
        return {}

    def expert(self, env: Environment) -> Expert | None:
        """Scripted expert of `env`, an environment (N = 1) of this task; None if the task has none."""
        return None

    def start_condition(self, env: Environment) -> Callable[[], bool] | None:
        """Condition that the scene of `env`, an environment (N = 1) of this task, is back at a start; None: unknown."""
        return None

    def demonstrations(self, directory: Path, seed: int) -> Episodes | None:
        """Episodes with an observation before every step; recorded once, then read from `directory`.

        None: the task has none and is learned from scratch.
        """
        return None

    @property
    def max_demonstration_steps(self) -> int:
        """Largest number of control steps of all `demonstrations`; 0 without, or if there is no known limit."""
        return 0

    def demonstration_files(self, source: Path) -> list[Path]:
        """Files of demonstrations in the benchmark's own format: `source` itself, or those in it."""
        return []

    def recorded_demonstrations(self, source: Path, directory: Path) -> Episodes:
        """Episodes of the `demonstration_files` in `source`; read once, then from `directory`."""
        raise NotImplementedError

    def recorded_rewards(self, episodes: Episodes) -> Tensor:
        """Rewards [S] of recorded `episodes`, which the task computes from their observations.

        Raises:
            UserError: if it cannot.
        """
        raise UserError(f"{self.name} cannot compute the rewards of recorded episodes; leave out demonstration_rewards")

    def published_options(self, start: StartingPoint) -> list[str]:
        """Options of train.py and evaluate.py with which `start` acts as in its authors' evaluation of this task.

        [] if the task has none for it.
        """
        return []

    def convention(self) -> Convention | None:
        """Convention of the benchmark's published LeRobot datasets; None if there are none."""
        return None

    def video(
        self, path: Path, policies: Mapping[str, Policy], device: str, distribution: str | None = None, first: int = 0
    ) -> None:
        """Write a video of each policy, by caption, from the same starts, and optionally a picture of paths next to it.

        The starts are the initial states from `first` on of `distribution`, by default that of training.

        Raises:
            UserError: if the task has no videos.
        """
        raise UserError(f"there are no videos of {self.name}; use video=false")


def baseline_policies(task: Task) -> dict[str, Policy]:
    """Baselines of `task`, by name.

    Raises:
        UserError: if it has none.
    """
    if not (baselines := dict(task.baselines())):
        raise UserError(f"{task.name} has no planners to compare with; use baselines=false")
    return baselines


def evaluation_distributions(task: Task, *others: Task) -> tuple[str, ...]:
    """Distributions of `task`, then its variants; for several tasks those that all have."""
    own = (*task.distributions, *task.variants)
    return tuple(name for name in own if all(name in evaluation_distributions(other) for other in others))


def check_sims(task: Task, sims: Sequence[str]) -> None:
    """Check that `task` can run in each of `sims`.

    Raises:
        UserError: with the simulators in which it can run.
    """
    for name in sims:
        if not task.sims:
            raise UserError(f"{task.name} runs in one simulator only; leave out sim={name}")
        if name not in task.sims:
            raise UserError(f"{task.name} does not run in sim={name}; expected one of {', '.join(task.sims)}")


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


@runtime_checkable
class ContinuesValues(Protocol):
    """Reinforcement learner that can begin with the critics of an offline learner."""

    def continue_values(self, values: Mapping[str, Any] | None) -> None:
        """Begin with the critics `values` of the stage offline; None: without that stage, or of a kind without any.

        Raises:
            UserError: if it needs them and there are none, or they do not fit.
        """
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


@runtime_checkable
class LearnsValues(Protocol):
    """Offline learner with critics of executed chunks."""

    def values(self) -> dict[str, Any] | None:
        """Weights of the critics for `ContinuesValues.continue_values`, with values in the unit of rewards."""
        ...


class OfflineLearnerConfig(Protocol):
    """Config that builds an offline learner, which takes `steps` gradient steps."""

    steps: int

    def build(self, policy: TrainablePolicy, generator: torch.Generator) -> OfflineLearner:
        """Build the learner of `policy`; `generator` draws minibatches, the same in every process."""
        ...
