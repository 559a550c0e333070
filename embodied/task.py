"""What a training run is made of, as protocols: a task, a policy's and a learner's configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from embodied.contract import Contract
from embodied.environment import Environment
from embodied.errors import UserError
from embodied.policy import Policy, TrainablePolicy
from embodied.rollout.episodes import Episodes
from embodied.rollout.rollout import Collector, Rollout
from embodied.rollout.starts import Starts
from embodied.world import World


class Task(Protocol):
    """What is to be learned; training starts from the first of its `distributions`, all are evaluated."""

    name: str
    distributions: tuple[str, ...]

    @property
    def asset_kind(self) -> str | None:
        """What objects are made of: "official" or "stand-in"; None where there are none."""
        ...

    def contract(self, distribution: str) -> Contract:
        """What policies read and command in the environments of `distribution`: their own, known without making any."""
        ...

    def environment(
        self, num_envs: int, distribution: str, split: str, seed: int = 0, device: str = "cpu"
    ) -> Environment:
        """Make environments that start from the `split` ("train" or "eval") of `distribution`.

        They run on `device`, the policy's, where their simulator can, else on the CPU.
        """
        ...

    def demonstrations(self, directory: Path, seed: int) -> Episodes | None:
        """Episodes that succeeded, with an observation before every step; made once, then read from `directory`.

        None: the task is learned from scratch.
        """
        ...

    def video(self, path: Path, policies: Mapping[str, Policy], device: str) -> None:
        """Film each policy, by caption, from the same starts; a trajectories.png may be drawn beside the film."""
        ...


@runtime_checkable
class BaselineTask(Task, Protocol):
    """A task with planners or controllers to compare with what is learned, on the same episodes."""

    def baselines(self) -> Mapping[str, Policy]:
        """They by name, tuned on training episodes alone."""
        ...


def planners(task: Task) -> dict[str, Policy]:
    """The baselines of `task`, by name.

    Raises:
        UserError: where it has none.
    """
    if not isinstance(task, BaselineTask):
        raise UserError(f"{task.name} has no planners to compare with; use baselines=false")
    return dict(task.baselines())


@runtime_checkable
class VariedTask(Task, Protocol):
    """A task with variants of its distributions, such as other words, on which the final policy alone is measured."""

    @property
    def variants(self) -> tuple[str, ...]:
        """They by name; `environment` takes them for distributions."""
        ...


def measured(task: Task) -> tuple[str, ...]:
    """The distributions of `task`, then their variants."""
    return (*task.distributions, *(task.variants if isinstance(task, VariedTask) else ()))


class PolicyConfig(Protocol):
    """Builds a policy for a contract."""

    def build(self, contract: Contract) -> TrainablePolicy:
        """Make the policy."""
        ...


class Learner(Protocol):
    """A reinforcement learner; `starts`, where given, chooses the initial states of episodes."""

    @property
    def collector(self) -> Callable[[Environment, Policy, torch.Generator, Starts | None], Collector]:
        """Makes its rollouts, with the environment, the policy, the noise and `starts`."""
        ...

    @property
    def starts(self) -> Starts | None:
        """Called when environments restart."""
        ...

    @property
    def gradient_steps(self) -> int:
        """Gradient steps taken so far."""
        ...

    def update(self, rollout: Rollout, progress: float, world: World = ...) -> dict[str, float]:
        """Learn from one rollout of each process of `world`; `progress` from 0 to 1 is how far training is.

        Returns metrics.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything but the policy that is needed to continue."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        ...


class LearnerConfig(Protocol):
    """Builds a learner that collects `rollout_length` chunks per environment and iteration."""

    rollout_length: int

    def build(
        self,
        policy: TrainablePolicy,
        demonstrations: Episodes | None,
        env: Environment,
        generator: torch.Generator,
    ) -> Learner:
        """Make the learner of `policy` in `env`.

        Raises:
            UserError: where it needs demonstrations and there are none.
        """
        ...
