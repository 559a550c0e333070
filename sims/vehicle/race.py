"""Race alone on an unknown closed track with a lidar: laps without touching a wall."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.configuration import FiniteFloat, NonNegativeFloat, PositiveFloat, PositiveInt
from embodied.contract import TensorSpec
from sims.vehicle.episode import FORWARD, LEFTWARD, STEERING, YAW, YAW_RATE, Moment, Outcome
from sims.vehicle.geometry import Lidar
from sims.vehicle.places.tracks import POINTS, tracks
from sims.vehicle.vehicles import Model
from sims.vehicle.worlds import Array

AHEAD = 20
"""Number of points of the centre line in the critic's observation."""
WINDOW = 6
"""Number of points on each side of the last place in which the nearest is searched: more than a step's length."""


@dataclass(frozen=True)
class Race:
    """Parameters of the task.

    Attributes:
        laps: number of laps of a race.
        radius_low_m, radius_high_m, half_width_low_m, half_width_high_m: parameters of the tracks, see `tracks.tracks`.
        reward_progress: reward per m along the centre line; reward_collision: reward of touching a wall.
        weight_steering: penalty of the squared change of the steering command, in half ranges.
    """

    laps: PositiveInt = 3
    radius_low_m: PositiveFloat = 6.0
    radius_high_m: PositiveFloat = 9.0
    half_width_low_m: PositiveFloat = 0.9
    half_width_high_m: PositiveFloat = 1.4
    reward_progress: FiniteFloat = 1.0
    reward_collision: FiniteFloat = -10.0
    weight_steering: NonNegativeFloat = 0.05

    INSTRUCTION: ClassVar[str] = "drive the laps fast without touching the walls"
    MODEL: ClassVar[Model] = Model.DYNAMIC_BICYCLE
    DT_S: ClassVar[float] = 0.05
    SUBSTEPS: ClassVar[int] = 10
    STEP_LIMIT: ClassVar[int] = 1500
    ENDLESS: ClassVar[bool] = True
    LIDAR: ClassVar[Lidar] = Lidar(beams=55, field_rad=np.radians(270.0), range_m=10.0, noise_m=0.02)
    ACTION: ClassVar[tuple[str, str]] = ("steering_angle", "speed")
    OBSERVED: ClassVar[Mapping[str, TensorSpec]] = {
        "velocity": TensorSpec((2,), unit="m/s", frame="base", names=("x", "y")),
        "yaw_rate": TensorSpec((1,), unit="rad/s", frame="base"),
        "steering": TensorSpec((1,), unit="rad"),
        "route": TensorSpec((AHEAD, 2), unit="m", frame="base", names=("x", "y"), privileged=True),
        # for planners with the map: its number and the pose on it; float64, so that no network reads it
        "place": TensorSpec(
            (5,), "float64", "1, 1, m, m, rad", "world", ("split", "world", "x", "y", "yaw"), privileged=True
        ),
    }

    def worlds(self, rng: np.random.Generator, count: int) -> dict[str, Array]:
        """Random closed tracks."""
        return tracks(
            rng,
            count,
            radius_m=(self.radius_low_m, self.radius_high_m),
            half_width_m=(self.half_width_low_m, self.half_width_high_m),
        )

    def circles(self, now: Moment) -> Tensor:
        """Circles of the world, all unused: tracks consist of walls."""
        return now.world["circles"]

    def begin(self, state: Tensor, world: TensorDict) -> Tensor:
        """Initial memory: progress along the centre line, m; place on it, m; laps; steps at the end of the last lap."""
        return torch.zeros(len(state), 4, device=state.device)

    def observe(self, now: Moment) -> dict[str, Tensor]:
        """Velocity, yaw rate, steering angle; for the critic, the centre line ahead; for planners, map and pose."""
        state = now.state
        ahead = torch.arange(AHEAD, device=state.device)
        points = _points(now, _index(now, now.memory) + ahead) - state[:, None, :2]
        cos, sin = state[:, YAW].cos().unsqueeze(1), state[:, YAW].sin().unsqueeze(1)
        x, y = points.unbind(2)
        return {
            "velocity": state[:, [FORWARD, LEFTWARD]],
            "yaw_rate": state[:, YAW_RATE, None],
            "steering": state[:, STEERING, None],
            "route": torch.stack((cos * x + sin * y, cos * y - sin * x), 2),
            "place": torch.cat((now.world["world"].double(), state[:, :3].double()), 1),
        }

    def outcome(self, before: Moment, after: Moment, hit: Tensor, action: Tensor, previous: Tensor) -> Outcome:
        """Reward for progress, penalties for changes of steering and for contact."""
        length = after.world["length_m"]
        progress, place, laps, lap_steps = before.memory.unbind(1)
        now = _place(after, before.memory)
        step = (now - place + 0.5 * length) % length - 0.5 * length  # the shorter direction around the track
        progress = progress + step
        lap = progress >= (laps + 1.0) * length
        laps = laps + lap.float()
        lap_steps = torch.where(lap, after.steps.float(), lap_steps)
        # r = c_p (progress along the line) - c_s (change of steering)^2 + c_h [contact].
        change = (action[:, 0] - previous[:, 0]).square()
        reward = self.reward_progress * step - self.weight_steering * change
        reward = reward + torch.where(hit, self.reward_collision, 0.0)
        memory = torch.stack((progress, now % length, laps, lap_steps), 1)
        return Outcome(reward, laps >= self.laps, memory)

    def metrics(self, now: Moment, success: Tensor, hit: Tensor) -> dict[str, Tensor]:
        """Laps, their mean time (NaN before the first is complete), collisions."""
        _, _, laps, steps = now.memory.unbind(1)
        lap_time = torch.where(laps > 0, self.DT_S * steps / laps, torch.nan)
        return {"laps": laps.clone(), "lap_time_s": lap_time, "collision": hit.float()}


def _index(now: Moment, memory: Tensor) -> Tensor:
    """Index [N, 1] of the centre line's point at the place in `memory` [N, 4]."""
    return (memory[:, 1:2] / now.world["length_m"].unsqueeze(1) * POINTS).round().long()


def _points(now: Moment, numbers: Tensor) -> Tensor:
    """Points [N, P, 2] of the centre line with indices `numbers` [N, P], which wrap around."""
    return now.world["route"].gather(1, (numbers % POINTS).unsqueeze(2).expand(-1, -1, 2))


def _place(now: Moment, memory: Tensor) -> Tensor:
    """Place on the centre line [N], m from its first point: foot of the perpendicular on its nearest edges.

    `memory` [N, 4] has the previous place.
    """
    position, window = now.state[:, None, :2], torch.arange(-WINDOW, WINDOW + 1, device=now.state.device)
    candidates = _index(now, memory) + window
    nearest = candidates.gather(1, (_points(now, candidates) - position).square().sum(-1).argmin(1, keepdim=True))
    first, last = _points(now, torch.cat((nearest - 1, nearest + 1), 1)).unbind(1)
    chord = last - first
    share = ((position[:, 0] - first) * chord).sum(1) / chord.square().sum(1)
    return (nearest[:, 0] - 1.0 + 2.0 * share) * now.world["length_m"] / POINTS
