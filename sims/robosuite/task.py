"""robosuite's tasks for training: environments, demonstrations, video."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from embodied.configuration import NonNegativeFloat, NonNegativeInt, Pixels, PositiveInt
from embodied.contract import Contract
from embodied.data.demonstrations import record_once
from embodied.data.episodes import Episodes
from embodied.errors import UserError
from embodied.evaluation.video import film, tile, write_video
from embodied.extras import needs_extra
from embodied.policy import Policy
from embodied.task import Task
from sims.remote.options import ProcessOptions

if TYPE_CHECKING:  # robosuite is heavy
    from sims.robosuite.environment import RobosuiteEnvironment
    from sims.robosuite.world import Options

FILMED = 4
FILM_SIZE = 256
BETWEEN = 4
"""Episodes in a video, pixels a side of a picture, and control steps between its frames."""


@dataclass
class RobosuiteTask(Task, ProcessOptions):
    """One of robosuite's tasks, `env_name`, with `robots` (Pandas if empty), one for each of its arms.

    `controller` moves the arms: OSC_POSE, OSC_POSITION or JOINT_POSITION. The reward is 1 for success, or robosuite's
    `shaped` one. `images` names cameras whose pictures are observed, of `image_size` pixels a side; observations
    of objects are then privileged. Policies predict chunks of `horizon` actions, of which `executed` are run between
    observations. Evaluations allow `step_limit` control steps (None: `catalogue.Entry.step_limit`), training
    `train_step_limit` (None: the same). `episodes` demonstrations of Lift with action noise `noise` come from the
    scripted expert; 0 for none.
    """

    name: str = "robosuite"
    env_name: str = "Lift"
    robots: list[str] = field(default_factory=list)
    controller: str = "OSC_POSE"
    shaped: bool = True
    images: list[str] = field(default_factory=list)
    image_size: Pixels = 128
    horizon: PositiveInt = 1
    executed: PositiveInt = 1
    step_limit: PositiveInt | None = None
    train_step_limit: PositiveInt | None = None
    episodes: NonNegativeInt = 0
    noise: NonNegativeFloat = 0.1

    def __post_init__(self) -> None:
        """Raise UserError for numbers out of range, and for demonstrations of other tasks than the expert's."""
        super().__post_init__()
        if self.episodes and (self.env_name, self.controller, list(self.robots)) not in (
            ("Lift", "OSC_POSE", []),
            ("Lift", "OSC_POSE", ["Panda"]),
        ):
            raise UserError("the scripted expert does Lift with a Panda and OSC_POSE alone; use task.episodes=0")

    meanings: ClassVar[Mapping[str, str]] = {"placed": "Objects where robosuite's own resets place them."}

    @property
    def distributions(self) -> tuple[str, ...]:
        """The single distribution of initial states, robosuite's own."""
        return ("placed",)

    @property
    def asset_kind(self) -> str:
        """Kind of the assets: robosuite's own, "official"."""
        return "official"

    def contract(self, distribution: str) -> Contract:
        """Contract of the task with its options, derived from one world.

        Raises:
            UserError: for an unknown distribution, and if robosuite is not installed.
        """
        self._check(distribution)
        options = self._options()
        from sims.robosuite.contract import contract

        return contract(options, tuple(self.images), self.image_size, self.horizon, self.executed)

    def environment(
        self, num_envs: int, distribution: str, split: str, seed: int = 0, device: str = "cpu"
    ) -> RobosuiteEnvironment:
        """Make environments, always on the CPU; "train" and "eval" have disjoint initial states.

        Raises:
            UserError: for an unknown distribution or split, and if robosuite is not installed.
        """
        self._check(distribution)
        limit = self.step_limit if self.train_step_limit is None or split == "eval" else self.train_step_limit
        return self._environment(num_envs, split, limit, seed, self.horizon, self.executed)

    @property
    def max_demonstration_steps(self) -> int:
        """Largest number of control steps of all demonstrations."""
        from sims.robosuite.catalogue import CATALOGUE

        return self.episodes * CATALOGUE[self.env_name].step_limit if self.episodes else 0

    def demonstrations(self, directory: Path, seed: int) -> Episodes | None:
        """The expert's episodes, made once, then read from `directory`; None if `episodes` is 0.

        Raises:
            UserError: if `directory` has demonstrations with other options.
        """
        if not self.episodes:
            return None
        from sims.robosuite.expert import collect

        origin = {"env_name": self.env_name, "episodes": self.episodes, "noise": self.noise, "seed": seed}
        options = self._options()
        contract = self.contract(self.distributions[0])
        env = self._environment(1, "train", None, seed, 1, 1)
        return record_once(
            directory,
            contract,
            origin | {"shaped": options.shaped},
            lambda writer: collect(writer, env, self.episodes, self.noise, seed),
        )

    def video(
        self, path: Path, policies: Mapping[str, Policy], device: str, distribution: str | None = None, first: int = 0
    ) -> None:
        """Film each policy, by caption, from the same starts, with the task's first camera."""
        env = self.environment(FILMED, distribution or self.distributions[0], "eval", device=device)
        camera = env.worlds[0].env.sim.model.camera_names[0]
        stride = max(1, BETWEEN // self.executed)

        def render(ids: np.ndarray) -> np.ndarray:
            return np.stack([env.worlds[env_id].picture(camera, FILM_SIZE) for env_id in ids])

        starts = torch.arange(first, first + FILMED)
        films = {name: film(env, policy, starts, render, device, stride=stride) for name, policy in policies.items()}
        write_video(path, tile(films), 1.0 / (env.contract.control_dt_s * self.executed * stride))
        env.close()

    def _environment(
        self, num_envs: int, split: str, limit: int | None, seed: int, horizon: int, executed: int
    ) -> RobosuiteEnvironment:
        options = self._options()
        from sims.robosuite.environment import RobosuiteEnvironment

        return RobosuiteEnvironment(
            num_envs,
            options=options,
            split=split,
            images=tuple(self.images),
            image_size=self.image_size,
            horizon=horizon,
            executed=executed,
            step_limit=limit,
            seed=seed,
        )

    def _options(self) -> Options:
        with needs_extra("robosuite"):
            from sims.robosuite.world import Options

        return Options(self.env_name, tuple(self.robots), self.controller, self.shaped)

    def _check(self, distribution: str) -> None:
        if distribution not in self.distributions:
            raise UserError(f"unknown distribution {distribution!r}; expected one of {', '.join(self.distributions)}")
