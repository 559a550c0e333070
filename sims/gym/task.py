"""Gymnasium environments as a task for training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodied.configuration import FiniteFloat, Pixels, PositiveFloat, PositiveInt
from embodied.contract import Contract
from embodied.data.episodes import Episodes
from embodied.errors import UserError
from embodied.evaluation.video import Frames, film, tile, write_video
from embodied.policy import Policy
from embodied.task import Task
from sims.gym.environment import GymEnvironment, frame, located, make
from sims.gym.spaces import RENDER, contract
from sims.remote.options import ProcessOptions

FILMED = 4
"""Number of episodes in a video."""


@dataclass
class GymTask(Task, ProcessOptions):
    """One environment of Gymnasium, or of any package that registers its own in Gymnasium.

    `id` is the argument of gymnasium.make; `module:Id-v0` imports the module that registers it first, from the working
    directory or as installed, and `path/module.py:Id-v0` from another folder. `options` are further arguments of
    gymnasium.make, {name:value}. Policies predict chunks of `horizon` actions (None: `executed`), of which `executed`
    are run between observations. An episode is truncated after `step_limit` steps; the environment's own limit if null.
    `control_dt_s` is the time between actions, and `action_limit` bounds elements of an action, if the environment does
    not define them. `success_return` is the return from which on an episode counts as succeeded, instead of the
    environment's own success. With `images=[render]` the frames of the environment's own renderer are observed, with
    `image_size` pixels a side. Observations in `privileged` are read by critics only.
    """

    name: str = "gym"
    id: str = "Pendulum-v1"
    options: Any = None
    horizon: PositiveInt | None = None
    executed: PositiveInt = 1
    images: list[str] = field(default_factory=list)
    image_size: Pixels = 128
    privileged: list[str] = field(default_factory=list)
    step_limit: PositiveInt | None = None
    control_dt_s: PositiveFloat | None = None
    action_limit: PositiveFloat | None = None
    success_return: FiniteFloat | None = None

    def __post_init__(self) -> None:
        """Split a path from the id; raise UserError for numbers out of range, and options that are not a mapping."""
        super().__post_init__()
        self.id, self._folder = located(self.id)
        if not isinstance(self.options, Mapping | None):
            raise UserError(f"expected task.options={{name:value}}, got {self.options!r}")
        if self.images not in ([], [RENDER]):
            raise UserError(
                f"expected task.images=[{RENDER}], the environment's own renderer, got {self.images}; task.options "
                "may choose its camera, and image observations need no option"
            )

    def recorded(self) -> dict[str, Any]:
        """Record the folder of an own module with the id."""
        return super().recorded() | ({"id": f"{self._folder}/{self.id}"} if self._folder else {})

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
        limits = self.control_dt_s, self.action_limit
        result = contract(world, self.executed, *limits, self.horizon, self._image_size, self.privileged)
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

    def recorded_rewards(self, episodes: Episodes) -> Tensor:
        """Rewards [S] that `compute_reward` of a goal environment gives for the goals in recorded `episodes`.

        Raises:
            UserError: for other environments, and episodes without an observation after every step.
        """
        world = make(self.id, self.step_limit, self.options)
        compute = getattr(world.unwrapped, "compute_reward", None)
        if compute is None:
            raise UserError(
                f"{self.id} has no compute_reward, as goal environments have; leave out demonstration_rewards"
            )
        goals = []
        for key in ("achieved_goal", "desired_goal"):
            final = episodes.final_observation
            if key not in episodes.observation or final is None or len(episodes) != episodes.steps:
                raise UserError(f"recorded episodes have no {key} after every step; leave out demonstration_rewards")
            # the goal after each step is that before the next one, or the final one
            after = episodes.observation[key].roll(-1, 0)
            after[episodes.ends - 1] = final[key]
            goals.append(after.numpy())
        rewards = np.asarray(compute(*goals, {}), np.float32)
        world.close()
        return torch.from_numpy(rewards.reshape(episodes.steps))

    def video(
        self, path: Path, policies: Mapping[str, Policy], device: str, distribution: str | None = None, first: int = 0
    ) -> None:
        """Film each policy, by caption, from the same starts, with the environment's own renderer.

        Raises:
            UserError: if it cannot render.
        """
        env = self._environment(FILMED, "eval", 0, {**(self.options or {}), "render_mode": "rgb_array"})

        def render(ids: NDArray[np.int64]) -> Frames:
            return np.stack([frame(env.worlds[row], self.id) for row in ids.tolist()])

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
            horizon=self.horizon,
            executed=self.executed,
            image_size=self._image_size,
            privileged=self.privileged,
            step_limit=self.step_limit,
            control_dt_s=self.control_dt_s,
            action_limit=self.action_limit,
            success_return=self.success_return,
            seed=seed,
        )

    @property
    def _image_size(self) -> int | None:
        return self.image_size if self.images else None

    def _check(self, distribution: str) -> None:
        if distribution != self.id:
            raise UserError(f"unknown distribution {distribution!r}; expected one of {self.id}")
