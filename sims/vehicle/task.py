"""Vehicle tasks as something a run can train on: environments, evaluation, pictures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from embodied.command_line.config import at_least
from embodied.errors import UserError
from embodied.evaluation.video import Frames, film, tile, write_video
from embodied.policy import Policy
from embodied.saving.files import complete_or_absent
from sims.vehicle.dwa import DynamicWindow
from sims.vehicle.environment import VehicleEnvironment
from sims.vehicle.episode import Mdp
from sims.vehicle.gap import FollowTheGap
from sims.vehicle.geometry import Lidar
from sims.vehicle.mapping import MappingPlanner
from sims.vehicle.navigate import Navigate
from sims.vehicle.pictures import Array, Map, draw
from sims.vehicle.pursuit import PurePursuit
from sims.vehicle.race import Race
from sims.vehicle.raceline import Raceline
from sims.vehicle.vehicles import PARAMETERS, VEHICLES, Vehicle

FILMED, STRIDE = 4, 2
"""Episodes in a video, and control steps between its frames."""
GOALS: dict[str, tuple[Mdp, str]] = {"navigate": (Navigate(), "jackal"), "race": (Race(), "f1tenth")}
"""Tasks, and who drives."""
T = TypeVar("T", bound=Any)


def _names(given: Any) -> list[str]:  # noqa: ANN401 - a dataclass or an instance of one
    return [entry.name for entry in fields(given)]


NUMBERS = tuple(dict.fromkeys(name for mdp, _ in GOALS.values() for name in _names(mdp)))
"""Names of the numbers of all tasks."""


@dataclass
class VehicleTask:
    """A goal, and who drives to it.

    `goal` is to "navigate" a Jackal among unknown obstacles, or to "race" an F1TENTH car on unknown tracks. `vehicle`
    holds numbers that differ from the vehicle's own (`vehicles.Vehicle`), `numbers` and `lidar` those of the task and
    of its lidar; null: they do not. Each episode's dynamics differ by up to the share `randomisation`.
    """

    name: str = "vehicle_navigate"
    goal: str = "navigate"
    vehicle: dict[str, float | None] = field(default_factory=lambda: dict.fromkeys(PARAMETERS))
    numbers: dict[str, float | None] = field(default_factory=lambda: dict.fromkeys(NUMBERS))
    lidar: dict[str, float | None] = field(default_factory=lambda: dict.fromkeys(_names(Lidar)))
    randomisation: float = 0.0
    step_limit: int | None = None

    def __post_init__(self) -> None:
        """Raise UserError for what there is not."""
        if self.goal not in GOALS:
            raise UserError(f"unknown goal {self.goal!r}; expected one of {', '.join(GOALS)}")
        if not 0.0 <= self.randomisation < 1.0:
            raise UserError(f"expected task.randomisation in [0, 1), got {self.randomisation}")
        mdp, vehicle = GOALS[self.goal]
        self._mdp = _changed(mdp, self.numbers, "task.numbers")
        self._vehicle = _changed(VEHICLES[vehicle], self.vehicle, "task.vehicle")
        self._lidar = _changed(mdp.LIDAR, self.lidar, "task.lidar")
        if self.step_limit is not None:
            at_least(self, 1, "step_limit")

    @property
    def distributions(self) -> tuple[str, ...]:
        """Random rooms or random tracks."""
        return ("rooms",) if self.goal == "navigate" else ("tracks",)

    @property
    def asset_kind(self) -> None:
        """There are no objects."""
        return

    def environment(
        self, num_envs: int, distribution: str, split: str, seed: int = 0, device: str = "cpu"
    ) -> VehicleEnvironment:
        """Make environments; `split` "eval" has worlds that training has not.

        Raises:
            UserError: for an unknown distribution or split.
        """
        if distribution not in self.distributions:
            raise UserError(f"unknown distribution {distribution!r}; expected one of {', '.join(self.distributions)}")
        return VehicleEnvironment(
            num_envs, mdp=self._mdp, vehicle=self._vehicle, lidar=self._lidar, randomisation=self.randomisation,
            split=split, step_limit=self.step_limit, seed=seed, device=device,
        )  # fmt: skip

    def demonstrations(self, directory: Path, seed: int) -> None:
        """There are none: policies begin from nothing."""
        return

    @property
    def driven(self) -> tuple[Vehicle, Lidar, Mdp]:
        """The vehicle, its lidar and the task's numbers, with all that the options changed."""
        return self._vehicle, self._lidar, self._mdp

    def baselines(self) -> dict[str, Policy]:
        """The usual planners of the goal, by name, on what this task drives."""
        contract = self.environment(1, self.distributions[0], "eval").contract
        if self.goal == "navigate":
            known = contract, self._vehicle, self._lidar
            return {"DWA": DynamicWindow(*known), "map and DWA": MappingPlanner(*known)}
        return {
            "pure pursuit": PurePursuit(contract, self._vehicle),
            "follow the gap": FollowTheGap(contract, self._vehicle, self._lidar),
            "raceline": Raceline(contract, self._vehicle, self._mdp),
        }

    def video(self, path: Path, policies: Mapping[str, Policy], device: str) -> None:
        """Film each policy, by caption, from the same starts; trajectories.png beside it shows the ways driven."""
        films, last = {}, []
        for caption, policy in policies.items():
            env = self.environment(FILMED, self.distributions[0], "eval", device=device)
            films[caption] = film(env, policy, torch.arange(FILMED), _Drive(env).render, device, stride=STRIDE)
            last.append(np.concatenate(list(films[caption].frames[-1]), 1))
        write_video(path, tile(films), round(1.0 / (self._mdp.DT_S * STRIDE)))
        with complete_or_absent(path.with_name("trajectories.png")) as temporary:
            Image.fromarray(np.concatenate(last)).save(temporary, format="png")


class _Drive:
    """Draws episodes and remembers where they went."""

    def __init__(self, env: VehicleEnvironment) -> None:
        self.env = env
        self.trails: list[list[Array]] = [[] for _ in range(env.num_envs)]

    def render(self, ids: NDArray[np.int64]) -> Frames:
        """Pictures of environments `ids` as they are now."""
        now, lidar = self.env.now, self.env.simulator.lidar
        pictures = []
        for row in ids.tolist():
            pose = now.state[row, :3].cpu().numpy()
            self.trails[row].append(pose)
            world = Map(*(now.world[name][row].cpu().numpy() for name in ("circles", "segments", "route")))
            angles = pose[2] + lidar.angles().numpy()
            mounted = self.env.vehicle.lidar_x_m * np.array([np.cos(pose[2]), np.sin(pose[2])])
            rays = now.ranges[row].cpu().numpy()[:, None] * np.stack((np.cos(angles), np.sin(angles)), 1)
            outline = self.env.vehicle.length_m, self.env.vehicle.width_m
            origin = pose[:2] + mounted
            pictures.append(draw(world, np.stack(self.trails[row]), outline, origin, origin + rays))
        return np.stack(pictures)


def _changed(given: T, numbers: Mapping[str, float | None], option: str) -> T:
    """The dataclass `given` with other `numbers`, by name; those that are None stay.

    Raises:
        UserError: for a number that it does not have, and for a part of what comes whole.
    """
    changed = {name: value for name, value in numbers.items() if value is not None}
    if unknown := [name for name in changed if name not in _names(given)]:
        raise UserError(f"unknown number {unknown[0]!r} in {option}; expected one of {', '.join(_names(given))}")
    for name, value in changed.items():
        if isinstance(getattr(given, name), int) and value % 1:
            raise UserError(f"expected a whole number as {option}.{name}, got {value}")
    return replace(given, **{name: type(getattr(given, name))(value) for name, value in changed.items()})
