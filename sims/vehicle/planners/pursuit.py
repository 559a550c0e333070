"""Pure pursuit (Coulter 1992, CMU-RI-TR-92-01) of a track's centre line as a policy.

Unlike a learned policy it reads the centre line ahead. It drives curves at a fixed lateral acceleration,
braking in time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.contract import Contract
from embodied.policy import Decision
from sims.vehicle.vehicles import Vehicle


@dataclass(frozen=True)
class Numbers:
    """Parameters of the controller; tuned on training worlds, see README.md.

    Attributes:
        ahead_m, ahead_s: look-ahead distance along the line, at rest and per speed.
        lateral_m_s2, braking_m_s2: accelerations in curves and before them.
    """

    ahead_m: float = 0.9
    ahead_s: float = 0.05
    lateral_m_s2: float = 3.5
    braking_m_s2: float = 2.0


class PurePursuit:
    """Steers on a circle through a point ahead on the line."""

    def __init__(self, contract: Contract, vehicle: Vehicle, numbers: Numbers | None = None) -> None:
        self.contract = contract
        self.vehicle = vehicle
        self.numbers = numbers or Numbers()

    def act(
        self, observation: TensorDict, *, deterministic: bool = False, generator: torch.Generator | None = None
    ) -> Decision:
        """Steering angle and speed [N, H, 2] for the N observations; nothing is random."""
        route = observation["route"]
        steering = self.steering(self.curvature(route, observation["velocity"][:, 0]))
        actions = torch.stack((steering, self._speed(route)), 1)
        actions = actions.unsqueeze(1).expand(-1, self.contract.horizon, -1)
        empty = TensorDict({}, batch_size=[len(actions)])
        return Decision(actions, empty, torch.zeros(len(actions), 1, 1, device=actions.device))

    def curvature(self, route: Tensor, speed: Tensor, least_m: Tensor | None = None) -> Tensor:
        """Curvature [N], 1/m, of the rear axle's circle through a point of `route` [N, W, 2] (m, base) at `speed` [N].

        The point is at the look-ahead distance, at least `least_m` [N].
        """
        length, arc = _arc_lengths(route)
        look_ahead = self.numbers.ahead_m + self.numbers.ahead_s * speed
        look_ahead = (look_ahead if least_m is None else torch.maximum(look_ahead, least_m)).unsqueeze(1)
        index = torch.searchsorted(arc, look_ahead.clamp_max(arc.amax(1, keepdim=True))).clamp(1, arc.shape[1] - 1)
        share = (look_ahead - arc.gather(1, index - 1)) / length.gather(1, index - 1)
        first, last = (route.gather(1, i.unsqueeze(2).expand(-1, -1, 2))[:, 0] for i in (index - 1, index))
        target = first + share.clamp(0.0, 1.0) * (last - first)
        # kappa = 2 y / (x^2 + y^2) for a target (x, y) relative to the rear axle.
        back = self.vehicle.rear_axle_m
        return 2.0 * target[:, 1] / ((target[:, 0] + back).square() + target[:, 1].square())

    def steering(self, curvature: Tensor) -> Tensor:
        """Steering angle [N], rad, with which the rear axle rolls on circles of `curvature` [N]."""
        base = self.vehicle.front_axle_m + self.vehicle.rear_axle_m
        limit = self.vehicle.steering_rad
        return (base * curvature).atan().clamp(-limit, limit)

    def _speed(self, route: Tensor) -> Tensor:
        """Highest speed [N], m/s, from which the vehicle can brake in time for every curve ahead."""
        (length, arc), edge = _arc_lengths(route), route[:, 1:] - route[:, :-1]
        before = edge[:, :-1]
        after = edge[:, 1:]
        turn = torch.atan2(before[..., 0] * after[..., 1] - before[..., 1] * after[..., 0], (before * after).sum(-1))
        bend = torch.nn.functional.avg_pool1d(turn.abs().unsqueeze(1), 3, 1, 1, count_include_pad=False)[:, 0]
        curvature = bend / (0.5 * (length[:, :-1] + length[:, 1:]))
        # v^2 <= a_lat / kappa at a curve, and + 2 a_brake s at the distance s before it.
        squared = self.numbers.lateral_m_s2 / curvature.clamp_min(1e-3) + 2.0 * self.numbers.braking_m_s2 * arc[:, 1:-1]
        return squared.amin(1).sqrt().clamp(self.vehicle.speed_min_m_s, self.vehicle.speed_max_m_s)


def _arc_lengths(route: Tensor) -> tuple[Tensor, Tensor]:
    """Lengths [N, W - 1] of the edges of `route` [N, W, 2] and arc lengths [N, W] of its points, m."""
    length = (route[:, 1:] - route[:, :-1]).norm(dim=-1)
    return length, torch.cat((torch.zeros_like(length[:, :1]), length.cumsum(1)), 1)
