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
from sims.vehicle.episode import FORWARD, LEFTWARD, STEERING, YAW, YAW_RATE, Mdp, Moment
from sims.vehicle.geometry import Lidar
from sims.vehicle.places.tracks import POINTS, tracks
from sims.vehicle.vehicles import Model
from sims.vehicle.worlds import Array

AHEAD = 20
"""Number of points of the centre line in the critic's observation."""
WINDOW = 6
"""Number of points on each side of the last place in which the nearest is searched: more than a step's length."""
COLUMNS = 5
"""Number of columns of the memory, see `Race.reset`, to which tasks that derive from it may add."""


@dataclass(frozen=True)
class Race(Mdp):
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

    def reset(self, state: Tensor, world: TensorDict) -> Tensor:
        """Initial memory: progress along the centre line, m; place on it, m; laps; steps at the end of the last lap.

        Its last column is the progress of the last control step, m.
        """
        return torch.zeros(len(state), COLUMNS, device=state.device)

    def observe(self, now: Moment) -> dict[str, Tensor]:
        """Velocity, yaw rate, steering angle; for the critic, the centre line ahead; for planners, map and pose."""
        state = now.state
        ahead = torch.arange(AHEAD, device=state.device)
        points = _points(now, _index(now, now.memory) + ahead) - state[:, None, :2]
        cos = state[:, YAW].cos().unsqueeze(1)
        sin = state[:, YAW].sin().unsqueeze(1)
        x, y = points.unbind(2)
        return {
            "velocity": state[:, [FORWARD, LEFTWARD]],
            "yaw_rate": state[:, YAW_RATE, None],
            "steering": state[:, STEERING, None],
            "route": torch.stack((cos * x + sin * y, cos * y - sin * x), 2),
            "place": torch.cat((now.world["world"].double(), state[:, :3].double()), 1),
        }

    def update(self, now: Moment) -> Tensor:
        """Memory after a control step, see `reset`."""
        assert now.before is not None
        length = now.world["length_m"]
        progress, previous, laps, lap_steps, _ = now.before.memory[:, :COLUMNS].unbind(1)
        place = _place(now, now.before.memory)
        step = (place - previous + 0.5 * length) % length - 0.5 * length  # the shorter direction around the track
        progress = progress + step
        lap = progress >= (laps + 1.0) * length
        lap_steps = torch.where(lap, now.steps.float(), lap_steps)
        return torch.stack((progress, place % length, laps + lap.float(), lap_steps, step), 1)

    def reward(self, now: Moment) -> Tensor:
        """Reward for progress, penalties for changes of steering and for contact."""
        # r = c_p (progress along the line) - c_s (change of steering)^2 + c_h [contact].
        change = (now.action[:, 0] - now.previous[:, 0]).square()
        reward = self.reward_progress * now.memory[:, 4] - self.weight_steering * change
        return reward + torch.where(now.hit, self.reward_collision, 0.0)

    def finished(self, now: Moment) -> Tensor:
        """Whether all laps are complete."""
        return now.memory[:, 2] >= self.laps

    def success(self, now: Moment) -> Tensor:
        """Whether all laps are complete."""
        return self.finished(now)

    def metrics(self, now: Moment) -> dict[str, Tensor]:
        """Laps, their mean time (NaN before the first is complete), collisions."""
        _, _, laps, steps, _ = now.memory[:, :COLUMNS].unbind(1)
        lap_time = torch.where(laps > 0, self.DT_S * steps / laps, torch.nan)
        return {"laps": laps.clone(), "lap_time_s": lap_time, "collision": now.hit.float()}


def _index(now: Moment, memory: Tensor) -> Tensor:
    """Index [N, 1] of the centre line's point at the place in `memory` [N, 5]."""
    return (memory[:, 1:2] / now.world["length_m"].unsqueeze(1) * POINTS).round().long()


def _points(now: Moment, numbers: Tensor) -> Tensor:
    """Points [N, P, 2] of the centre line with indices `numbers` [N, P], which wrap around."""
    return now.world["route"].gather(1, (numbers % POINTS).unsqueeze(2).expand(-1, -1, 2))


def _place(now: Moment, memory: Tensor) -> Tensor:
    """Place on the centre line [N], m from its first point: foot of the perpendicular on its nearest edges.

    `memory` [N, 5] has the previous place.
    """
    position = now.state[:, None, :2]
    window = torch.arange(-WINDOW, WINDOW + 1, device=now.state.device)
    candidates = _index(now, memory) + window
    nearest = candidates.gather(1, (_points(now, candidates) - position).square().sum(-1).argmin(1, keepdim=True))
    first, last = _points(now, torch.cat((nearest - 1, nearest + 1), 1)).unbind(1)
    chord = last - first
    share = ((position[:, 0] - first) * chord).sum(1) / chord.square().sum(1)
    return (nearest[:, 0] - 1.0 + 2.0 * share) * now.world["length_m"] / POINTS
