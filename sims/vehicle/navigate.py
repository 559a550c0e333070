"""Drive to a goal among unmapped obstacles: local planning with a differential drive and a lidar."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.configuration import FiniteFloat, Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat
from embodied.contract import TensorSpec
from sims.vehicle.episode import FORWARD, YAW, YAW_RATE, Mdp, Moment
from sims.vehicle.geometry import Lidar
from sims.vehicle.places import people
from sims.vehicle.places.rooms import rooms
from sims.vehicle.shortest_paths import path_length_at, path_lengths
from sims.vehicle.vehicles import Model
from sims.vehicle.worlds import Array

PLACE = slice(1, 3)
FACING = 3
REPLACED = 4
"""Columns of the memory: errors of odometry's position and heading, and number of commands that a guard replaced.

Column 0 is the length of the driven path; the states of people follow.
"""


@dataclass(frozen=True)
class Navigate(Mdp):
    """Parameters of the task.

    Attributes:
        goal_m: distance from the goal below which an episode succeeds.
        half_m, divided, obstacles_low, obstacles_high, gap_m, distance_m: parameters of the rooms, see `rooms.rooms`.
        reward_goal, reward_collision: rewards at the end; reward_progress: reward per m of the shortest path to the
            goal.
        people: largest number of people who walk about, see `people`.
        odometry_share: largest error of the distance that odometry measures, as a share; constant in an episode.
        odometry_yaw_rad_m: largest drift of its heading per m driven; constant in an episode.
        weight_time: penalty per second; weight_turn: penalty of the squared change of the yaw rate command, in half
            ranges; weight_replaced: penalty of a command that a guard replaces.
    """

    goal_m: PositiveFloat = 0.3
    half_m: PositiveFloat = 5.0
    divided: Fraction = 0.6
    obstacles_low: NonNegativeInt = 10
    obstacles_high: NonNegativeInt = 20
    gap_m: PositiveFloat = 0.75
    distance_m: PositiveFloat = 6.0
    people: NonNegativeInt = 0
    odometry_share: Fraction = 0.0
    odometry_yaw_rad_m: NonNegativeFloat = 0.0
    reward_goal: FiniteFloat = 8.0
    reward_collision: FiniteFloat = -16.0
    reward_progress: FiniteFloat = 1.0
    weight_time: NonNegativeFloat = 0.2
    weight_turn: NonNegativeFloat = 0.005
    weight_replaced: NonNegativeFloat = 0.1

    INSTRUCTION: ClassVar[str] = "drive to the goal without touching anything"
    MODEL: ClassVar[Model] = Model.DIFFERENTIAL_DRIVE
    DT_S: ClassVar[float] = 0.1
    SUBSTEPS: ClassVar[int] = 5
    STEP_LIMIT: ClassVar[int] = 300
    LIDAR: ClassVar[Lidar] = Lidar(beams=90, range_m=6.0, noise_m=0.01)
    ACTION: ClassVar[tuple[str, str]] = ("speed", "yaw_rate")
    OBSERVED: ClassVar[Mapping[str, TensorSpec]] = {
        "goal_distance": TensorSpec((1,), unit="m"),
        "goal_direction": TensorSpec((2,), unit="1", frame="base", names=("x", "y")),
        "velocity": TensorSpec((2,), unit="m/s, rad/s", frame="base", names=("speed", "yaw_rate")),
        "time": TensorSpec((1,), unit="s", privileged=True),
        "path_length": TensorSpec((1,), unit="m", privileged=True),
    }

    def worlds(self, rng: np.random.Generator, count: int) -> dict[str, Array]:
        """Rooms with obstacles, and lengths [M, G, G] of shortest paths to the goal, see `shortest_paths`."""
        arrays = rooms(
            rng,
            count,
            half_m=self.half_m,
            divided=self.divided,
            obstacles=(self.obstacles_low, self.obstacles_high),
            gap_m=self.gap_m,
            distance_m=self.distance_m,
        )
        circles, segments, route = (torch.from_numpy(arrays[name]).float() for name in ("circles", "segments", "route"))
        arrays |= {"path_length": path_lengths(circles, segments, route[:, 0], self.half_m).numpy()}
        return arrays | (people.lines(rng, arrays, self.people, self.half_m) if self.people else {})

    def circles(self, now: Moment) -> Tensor:
        """Obstacle circles of the room, and people, [N, C + P, 3]."""
        obstacles = super().circles(now)
        return torch.cat((obstacles, people.circles(self._people(now))), 1) if self.people else obstacles

    def reset(self, state: Tensor, world: TensorDict) -> Tensor:
        """Initial memory: driven path, m, errors of odometry's position and heading, replaced commands, people."""
        vehicle_memory = torch.zeros(len(state), REPLACED + 1, device=state.device)
        return (
            torch.cat((vehicle_memory, people.begin(world["walks"]).flatten(1)), 1) if self.people else vehicle_memory
        )

    def observe(self, now: Moment) -> dict[str, Tensor]:
        """Goal relative to the odometry's pose, and velocity; for the critic, time and length of the shortest path."""
        to_goal = _to_goal(now) - now.memory[:, PLACE]
        yaw = now.state[:, YAW] + now.memory[:, FACING]
        distance = to_goal.norm(dim=1, keepdim=True)
        angle = torch.atan2(to_goal[:, 1], to_goal[:, 0]) - yaw
        return {
            "goal_distance": distance,
            "goal_direction": torch.stack((angle.cos(), angle.sin()), 1),
            "velocity": now.state[:, [FORWARD, YAW_RATE]],
            "time": self.DT_S * now.steps.float().unsqueeze(1),
            "path_length": self._remaining(now).unsqueeze(1),
        }

    def update(self, now: Moment) -> Tensor:
        """Memory after a control step, see `reset`."""
        assert now.before is not None
        memory = self._drifted(now.before, now)
        if not self.people:
            return memory
        world = now.world
        position = now.state[:, :2]
        surroundings = world["walks"], world["pace"], position, world["circles"], world["segments"]
        walked = people.walk(self._people(now.before), *surroundings, self.DT_S)
        return torch.cat((memory, walked.flatten(1)), 1)

    def reward(self, now: Moment) -> Tensor:
        """Reward for progress and arrival, penalties for time, turning, replaced commands and contact."""
        assert now.before is not None
        near = self._remaining(now)
        far = self._remaining(now.before)
        # r = c_p (d_before - d_after) - c_t dt - c_w (change of yaw rate)^2 - c_g [replaced] + reward at the end.
        turn = (now.action[:, 1] - now.previous[:, 1]).square()
        reward = self.reward_progress * (far - near) - self.weight_time * self.DT_S - self.weight_turn * turn
        reward = reward - self.weight_replaced * now.replaced
        end = torch.where(now.hit, self.reward_collision, torch.where(self.success(now), self.reward_goal, 0.0))
        return reward + end

    def terminated(self, now: Moment) -> Tensor:
        """Whether the vehicle is at the goal."""
        return self.success(now)

    def success(self, now: Moment) -> Tensor:
        """Whether the vehicle is at the goal."""
        return _to_goal(now).norm(dim=1) < self.goal_m

    def metrics(self, now: Moment) -> dict[str, Tensor]:
        """Collisions, share of replaced commands; for successes, time, path length, and path length over distance."""
        path = now.memory[:, 0]
        arrived = {"time_s": self.DT_S * now.steps, "path_m": path, "path_over_straight": path / now.world["length_m"]}
        replaced = now.memory[:, REPLACED] / now.steps.clamp_min(1)
        return {"collision": now.hit.float(), "replaced": replaced} | {
            name: torch.where(now.succeeded, value, torch.nan) for name, value in arrived.items()
        }

    def _drifted(self, before: Moment, after: Moment) -> Tensor:
        """Path, odometry's errors (with the world's factors) and replaced commands after the step from `before`."""
        x, y = (after.state[:, :2] - before.state[:, :2]).unbind(1)
        driven, (share, drift) = torch.hypot(x, y), before.world["odometry"].unbind(1)
        # The error grows by s R(e) d - d for the displacement d, the heading error e and the scale s.
        heading_drift = self.odometry_yaw_rad_m * drift * driven
        angle = before.memory[:, FACING] + 0.5 * heading_drift
        scale = 1.0 + self.odometry_share * share
        cos = scale * angle.cos() - 1.0
        sin = scale * angle.sin()
        change = driven, cos * x - sin * y, sin * x + cos * y, heading_drift, after.replaced
        return before.memory[:, : REPLACED + 1] + torch.stack(change, 1)

    def _people(self, now: Moment) -> Tensor:
        """States [N, P, STATE] of people."""
        return now.memory[:, REPLACED + 1 :].unflatten(1, (self.people, people.STATE))

    def _remaining(self, now: Moment) -> Tensor:
        """Length of the shortest path [N], m; the straight distance if no grid cell near the vehicle is free."""
        length = path_length_at(now.world["path_length"], now.state[:, :2], self.half_m)
        return torch.where(length.isfinite(), length, _to_goal(now).norm(dim=1))


def _to_goal(now: Moment) -> Tensor:
    return now.world["route"][:, 0] - now.state[:, :2]
