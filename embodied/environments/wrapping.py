"""Wrappers of environments and tasks, which pass on everything that a subclass does not change.

Capabilities are attributes of an instance, not of its class: a wrapper has those of the object that it wraps, and no
others.
"""

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
    Watched,
)
from embodied.policy import Policy
from embodied.scene.viewable import Viewable
from embodied.task import (
    BaselineTask,
    DemonstratingTask,
    MarginTask,
    PublishedTask,
    RecordedTask,
    SimulatedTask,
    Task,
    VariedTask,
)

ENVIRONMENT_CAPABILITIES: dict[type, tuple[str, ...]] = {
    Restorable: ("state_dict", "load_state_dict"),
    SharedWorlds: ("group",),
    SwitchableEnvironment: ("switch",),
    DifferentiableEnvironment: ("detach",),
    Watched: ("tell",),
    Viewable: ("view",),
}
"""Names that each capability of an environment adds, except numbered initial states, which `reset` takes."""

TASK_CAPABILITIES: dict[type, tuple[str, ...]] = {
    BaselineTask: ("baselines",),
    VariedTask: ("variants",),
    RecordedTask: ("demonstration_files", "recorded_demonstrations"),
    DemonstratingTask: ("most_demonstrated",),
    PublishedTask: ("convention",),
    MarginTask: ("margins",),
    SimulatedTask: ("sims", "usual_starts"),
}
"""Names that each capability of a task adds."""


def keep_capabilities(wrapper: object, wrapped: object, capabilities: Mapping[type, tuple[str, ...]]) -> None:
    """Give `wrapper` the `capabilities` of `wrapped`, except names that the wrapper's class defines itself."""
    for capability, names in capabilities.items():
        for name in names if isinstance(wrapped, capability) else ():
            if not hasattr(type(wrapper), name):
                setattr(wrapper, name, getattr(wrapped, name))


class WrappedEnvironment:
    """Wrapper of `env` with all of its capabilities except UnrolledEnvironment.

    An `UnrolledEnvironment` runs a whole policy without a call of `step`, which a wrapper changes: a subclass for
    which that is correct passes `unroll` on.
    """

    def __init__(self, env: Environment) -> None:
        self.env, self.contract = env, env.contract
        self.num_envs, self.device = env.num_envs, env.device
        self.task_names, self.instructions = env.task_names, env.instructions
        if isinstance(env, NumberedStarts):
            self.step_limit, self.num_starts = env.step_limit, env.num_starts
        keep_capabilities(self, env, ENVIRONMENT_CAPABILITIES)

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


class WrappedTask:
    """Wrapper of `task` with every capability that a run uses."""

    def __init__(self, task: Task) -> None:
        self.task, self.name, self.distributions = task, task.name, task.distributions
        keep_capabilities(self, task, TASK_CAPABILITIES)

    @property
    def asset_kind(self) -> str | None:
        """Asset kind of the wrapped task."""
        return self.task.asset_kind

    def contract(self, distribution: str) -> Contract:
        """See `Task.contract`."""
        return self.task.contract(distribution)

    def environment(
        self, num_envs: int, distribution: str, split: str, seed: int = 0, device: str = "cpu"
    ) -> Environment:
        """See `Task.environment`."""
        return self.task.environment(num_envs, distribution, split, seed, device)

    def demonstrations(self, directory: Path, seed: int) -> Episodes | None:
        """See `Task.demonstrations`."""
        return self.task.demonstrations(directory, seed)

    def video(
        self, path: Path, policies: Mapping[str, Policy], device: str, distribution: str | None = None, first: int = 0
    ) -> None:
        """See `Task.video`."""
        self.task.video(path, policies, device, distribution, first)
