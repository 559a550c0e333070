"""The dynamic window approach (Fox, Burgard and Thrun 1997, IEEE Robotics & Automation Magazine 4(1)) as a policy.

It reads what a learned policy reads, and knows the vehicle. Differs from the paper:
    - beams of the lidar are the obstacles, and the vehicle is its rectangle, not a disc;
    - an arc is scored by how far from the goal it ends, as in ROS's local planners, not by its heading there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.contract import Contract
from embodied.policy import Decision
from sims.vehicle.geometry import Lidar
from sims.vehicle.vehicles import Vehicle

SPEEDS, TURNS, MOMENTS = 6, 21, 8
"""Candidates in each direction of the window, and moments at which an arc is tested for contact."""


@dataclass(frozen=True)
class Weights:
    """Numbers of the planner; tuned on training worlds, see README.md.

    Attributes:
        horizon_s: length of an arc.
        window_s: how long speeds may change at full acceleration.
        margin_m: distance from obstacles below which an arc is not taken.
        clearance_m: beyond this, more distance is no gain.
        goal, clearance, speed: weights of the distance from the goal at an arc's end (m), of the share of `clearance_m`
            and of the speed (m/s).
    """

    horizon_s: float = 2.0
    window_s: float = 0.3
    margin_m: float = 0.05
    clearance_m: float = 0.2
    goal: float = 1.0
    clearance: float = 0.8
    speed: float = 0.3


class DynamicWindow:
    """Takes the best admissible arc; where there is none it stops and turns towards the goal."""

    def __init__(self, contract: Contract, vehicle: Vehicle, lidar: Lidar, weights: Weights | None = None) -> None:
        self.contract, self.vehicle, self.lidar, self.weights = contract, vehicle, lidar, weights or Weights()

    def act(
        self, observation: TensorDict, *, deterministic: bool = False, generator: torch.Generator | None = None
    ) -> Decision:
        """Speed and yaw rate [N, H, 2] for the N observations; nothing is random."""
        goal = observation["goal_distance"] * observation["goal_direction"]
        speed, turn = self._window(observation["velocity"])  # [N, candidates]
        t = torch.linspace(0.0, self.weights.horizon_s, MOMENTS + 1, device=goal.device)[1:]
        angle = turn.unsqueeze(2) * t  # [N, candidates, moments]
        chord = speed.unsqueeze(2) * t * torch.sinc(angle / (2.0 * torch.pi))
        x, y = chord * (0.5 * angle).cos(), chord * (0.5 * angle).sin()
        clearance = self._clearance(x, y, angle, observation["lidar"])
        remaining = torch.stack((x, y), -1) - goal[:, None, None]
        w = self.weights
        score = w.speed * speed + w.clearance * (clearance / w.clearance_m).clamp_max(1.0)
        score = score - w.goal * remaining.norm(dim=-1).amin(-1)
        best = score.masked_fill(clearance < w.margin_m, -torch.inf).max(1)
        chosen = torch.stack([part.gather(1, best.indices.unsqueeze(1)) for part in (speed, turn)], -1)[:, 0]
        aside = torch.stack((torch.zeros_like(goal[:, 1]), self.vehicle.yaw_rate_rad_s * goal[:, 1].sign()), 1)
        actions = torch.where(best.values.isfinite().unsqueeze(1), chosen, aside)
        actions = actions.unsqueeze(1).expand(-1, self.contract.horizon, -1)
        empty = TensorDict({}, batch_size=[len(actions)])
        return Decision(actions, empty, torch.zeros(len(actions), 1, device=actions.device))

    def _window(self, velocity: Tensor) -> tuple[Tensor, Tensor]:
        """Speeds and yaw rates that can be reached, every pair, [N, SPEEDS * TURNS] each."""
        v, room = self.vehicle, self.weights.window_s
        speed = _between(
            (velocity[:, 0] - room * v.deceleration_m_s2).clamp(v.speed_min_m_s, v.speed_max_m_s),
            (velocity[:, 0] + room * v.acceleration_m_s2).clamp(v.speed_min_m_s, v.speed_max_m_s), SPEEDS,
        )  # fmt: skip
        reach, most = room * v.yaw_acceleration_rad_s2, v.yaw_rate_rad_s
        turn = _between((velocity[:, 1] - reach).clamp(-most, most), (velocity[:, 1] + reach).clamp(-most, most), TURNS)
        return speed.repeat_interleave(TURNS, 1), turn.repeat(1, SPEEDS)

    def _clearance(self, x: Tensor, y: Tensor, angle: Tensor, ranges: Tensor) -> Tensor:
        """Smallest distance of the outline from what the lidar saw, along every arc, [N, candidates], m."""
        beams = self.lidar.angles().to(ranges.device)
        seen = torch.where(ranges < self.lidar.range_m, ranges, 1e3)
        ox, oy = seen * beams.cos() + self.vehicle.lidar_x_m, seen * beams.sin()
        found = torch.full(x.shape[:2], torch.inf, device=x.device)
        for moment in range(x.shape[2]):  # one after the other: it fits into the cache
            dx, dy = ox.unsqueeze(1) - x[:, :, moment, None], oy.unsqueeze(1) - y[:, :, moment, None]
            cos, sin = angle[:, :, moment, None].cos(), angle[:, :, moment, None].sin()
            along = (cos * dx + sin * dy).abs().sub_(0.5 * self.vehicle.length_m).clamp_min_(0.0)
            aside = (cos * dy - sin * dx).abs().sub_(0.5 * self.vehicle.width_m).clamp_min_(0.0)
            found = torch.minimum(found, (along.square_() + aside.square_()).amin(2).sqrt())
        return found


def _between(low: Tensor, high: Tensor, count: int) -> Tensor:
    """`count` numbers from `low` to `high` [N], [N, count]."""
    return low.unsqueeze(1) + (high - low).unsqueeze(1) * torch.linspace(0.0, 1.0, count, device=low.device)
