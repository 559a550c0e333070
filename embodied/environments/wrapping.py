"""Wrappers of environments and tasks, which pass on everything that a subclass does not change.

Capabilities are attributes of an instance, not of its class: a wrapper has those of the object that it wraps, and no
others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

from tensordict import TensorDict
from torch import Tensor

from embodied.contract import Contract
from embodied.data.episodes import Episodes
from embodied.environment import Environment, NumberedStarts, Transition
from embodied.export.conditions import Conditions
from embodied.policy import Policy
from embodied.saving.starting_point import StartingPoint
from embodied.task import Convention, Expert, Sweep, Task

OPTIONAL_MEMBERS = (
    "state_dict",
    "load_state_dict",
    "switch",
    "detach",
    "go_on",
    "group",
    "show_values",
    "view",
    "notes",
)
"""Members of environments with further capabilities, except numbered initial states, which `reset` takes."""


def keep_capabilities(wrapper: object, env: object) -> None:
    """Give `wrapper` the optional members of `env`, except those that the wrapper's class defines itself."""
    for name in OPTIONAL_MEMBERS:
        if hasattr(env, name) and not hasattr(type(wrapper), name):
            setattr(wrapper, name, getattr(env, name))


class WrappedEnvironment:
    """Wrapper of `env` with all of its capabilities except `unroll`.

    `unroll` runs a whole policy without a call of `step`, which a wrapper changes: a subclass for which that is correct
    passes it on.
    """

    def __init__(self, env: Environment) -> None:
        self.env = env
        self.contract = env.contract
        self.num_envs = env.num_envs
        self.device = env.device
        self.task_names = env.task_names
        self.instructions = env.instructions
        if isinstance(env, NumberedStarts):
            self.step_limit = env.step_limit
            self.num_starts = env.num_starts
        keep_capabilities(self, env)

    @property
    def task_index(self) -> Tensor:
        """Index of the task that each environment runs, [N]."""
        return self.env.task_index

    @property
    def start(self) -> Tensor:
        """Initial states of the running episodes, [N]; AttributeError if they are not numbered."""
        return cast(NumberedStarts, self.env).start

    def reset(self, mask: Tensor | None = None, starts: Tensor | None = None) -> TensorDict:
        """See `NumberedStarts.reset`."""
        return self.env.reset(mask, starts) if isinstance(self.env, NumberedStarts) else self.env.reset(mask)

    def step(self, actions: Tensor) -> Transition:
        """See `Environment.step`."""
        return self.env.step(actions)

    def close(self) -> None:
        """See `Environment.close`."""
        self.env.close()


class WrappedTask(Task):
    """Wrapper of `task`, which forwards everything that a task has."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.name = task.name
        self.distributions = task.distributions
        self.meanings = task.meanings
        self.held_out_share = task.held_out_share
        self.published_distribution = task.published_distribution

    def contract(self, distribution: str) -> Contract:
        """See `Task.contract`."""
        return self.task.contract(distribution)

    def environment(
        self, num_envs: int, distribution: str, split: str, seed: int = 0, device: str = "cpu"
    ) -> Environment:
        """See `Task.environment`."""
        return self.task.environment(num_envs, distribution, split, seed, device)

    @property
    def asset_kind(self) -> str | None:
        """See `Task.asset_kind`."""
        return self.task.asset_kind

    @property
    def asset_source(self) -> str | None:
        """See `Task.asset_source`."""
        return self.task.asset_source

    @property
    def variants(self) -> tuple[str, ...]:
        """See `Task.variants`."""
        return self.task.variants

    @property
    def margins(self) -> Mapping[str, Sweep]:
        """See `Task.margins`."""
        return self.task.margins

    @property
    def conditions(self) -> Conditions | None:
        """See `Task.conditions`."""
        return self.task.conditions

    @property
    def sims(self) -> tuple[str, ...]:
        """See `Task.sims`."""
        return self.task.sims

    @property
    def default_starts(self) -> int:
        """See `Task.default_starts`."""
        return self.task.default_starts

    def baselines(self) -> Mapping[str, Policy]:
        """See `Task.baselines`."""
        return self.task.baselines()

    def expert(self, env: Environment) -> Expert | None:
        """See `Task.expert`."""
        return self.task.expert(env)

    def start_condition(self, env: Environment) -> Callable[[], bool] | None:
        """See `Task.start_condition`."""
        return self.task.start_condition(env)

    def demonstrations(self, directory: Path, seed: int) -> Episodes | None:
        """See `Task.demonstrations`."""
        return self.task.demonstrations(directory, seed)

    @property
    def max_demonstration_steps(self) -> int:
        """See `Task.max_demonstration_steps`."""
        return self.task.max_demonstration_steps

    def demonstration_files(self, source: Path) -> list[Path]:
        """See `Task.demonstration_files`."""
        return self.task.demonstration_files(source)

    def recorded_demonstrations(self, source: Path, directory: Path) -> Episodes:
        """See `Task.recorded_demonstrations`."""
        return self.task.recorded_demonstrations(source, directory)

    def recorded_rewards(self, episodes: Episodes) -> Tensor:
        """See `Task.recorded_rewards`."""
        return self.task.recorded_rewards(episodes)

    def published_options(self, start: StartingPoint) -> list[str]:
        """See `Task.published_options`."""
        return self.task.published_options(start)

    def convention(self) -> Convention | None:
        """See `Task.convention`."""
        return self.task.convention()

    def video(
        self, path: Path, policies: Mapping[str, Policy], device: str, distribution: str | None = None, first: int = 0
    ) -> None:
        """See `Task.video`."""
        self.task.video(path, policies, device, distribution, first)
