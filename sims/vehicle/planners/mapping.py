"""A planner with memory: a map, the shortest path on it, and the dynamic window approach along that path.

A small version of Nav2's global costmap, NavFn and DWB: lidar hits are stored on a grid around the line from start to
goal; the robot's pose on it comes from odometry and the goal's direction; cells near hits cost more, unknown ones are
free; `dwa.DynamicWindow` drives to a point of the shortest path a little ahead. Letters: N vehicles, G cells along a
side of the map.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.contract import Contract
from embodied.deployment.network import MEMORY
from embodied.policy import Decision
from embodied.rollout.memory import STARTED
from sims.vehicle.geometry import Lidar
from sims.vehicle.planners.dwa import DynamicWindow, Weights, wrapped
from sims.vehicle.shortest_paths import AROUND, shortest_distances
from sims.vehicle.vehicles import Vehicle

SIDE, CELL_M = 128, 0.125
"""Cells along a side of the map, and their width, m."""
POSE = 6
"""Memory elements before the map: heading and half the initial goal distance (m), its position; last velocity, goal."""


LOCAL = Weights(
    horizon_s=1.2, window_s=0.3, margin_m=0.03, turn_m=0.02, clearance_m=0.3, free_m=0.6,
    goal=1.0, heading=0.3, clearance=0.8, speed=0.3,
)  # fmt: skip
"""Weights of the dynamic window with a map."""


@dataclass(frozen=True)
class Numbers:
    """Parameters of the planner; tuned on training worlds, see README.md.

    Attributes:
        ahead_m: distance along the path to the point that it drives to.
        blocked_m, near_m: cells nearer to a hit than the first cost `blocked` times their width, decreasing to once at
            the second.
        blocked, near: cost factors of blocked cells and of those just beyond.
        weights: weights of the dynamic window, whose goals are near and visible, unlike without a map.
    """

    ahead_m: float = 1.0
    blocked_m: float = 0.3
    near_m: float = 0.7
    blocked: float = 50.0
    near: float = 4.0
    weights: Weights = LOCAL


class MappingPlanner:
    """Drives along the shortest path on its map; implements `memory.RecurrentPolicy`."""

    def __init__(self, contract: Contract, vehicle: Vehicle, lidar: Lidar, numbers: Numbers | None = None) -> None:
        self.contract, self.vehicle, self.lidar, self.numbers = contract, vehicle, lidar, numbers or Numbers()
        self.local = DynamicWindow(contract, vehicle, lidar, self.numbers.weights)

    def initial_memory(self, count: int) -> Tensor:
        """An empty map."""
        return torch.zeros(count, POSE + SIDE * SIDE)

    def act(
        self, observation: TensorDict, *, deterministic: bool = False, generator: torch.Generator | None = None
    ) -> Decision:
        """Speed and yaw rate [N, H, 2] for the N observations; nothing is random."""
        goal = observation["goal_distance"] * observation["goal_direction"]
        memory = observation[MEMORY].clone()
        pose, seen = memory[:, :POSE], memory[:, POSE:]
        self._localise(pose, observation[STARTED], observation["velocity"], goal)
        centre, heading = pose[:, 1], pose[:, 0]
        at = _turned(-goal, heading)
        at[:, 0] += centre  # from the map's centre, half way to the goal
        points = self.local.points(observation["lidar"])
        hits = at.unsqueeze(1) + _turned(points, heading.unsqueeze(1))
        inside = (hits.abs() < 0.5 * SIDE * CELL_M).all(2)
        seen.scatter_reduce_(1, _index(_cell(hits)), inside.float(), "amax")
        target = self._ahead(seen.view(-1, SIDE, SIDE), at, centre)
        target = _turned(target - at, -heading)
        actions = self.local.command(observation["lidar"], observation["velocity"], target)
        actions = actions.unsqueeze(1).expand(-1, self.contract.horizon, -1)
        sample = TensorDict({MEMORY: memory}, batch_size=[len(memory)])
        return Decision(actions, sample, torch.zeros(len(memory), 1, device=memory.device))

    def _localise(self, pose: Tensor, started: Tensor, velocity: Tensor, goal: Tensor) -> None:
        """Update `pose` [N, POSE]; the initial heading is relative to the line to the goal."""
        dt_s = self.contract.control_dt_s
        speed, rate = (0.5 * (pose[:, 2:4] + velocity)).unbind(1)
        turned = rate * dt_s
        moved = torch.stack((speed * dt_s * (0.5 * turned).cos(), speed * dt_s * (0.5 * turned).sin()), 1)
        # the change of the goal's direction measures the rotation better than the yaw rate, unless the goal is near
        before = pose[:, 4:6] - moved
        off = wrapped(torch.atan2(before[:, 1], before[:, 0]) - torch.atan2(goal[:, 1], goal[:, 0]) - turned)
        turned = turned + torch.where(goal.norm(dim=1) > 1.0, off, 0.0)
        pose[:, 0] = torch.where(started, -torch.atan2(goal[:, 1], goal[:, 0]), pose[:, 0] + turned)
        pose[:, 1] = torch.where(started, 0.5 * goal.norm(dim=1), pose[:, 1])
        pose[:, 2:4], pose[:, 4:6] = velocity, goal

    def _ahead(self, seen: Tensor, at: Tensor, centre: Tensor) -> Tensor:
        """The point [N, 2] of the shortest path at `ahead_m` from `at` [N, 2]; both in the map's frame."""
        numbers = self.numbers
        apart = shortest_distances(torch.where(seen > 0.0, 0.0, torch.inf), torch.ones_like(seen), CELL_M)
        share = (numbers.near_m - apart) / (numbers.near_m - numbers.blocked_m)
        cost = 1.0 + (numbers.near - 1.0) * share.clamp(0.0, 1.0).square()
        cost = torch.where(apart < numbers.blocked_m, numbers.blocked, cost)
        goal = torch.stack((centre, torch.zeros_like(centre)), 1)
        start = torch.full_like(cost, torch.inf).flatten(1)
        start.scatter_(1, _index(_cell(goal)).unsqueeze(1), 0.0)
        left = shortest_distances(start.view_as(cost), cost, CELL_M).flatten(1)
        around = torch.tensor(AROUND, device=at.device)
        cell = _cell(at)
        target, going = goal.clone(), torch.ones_like(centre, dtype=torch.bool)
        for _ in range(math.ceil(numbers.ahead_m / CELL_M) + 1):
            near = (cell.unsqueeze(1) + around).clamp(0, SIDE - 1)
            best = left.gather(1, _index(near)).argmin(1)
            cell = near[torch.arange(len(near)), best]
            place = (cell + 0.5 - 0.5 * SIDE) * CELL_M
            target = torch.where(going.unsqueeze(1), place, target)
            going &= (place - at).norm(dim=1) < numbers.ahead_m
        arrived = (target - goal).norm(dim=1, keepdim=True) < 1.5 * CELL_M
        return torch.where(arrived, goal, target)


def _cell(place: Tensor) -> Tensor:
    """Cell [..., 2] of a position `place` [..., 2], m from the map's centre; the nearest cell if outside."""
    return (place / CELL_M + 0.5 * SIDE).floor().long().clamp(0, SIDE - 1)


def _index(cell: Tensor) -> Tensor:
    """Index of a `cell` [..., 2] in the flat map."""
    return cell[..., 0] * SIDE + cell[..., 1]


def _turned(points: Tensor, angle: Tensor) -> Tensor:
    """`points` [..., 2] rotated by `angle` [...]."""
    cos, sin = angle.cos(), angle.sin()
    x, y = points.unbind(-1)
    return torch.stack((cos * x - sin * y, sin * x + cos * y), -1)
