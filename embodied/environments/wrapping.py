"""Environments and tasks around others: everything is passed on that a subclass does not change."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

from tensordict import TensorDict
from torch import Tensor

from embodied.contract import Contract
from embodied.data.episodes import Episodes
from embodied.environment import (
    DifferentiableEnvironment,
    Environment,
    NumberedStarts,
    Restorable,
    SharedWorlds,
    SwitchableEnvironment,
    Transition,
)
from embodied.policy import Policy
from embodied.scene.viewable import Viewable
from embodied.task import BaselineTask, DemonstratingTask, Task, VariedTask


class WrappedEnvironment:
    """`env`, with every capability that it has."""

    def __init__(self, env: Environment) -> None:
        self.env, self.contract = env, env.contract
        self.num_envs, self.device = env.num_envs, env.device
        self.task_names, self.instructions = env.task_names, env.instructions
        if isinstance(env, NumberedStarts):
            self.step_limit, self.num_starts = env.step_limit, env.num_starts
        if isinstance(env, Restorable):
            self.state_dict, self.load_state_dict = env.state_dict, env.load_state_dict
        if isinstance(env, SharedWorlds):
            self.group = env.group
        if isinstance(env, SwitchableEnvironment):
            self.switch = env.switch
        if isinstance(env, DifferentiableEnvironment):
            self.detach = env.detach
        if isinstance(env, Viewable):
            self.view = env.view

    @property
    def task_index(self) -> Tensor:
        """The task that each environment runs, [N]."""
        return self.env.task_index

    @property
    def start(self) -> Tensor:
        """Initial states of the running episodes, [N]; AttributeError if they are not numbered."""
        return cast(NumberedStarts, self.env).start

    def reset(self, mask: Tensor | None = None, starts: Tensor | None = None) -> TensorDict:
        """As `NumberedStarts.reset`."""
        return self.env.reset(mask, starts) if isinstance(self.env, NumberedStarts) else self.env.reset(mask)

    def step(self, actions: Tensor) -> Transition:
        """As `Environment.step`."""
        return self.env.step(actions)

    def close(self) -> None:
        """As `Environment.close`."""
        self.env.close()


class WrappedTask:
    """`task`, with every capability that a run asks it for."""

    def __init__(self, task: Task) -> None:
        self.task, self.name, self.distributions = task, task.name, task.distributions
        if isinstance(task, BaselineTask):
            self.baselines = task.baselines
        if isinstance(task, VariedTask):
            self.variants = task.variants
        if isinstance(task, DemonstratingTask):
            self.most_demonstrated = task.most_demonstrated

    @property
    def asset_kind(self) -> str | None:
        """The task's asset kind."""
        return self.task.asset_kind

    def contract(self, distribution: str) -> Contract:
        """As `Task.contract`."""
        return self.task.contract(distribution)

    def environment(
        self, num_envs: int, distribution: str, split: str, seed: int = 0, device: str = "cpu"
    ) -> Environment:
        """As `Task.environment`."""
        return self.task.environment(num_envs, distribution, split, seed, device)

    def demonstrations(self, directory: Path, seed: int) -> Episodes | None:
        """As `Task.demonstrations`."""
        return self.task.demonstrations(directory, seed)

    def video(
        self, path: Path, policies: Mapping[str, Policy], device: str, distribution: str | None = None, first: int = 0
    ) -> None:
        """As `Task.video`."""
        self.task.video(path, policies, device, distribution, first)
