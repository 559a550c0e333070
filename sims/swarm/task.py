"""The swarm task for training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from embodied.configuration import FiniteFloat, PositiveInt
from embodied.contract import Contract
from embodied.errors import UserError
from embodied.evaluation.video import tile, trajectories_path, write_video
from embodied.policy import Policy
from embodied.task import Task
from sims.quadrotor.episode import reweighted, weights
from sims.quadrotor.observation import contract
from sims.quadrotor.physics.own_airframe import AirframeOptions, chosen_airframe
from sims.remote.options import ProcessOptions
from sims.swarm import pictures
from sims.swarm.environment import SwarmEnvironment
from sims.swarm.mdp import Swarm

FILMED_WORLDS = 2
STRIDE = 6
"""Worlds in a video, and control steps between its frames."""


@dataclass
class SwarmTask(Task, ProcessOptions, AirframeOptions):
    """Drones exchange their goals among obstacles, which stand in 20% of the cells; eight of them, or more.

    An episode is truncated after `step_limit` control steps. `reward` contains the weights of the reward, see
    `mdp.Swarm.reward`.
    """

    name: str = "quadrotor_swarm"
    step_limit: PositiveInt = Swarm.STEP_LIMIT
    reward: dict[str, FiniteFloat] = field(default_factory=lambda: weights(Swarm()))

    MDPS: ClassVar[Mapping[str, Swarm]] = {
        "density_20": Swarm(),
        "drones_16": Swarm(drones=16),
        "drones_32": Swarm(drones=32),
    }
    """Tasks by name of the distribution; the first one is for training, the others for the final policy."""
    meanings: ClassVar[Mapping[str, str]] = {
        "density_20": f"{Swarm().drones} drones; a fifth of the cells of the room has an obstacle.",
        "drones_16": "16 drones in the same room.",
        "drones_32": "32 drones in the same room.",
    }

    def __post_init__(self) -> None:
        """Raise UserError for numbers out of range, an unknown airframe and unknown weights."""
        super().__post_init__()
        for mdp in self.MDPS.values():
            reweighted(mdp, self.reward)

    def group_of(self, distribution: str) -> int:
        """Number of drones of a world of `distribution`."""
        return self._mdp(distribution).drones

    @property
    def distributions(self) -> tuple[str, ...]:
        """The distributions, each with random worlds, initial states, forces and torques."""
        return tuple(self.MDPS)[:1]

    @property
    def variants(self) -> tuple[str, ...]:
        """Distributions with larger swarms in the same room."""
        return tuple(self.MDPS)[1:]

    def contract(self, distribution: str) -> Contract:
        """The contract of every drone.

        Raises:
            UserError: for an unknown distribution.
        """
        return contract(self._mdp(distribution).OBSERVED)

    def environment(
        self, num_envs: int, distribution: str, split: str, seed: int = 0, device: str = "cpu"
    ) -> SwarmEnvironment:
        """Make environments that start from the `split` ("train" or "eval"); they run on the CPU.

        Raises:
            UserError: for an unknown distribution.
        """
        return SwarmEnvironment(
            num_envs,
            mdp=self._mdp(distribution),
            airframe=chosen_airframe(self.airframe, self.airframes),
            split=split,
            step_limit=self.step_limit,
            seed=seed,
        )

    def video(
        self, path: Path, policies: Mapping[str, Policy], device: str, distribution: str | None = None, first: int = 0
    ) -> None:
        """Film each policy, by caption, from the same starts; also plot their paths into a file next to the video."""
        flights = {}
        films = {}
        dt_s = 0.0
        for caption, policy in policies.items():
            name = distribution or self.distributions[0]
            env = self.environment(FILMED_WORLDS * self._mdp(name).drones, name, "eval")
            flights[caption] = pictures.fly(env, policy, device, STRIDE, first)
            films[caption] = pictures.film(flights[caption])
            dt_s = env.contract.control_dt_s * STRIDE
        write_video(path, tile(films), round(1.0 / dt_s))
        pictures.plot(trajectories_path(path), flights)

    def _mdp(self, distribution: str) -> Swarm:
        if distribution not in self.MDPS:
            raise UserError(f"unknown distribution {distribution!r}; expected one of {', '.join(self.MDPS)}")
        return reweighted(self.MDPS[distribution], self.reward)
