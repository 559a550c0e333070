"""ManiSkill tasks for training: environments, demonstrations, video."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from embodied import seeding
from embodied.configuration import NonNegativeFloat, NonNegativeInt, Pixels, PositiveInt
from embodied.contract import Contract
from embodied.data.demonstrations import record_once
from embodied.data.episodes import Episodes
from embodied.errors import UserError
from embodied.evaluation.video import Frames, film, tile, write_video
from embodied.policy import Policy
from embodied.task import Task
from sims.maniskill.worlds import BATCHED, REWARDS, Options
from sims.remote.options import ProcessOptions

if TYPE_CHECKING:
    from sims.maniskill.environment import ManiSkillEnvironment

FILMED = 4
STRIDE = 2
"""Episodes in a video, and control steps between its frames."""


@dataclass
class ManiSkillTask(Task, ProcessOptions):
    """The library's task `id`, with one of the robot's own control modes.

    `reward` is normalized_dense, dense or sparse. Cameras take pictures of `images` by `images` pixels (none if null);
    poses of objects are then privileged. An episode is truncated after `step_limit` control steps (the library's if
    null). `episodes` demonstrations, with action noise of `noise` half ranges, come from the library's solutions.
    """

    name: str = "maniskill"
    id: str = "PickCube-v1"
    control_mode: str = "pd_ee_delta_pose"
    reward: str = "normalized_dense"
    images: Pixels | None = None
    step_limit: PositiveInt | None = None
    executed: PositiveInt = 1
    episodes: NonNegativeInt = 0
    noise: NonNegativeFloat = 0.1

    def __post_init__(self) -> None:
        """Raise UserError for numbers out of range and an unknown reward."""
        super().__post_init__()
        if self.reward not in REWARDS:
            raise UserError(f"unknown task.reward {self.reward!r}; expected one of {', '.join(REWARDS)}")
        self._contract: Contract | None = None

    meanings: ClassVar[Mapping[str, str]] = {"initial_states": "Initial states that ManiSkill itself draws."}

    @property
    def distributions(self) -> tuple[str, ...]:
        """The library's own distribution of initial states."""
        return ("initial_states",)

    def contract(self, distribution: str) -> Contract:
        """Contract derived from the scene; the first call makes one.

        Raises:
            UserError: for an unknown distribution, and if the simulator is not installed.
        """
        self._check(distribution)
        if self._contract is None:
            from sims.maniskill.contract import describe

            world = self._options.make()
            self._contract, _ = describe(world, self.executed)
            world.close()
        return self._contract

    def environment(
        self, num_envs: int, distribution: str, split: str, seed: int = 0, device: str = "cpu"
    ) -> ManiSkillEnvironment:
        """Make environments; on a GPU if the task supports it (`worlds.BATCHED`), otherwise on the CPU.

        Raises:
            UserError: for an unknown distribution or split, and if the simulator is not installed.
        """
        self._check(distribution)
        return self._environment(num_envs, self._options, split, seed, device)

    @property
    def max_demonstration_steps(self) -> int:
        """Largest number of control steps of all demonstrations."""
        return self.episodes * (self.step_limit or self._options.step_limit) if self.episodes else 0

    def demonstrations(self, directory: Path, seed: int) -> Episodes | None:
        """The solutions' episodes; made once, then read from `directory`. None without `episodes`.

        Raises:
            UserError: if the library has no solution, or `directory` has demonstrations of another task.
        """
        if not self.episodes:
            return None
        from sims.maniskill.demonstrations import collect

        contract = self.contract(self.distributions[0])
        generator = seeding.generator(seed, "demonstrations")
        origin = {
            key: getattr(self, key) for key in ("id", "control_mode", "reward", "step_limit", "episodes", "noise")
        }

        def make(writer: object) -> None:
            env = self._environment(1, self._options, "train", 0, "cpu", executed=1)
            collect(writer, env, self.episodes, self.noise, generator)
            env.close()

        return record_once(directory, contract, origin | {"seed": seed}, make)

    def video(
        self, path: Path, policies: Mapping[str, Policy], device: str, distribution: str | None = None, first: int = 0
    ) -> None:
        """Film each policy, by caption, from the same starts.

        Raises:
            UserError: without Vulkan.
        """
        env = self._environment(FILMED, replace(self._options, film=True), "eval", 0, "cpu")

        def render(ids: np.ndarray) -> Frames:
            return np.stack([env.worlds[i].render_rgb_array()[0].cpu().numpy() for i in ids])

        starts = torch.arange(first, first + FILMED)
        films = {name: film(env, policy, starts, render, device, STRIDE) for name, policy in policies.items()}
        write_video(path, tile(films), round(1.0 / (env.contract.control_dt_s * self.executed * STRIDE)))
        env.close()

    @property
    def _options(self) -> Options:
        return Options(self.id, self.control_mode, self.reward, self.images)

    def _environment(
        self, num_envs: int, options: Options, split: str, seed: int, device: str, executed: int | None = None
    ) -> ManiSkillEnvironment:
        from sims.maniskill.environment import BatchedManiSkillEnvironment, ManiSkillEnvironment

        settings = {
            "options": options,
            "split": split,
            "executed": executed or self.executed,
            "step_limit": self.step_limit,
            "seed": seed,
        }
        if device != "cpu" and options.id in BATCHED:
            return BatchedManiSkillEnvironment(num_envs, device=device, **settings)
        return ManiSkillEnvironment(num_envs, **settings)

    def _check(self, distribution: str) -> None:
        if distribution not in self.distributions:
            raise UserError(f"unknown distribution {distribution!r}; expected one of {', '.join(self.distributions)}")
