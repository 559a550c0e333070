"""Vehicle tasks: environments, baselines, video."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from embodied.configuration import FiniteFloat, PositiveFloat, PositiveInt, Range, with_numbers
from embodied.contract import Contract
from embodied.data.demonstrations import record_once
from embodied.data.episodes import Episodes, EpisodeWriter
from embodied.data.recording import record_episodes
from embodied.environments.engine import Unnumbered
from embodied.errors import UserError
from embodied.evaluation.video import Frames, film, tile, trajectories_path, write_video
from embodied.export.conditions import Conditions
from embodied.navigation.dynamic_window import DynamicWindow
from embodied.policy import Policy
from embodied.saving.files import complete_or_absent
from embodied.task import Task
from sims.remote.options import ProcessOptions
from sims.vehicle.drawing import Array, Map, draw
from sims.vehicle.environment import VehicleEnvironment, contract
from sims.vehicle.episode import Mdp
from sims.vehicle.geometry import Lidar
from sims.vehicle.mapping import drive_of
from sims.vehicle.navigate import Navigate
from sims.vehicle.planners.gap import FollowTheGap
from sims.vehicle.planners.mapping import MappingPlanner
from sims.vehicle.planners.pursuit import PurePursuit
from sims.vehicle.planners.raceline import Raceline
from sims.vehicle.practice import Practice, PracticeEnvironment
from sims.vehicle.race import Race
from sims.vehicle.vehicles import F1TENTH, JACKAL, Vehicle

FILMED = 4
STRIDE = 2
"""Episodes in a video, and control steps between its frames."""
PEOPLE = 6
"""Largest number of people in the distribution "people"."""
DRIFT = {"odometry_share": 0.01, "odometry_yaw_rad_m": 0.005}
NOISE = 3.0
"""Distribution "drift": errors of odometry, see `Navigate`, and the factor of the lidar's noise."""
T = TypeVar("T", bound=Any)


def _numbers(numbers: Any) -> dict[str, float]:  # noqa: ANN401 - a dataclass of numbers
    return {entry.name: float(getattr(numbers, entry.name)) for entry in fields(numbers)}


@dataclass
class VehicleTask(Task, ProcessOptions):
    """Options common to both vehicle tasks.

    `vehicle` has the vehicle's parameters (`vehicles.Vehicle`), `numbers` and `lidar` those of the task and of its
    lidar. The dynamics of each episode vary by up to the share `randomisation`. An episode is truncated after
    `step_limit` control steps. A policy decides every `executed` control steps.
    """

    name: str = "vehicle"
    vehicle: dict[str, FiniteFloat] = field(default_factory=dict)
    numbers: dict[str, FiniteFloat] = field(default_factory=dict)
    lidar: dict[str, FiniteFloat] = field(default_factory=dict)
    randomisation: Annotated[float, Range(at_least=0, below=1)] = 0.0
    step_limit: PositiveInt = 300
    executed: PositiveInt = 1

    MDP: ClassVar[Mdp]
    VEHICLE: ClassVar[Vehicle]
    distributions: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        """Raise UserError for unknown or impossible values."""
        super().__post_init__()
        self._vehicle = with_numbers(self.VEHICLE, self.vehicle, "task.vehicle")
        self._lidar = with_numbers(self.MDP.LIDAR, self.lidar, "task.lidar")
        self._mdp = with_numbers(self.MDP, self.numbers, "task.numbers")

    def contract(self, distribution: str) -> Contract:
        """The contract of the task with its vehicle and lidar.

        Raises:
            UserError: for an unknown distribution.
        """
        self._check(distribution)
        return contract(self._mdp, self._vehicle, self._lidar, self.executed, mapped=self._mapped)

    def environment(
        self, num_envs: int, distribution: str, split: str, seed: int = 0, device: str = "cpu"
    ) -> VehicleEnvironment:
        """Make environments; worlds of `split` "eval" do not occur in training.

        Raises:
            UserError: for an unknown distribution or split.
        """
        self._check(distribution)
        mdp, lidar = self._as(distribution)
        return VehicleEnvironment(
            num_envs,
            mdp=mdp,
            vehicle=self._vehicle,
            lidar=lidar,
            randomisation=self.randomisation,
            mapped=self._mapped,
            guarded=self._guarded,
            split=split,
            executed=self.executed,
            step_limit=self.step_limit,
            seed=seed,
            device=device,
        )

    @property
    def driven(self) -> tuple[Vehicle, Lidar, Mdp]:
        """The vehicle, its lidar and the task's parameters, with the options applied."""
        return self._vehicle, self._lidar, self._mdp

    def video(
        self, path: Path, policies: Mapping[str, Policy], device: str, distribution: str | None = None, first: int = 0
    ) -> None:
        """Write a video of each policy, by caption, from the same starts, and next to it a picture of their paths."""
        films = {}
        last = []
        for caption, policy in policies.items():
            env = self.environment(FILMED, distribution or self.distributions[0], "eval", device=device)
            starts = torch.arange(first, first + FILMED)
            films[caption] = film(env, policy, starts, _Drive(env).render, device, stride=STRIDE)
            last.append(np.concatenate(list(films[caption].frames[-1]), 1))
        write_video(path, tile(films), round(1.0 / (self._mdp.DT_S * STRIDE)))
        with complete_or_absent(trajectories_path(path)) as temporary:
            Image.fromarray(np.concatenate(last)).save(temporary, format="png")

    @property
    def _mapped(self) -> bool:
        """Whether vehicles make maps."""
        return False

    @property
    def _guarded(self) -> bool:
        """Whether a guard checks the vehicles' commands."""
        return False

    def _as(self, distribution: str) -> tuple[Mdp, Lidar]:
        """Task and lidar of `distribution`."""
        return self._mdp, self._lidar

    def _check(self, distribution: str) -> None:
        if distribution not in self.distributions:
            raise UserError(f"unknown distribution {distribution!r}; expected one of {', '.join(self.distributions)}")


@dataclass
class NavigateTask(VehicleTask):
    """Drive a Jackal among unmapped obstacles in random rooms.

    With `map` the policy observes waypoints of the shortest path on a map from the vehicle's own lidar, and remembered
    hits, see `LocalMap`; with `guard`, commands after which the vehicle could not stop are replaced, see `Guard`. In
    the distribution "drift" odometry has errors of up to 1% and 0.3 degrees per m, and the lidar three times its noise;
    in "people" up to six people walk about.
    """

    name: str = "vehicle_navigate"
    vehicle: dict[str, FiniteFloat] = field(default_factory=lambda: _numbers(JACKAL))
    numbers: dict[str, FiniteFloat] = field(default_factory=lambda: _numbers(Navigate()))
    lidar: dict[str, FiniteFloat] = field(default_factory=lambda: _numbers(Navigate.LIDAR))
    step_limit: PositiveInt = Navigate.STEP_LIMIT
    map: bool = True
    guard: bool = True

    MDP: ClassVar[Mdp] = Navigate()
    VEHICLE: ClassVar[Vehicle] = JACKAL
    distributions: ClassVar[tuple[str, ...]] = ("rooms", "drift", "people")
    meanings: ClassVar[Mapping[str, str]] = {
        "rooms": "Random rooms with up to 20 obstacles.",
        "drift": f"The same rooms with odometry that drifts, and {NOISE:g} times the noise of the lidar.",
        "people": f"The same rooms with up to {PEOPLE} people who walk about.",
    }

    def __post_init__(self) -> None:
        """Raise UserError for unknown or impossible values, and for a guard without a map."""
        super().__post_init__()
        if self.guard and not self.map:
            raise UserError("the guard needs the map; use task.guard=false with task.map=false")

    def baselines(self) -> dict[str, Policy]:
        """The dynamic window, without and with a map."""
        arguments = self.contract("rooms"), self._vehicle, self._lidar
        return {"DWA": DynamicWindow(arguments[0], drive_of(*arguments[1:])), "map and DWA": MappingPlanner(*arguments)}

    @property
    def conditions(self) -> Conditions:
        """Training conditions of this task's policies."""
        checked = "commands that a guard checks, which is not exported" if self.guard else "commands that nobody checks"
        return Conditions((checked,), (), first_action=-1.0)

    @property
    def _mapped(self) -> bool:
        return self.map

    @property
    def _guarded(self) -> bool:
        return self.guard

    def _as(self, distribution: str) -> tuple[Mdp, Lidar]:
        if distribution == "rooms":
            return self._mdp, self._lidar
        if distribution == "people":
            return with_numbers(self._mdp, {"people": PEOPLE}, "the distribution"), self._lidar
        lidar = replace(self._lidar, noise_m=NOISE * self._lidar.noise_m)
        return with_numbers(self._mdp, DRIFT, "the distribution"), lidar


@dataclass
class RaceTask(VehicleTask):
    """Race an F1TENTH car on random unknown tracks."""

    name: str = "vehicle_race"
    vehicle: dict[str, FiniteFloat] = field(default_factory=lambda: _numbers(F1TENTH))
    numbers: dict[str, FiniteFloat] = field(default_factory=lambda: _numbers(Race()))
    lidar: dict[str, FiniteFloat] = field(default_factory=lambda: _numbers(Race.LIDAR))
    step_limit: PositiveInt = Race.STEP_LIMIT

    MDP: ClassVar[Mdp] = Race()
    VEHICLE: ClassVar[Vehicle] = F1TENTH
    distributions: ClassVar[tuple[str, ...]] = ("tracks",)
    meanings: ClassVar[Mapping[str, str]] = {"tracks": "Random closed tracks, driven alone."}

    def baselines(self) -> dict[str, Policy]:
        """Two planners with the map of the track, and one with the lidar only."""
        contract = self.contract("tracks")
        return {
            "pure pursuit": PurePursuit(contract, self._vehicle),
            "follow the gap": FollowTheGap(contract, self._vehicle, self._lidar),
            "raceline": Raceline(contract, self._vehicle, self._mdp),
        }


@dataclass
class PracticeTask(VehicleTask):
    """Practise fast laps of one track with an F1TENTH car that nobody resets.

    The track has the number `track`. In training the car recovers by itself where it has crashed or is stuck, and is
    put back by a person only after `tries` recoveries without progress; evaluations are laps from its beginning. The
    demonstration is one lap at up to `demonstrated_m_s`.
    """

    name: str = "vehicle_practice"
    vehicle: dict[str, FiniteFloat] = field(default_factory=lambda: _numbers(F1TENTH))
    numbers: dict[str, FiniteFloat] = field(default_factory=lambda: _numbers(Practice()))
    lidar: dict[str, FiniteFloat] = field(default_factory=lambda: _numbers(Practice.LIDAR))
    step_limit: PositiveInt = Practice.STEP_LIMIT
    train_step_limit: PositiveInt = 400
    tries: PositiveInt = 10
    demonstrated_m_s: PositiveFloat = 3.0

    MDP: ClassVar[Mdp] = Practice()
    VEHICLE: ClassVar[Vehicle] = F1TENTH
    distributions: ClassVar[tuple[str, ...]] = ("track",)
    meanings: ClassVar[Mapping[str, str]] = {"track": "Laps of the track of training, from rest near its beginning."}

    def environment(
        self, num_envs: int, distribution: str, split: str, seed: int = 0, device: str = "cpu"
    ) -> VehicleEnvironment | Unnumbered:
        """Make environments: in training cars that go on from where they are, else cars at the track's beginning.

        Raises:
            UserError: for an unknown distribution or split.
        """
        if split != "train":
            return super().environment(num_envs, distribution, split, seed, device)
        self._check(distribution)
        assert isinstance(self._mdp, Practice)
        env = PracticeEnvironment(
            num_envs,
            mdp=self._mdp,
            tries=self.tries,
            vehicle=self._vehicle,
            lidar=self._lidar,
            randomisation=self.randomisation,
            executed=self.executed,
            step_limit=self.train_step_limit,
            seed=seed,
            device=device,
        )
        return Unnumbered(env)

    def demonstrations(self, directory: Path, seed: int) -> Episodes:
        """One slow lap; driven once, then read from `directory`."""
        driven = {name: getattr(self, name) for name in ("vehicle", "numbers", "lidar", "demonstrated_m_s")}

        def record(writer: EpisodeWriter) -> None:
            one_lap = replace(self, numbers=self.numbers | {"laps": 1}, executed=1)
            env = VehicleTask.environment(one_lap, 1, self.distributions[0], "train", seed)
            writer.add(record_episodes(env, self._slow(), torch.Generator()))

        return record_once(directory, self.contract(self.distributions[0]), driven, record)

    @property
    def max_demonstration_steps(self) -> int:
        """Largest number of control steps of the lap."""
        return self.step_limit

    def baselines(self) -> dict[str, Policy]:
        """The demonstrated driving, and planners with the lidar and with the map."""
        contract = self.contract(self.distributions[0])
        return {
            "demonstrated lap": self._slow(),
            "follow the gap": FollowTheGap(contract, self._vehicle, self._lidar),
            "raceline": Raceline(contract, self._vehicle, self._mdp),
        }

    def _slow(self) -> FollowTheGap:
        slow = replace(self._vehicle, speed_max_m_s=self.demonstrated_m_s)
        return FollowTheGap(self.contract(self.distributions[0]), slow, self._lidar)


class _Drive:
    """Draws episodes with their paths."""

    def __init__(self, env: VehicleEnvironment) -> None:
        self.env = env
        self.trails: list[list[Array]] = [[] for _ in range(env.num_envs)]

    def render(self, ids: NDArray[np.int64]) -> Frames:
        """Images of the present state of environments `ids`."""
        now = self.env.now
        lidar = self.env.simulator.lidar
        pictures = []
        for row in ids.tolist():
            pose = now.state[row, :3].cpu().numpy()
            self.trails[row].append(pose)
            parts = self.env.mdp.circles(now)[row], now.world["segments"][row], now.world["route"][row]
            world = Map(*(part.cpu().numpy() for part in parts))
            angles = pose[2] + lidar.angles().numpy()
            lidar_offset = self.env.vehicle.lidar_x_m * np.array([np.cos(pose[2]), np.sin(pose[2])])
            rays = now.ranges[row].cpu().numpy()[:, None] * np.stack((np.cos(angles), np.sin(angles)), 1)
            outline = self.env.vehicle.length_m, self.env.vehicle.width_m
            origin = pose[:2] + lidar_offset
            pictures.append(draw(world, np.stack(self.trails[row]), outline, origin, origin + rays))
        return np.stack(pictures)
