"""Follow the gap (Sezer and Gokasan 2012, Robotics and Autonomous Systems 60(9)) for F1TENTH cars, with only a lidar.

Obstacles are widened by half the vehicle (the disparity extender), the vehicle steers into the farthest free gap, and
the speed allows stopping within the free distance and driving the curve.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.contract import Contract
from embodied.policy import Decision
from sims.vehicle.geometry import Lidar
from sims.vehicle.vehicles import Vehicle


@dataclass(frozen=True)
class GapNumbers:
    """Parameters of the planner; tuned on training worlds, see README.md.

    Attributes:
        margin_m: clearance on both sides of the vehicle.
        share: a gap consists of beams with at least this share of the farthest range.
        aim_m: largest distance of the target point in the gap; the vehicle steers on a circle through this point.
        lateral_m_s2, braking_m_s2: accelerations in curves and before obstacles.
        stop_m: distance from the obstacle at which the vehicle would stop.
    """

    margin_m: float = 0.129
    share: float = 0.343
    aim_m: float = 0.497
    lateral_m_s2: float = 5.25
    braking_m_s2: float = 3.86
    stop_m: float = 0.494


class FollowTheGap:
    """Steers into the farthest gap."""

    def __init__(self, contract: Contract, vehicle: Vehicle, lidar: Lidar, numbers: GapNumbers | None = None) -> None:
        self.contract = contract
        self.vehicle = vehicle
        self.lidar = lidar
        self.numbers = numbers or GapNumbers()

    def act(
        self, observation: TensorDict, *, deterministic: bool = False, generator: torch.Generator | None = None
    ) -> Decision:
        """Steering angle and speed [N, H, 2] for the N observations; nothing is random."""
        numbers = self.numbers
        v = self.vehicle
        angles = self.lidar.angles().to(observation["lidar"].device)
        ahead = angles.abs() <= 0.5 * math.pi + 1e-3
        free = self._widened(observation["lidar"])[:, ahead]
        angles = angles[ahead]
        aim, room = self._gap(free, angles)
        distance = room.clamp_max(numbers.aim_m)
        x = v.lidar_x_m + v.rear_axle_m + distance * aim.cos()
        y = distance * aim.sin()
        curvature = 2.0 * y / (x.square() + y.square())  # of the rear axle's circle, as in pure pursuit
        steering = ((v.front_axle_m + v.rear_axle_m) * curvature).atan().clamp(-v.steering_rad, v.steering_rad)
        # v^2 = 2 a d to stop in time, and v^2 = a_lat / kappa in the curve.
        speed = (2.0 * numbers.braking_m_s2 * (room - numbers.stop_m).clamp_min(0.05)).sqrt()
        speed = torch.minimum(speed, (numbers.lateral_m_s2 / curvature.abs().clamp_min(1e-3)).sqrt())
        actions = torch.stack((steering, speed.clamp(v.speed_min_m_s, v.speed_max_m_s)), 1)
        actions = actions.unsqueeze(1).expand(-1, self.contract.horizon, -1)
        empty = TensorDict({}, batch_size=[len(actions)])
        return Decision(actions, empty, torch.zeros(len(actions), 1, 1, device=actions.device))

    def _widened(self, ranges: Tensor) -> Tensor:
        """Free distance [N, B] of the vehicle in each direction: obstacles are widened by half its width."""
        angles = self.lidar.angles().to(ranges.device)
        half = 0.5 * self.vehicle.width_m + self.numbers.margin_m
        # An obstacle at the range r covers the angles within asin(half / r).
        covers = (half / ranges.clamp_min(half)).asin().unsqueeze(2)  # [N, B measured, 1]
        near = (angles.unsqueeze(1) - angles).abs() <= covers
        return torch.where(near, ranges.unsqueeze(2), self.lidar.range_m).amin(1)

    def _gap(self, free: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        """Direction [N] of the middle of the gap around the farthest of `free` [N, B], and the free distance there."""
        farthest = free.max(1)
        closed = (free < self.numbers.share * farthest.values.unsqueeze(1)).long()
        walls = closed.cumsum(1)
        same = walls == walls.gather(1, farthest.indices.unsqueeze(1))  # no wall between
        inside = free * (same & (closed == 0))
        aim = (inside * angles).sum(1) / inside.sum(1)
        nearest = (angles - aim.unsqueeze(1)).abs().argmin(1, keepdim=True)
        return aim, free.gather(1, nearest)[:, 0]
