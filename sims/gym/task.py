"""Gymnasium environments as a task for training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from embodied.configuration import FiniteFloat, PositiveFloat, PositiveInt
from embodied.contract import Contract
from embodied.errors import UserError
from embodied.evaluation.video import Frames, film, tile, write_video
from embodied.policy import Policy
from embodied.task import Task
from sims.gym.environment import GymEnvironment, make
from sims.gym.spaces import contract
from sims.remote.options import ProcessOptions

FILMED = 4
"""Number of episodes in a video."""


@dataclass
class GymTask(Task, ProcessOptions):
    """One environment of Gymnasium, or of any package that registers its own in Gymnasium.

    `id` is the argument of gymnasium.make; `module:Id-v0` imports the module that registers it first. `options` are
    further arguments of gymnasium.make, {name:value}. Chunks have `executed` actions. An episode is truncated after
    `step_limit` steps; the environment's own limit if null. `control_dt_s` is the time between actions, and
    `action_limit` bounds elements of an action, if the environment does not define them. `success_return` is the return
    from which on an episode counts as succeeded, instead of the environment's own success.
    """

    name: str = "gym"
    id: str = "Pendulum-v1"
    options: Any = None
    executed: PositiveInt = 1
    step_limit: PositiveInt | None = None
    control_dt_s: PositiveFloat | None = None
    action_limit: PositiveFloat | None = None
    success_return: FiniteFloat | None = None

    def __post_init__(self) -> None:
        """Raise UserError for numbers out of range, and options that are not a mapping."""
        super().__post_init__()
        if not isinstance(self.options, Mapping | None):
            raise UserError(f"expected task.options={{name:value}}, got {self.options!r}")

    @property
    def distributions(self) -> tuple[str, ...]:
        """The environment's own distribution of initial states, under its id."""
        return (self.id,)

    def contract(self, distribution: str) -> Contract:
        """Contract derived from the environment's spaces.

        Raises:
            UserError: for an unknown distribution, or an environment that cannot be used.
        """
        self._check(distribution)
        world = make(self.id, self.step_limit, self.options)
        result = contract(world, self.executed, self.control_dt_s, self.action_limit)
        world.close()
        return result

    def environment(
        self, num_envs: int, distribution: str, split: str, seed: int = 0, device: str = "cpu"
    ) -> GymEnvironment:
        """Make environments, on the CPU; the splits "train" and "eval" have different seeds.

        Raises:
            UserError: for an unknown distribution, or an environment that cannot be used.
        """
        self._check(distribution)
        return self._environment(num_envs, split, seed, self.options)

    def video(
        self, path: Path, policies: Mapping[str, Policy], device: str, distribution: str | None = None, first: int = 0
    ) -> None:
        """Film each policy, by caption, from the same starts, with the environment's own renderer.

        Raises:
            UserError: if it cannot render.
        """
        env = self._environment(FILMED, "eval", 0, {**(self.options or {}), "render_mode": "rgb_array"})

        def render(ids: NDArray[np.int64]) -> Frames:
            try:
                return np.stack([np.asarray(env.worlds[row].render(), dtype=np.uint8) for row in ids.tolist()])
            except Exception as error:  # graphics libraries raise errors of any kind
                raise UserError(f"{self.id} cannot be rendered here ({error}); use video=false") from error

        starts = torch.arange(first, first + FILMED)
        films = {caption: film(env, policy, starts, render, device) for caption, policy in policies.items()}
        write_video(path, tile(films), 1.0 / (env.contract.control_dt_s * self.executed))
        env.close()

    def _environment(self, num_envs: int, split: str, seed: int, options: Mapping[str, Any] | None) -> GymEnvironment:
        return GymEnvironment(
            num_envs,
            self.id,
            options=options,
            split=split,
            executed=self.executed,
            step_limit=self.step_limit,
            control_dt_s=self.control_dt_s,
            action_limit=self.action_limit,
            success_return=self.success_return,
            seed=seed,
        )

    def _check(self, distribution: str) -> None:
        if distribution != self.id:
            raise UserError(f"unknown distribution {distribution!r}; expected one of {self.id}")
