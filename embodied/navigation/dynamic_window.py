"""Dynamic window approach (Fox, Burgard and Thrun 1997, IEEE Robotics & Automation Magazine 4(1)) as a policy.

It reads the observations of a learned policy, whose commands it may guard (`guard.py`), and a model of the vehicle. A
velocity is admissible if, after one control step with it, the vehicle can stop before it touches anything. Differs
from the paper:
    - obstacles are lidar hits, and the vehicle is a rectangle, not a disc;
    - stopping is tested along the predicted braking path, with lag and acceleration limits;
    - velocities are also scored by the distance to the goal that they lead to, as in ROS's local planners;
    - if no moving velocity is admissible, it turns in place towards a free direction, as far as its rectangle allows;
      if it cannot do that either, it `backs` out where there is room.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.contract import Contract
from embodied.native import choose, pointers
from embodied.navigation.compiled_map import maps
from embodied.policy import Decision

SPEEDS = 7
RATES = 21
"""Numbers of speeds and of yaw rates in the window; all pairs are tried."""
SUBSTEP_S = 0.05
EVERY = 2
"""Time step of predicted paths, s; check every n-th pose."""
LEAST_M_S = 0.1
"""Smallest speed of a moving vehicle, m/s; below it, it may turn in place."""
HEADINGS = 36
STAY = 0.1
"""Number of candidate directions; cost of an angle to turn by, relative to an angle from the goal."""
AHEAD_RAD = 0.3
SETTLE_S = 0.3
"""Angle of the goal above which it turns in place, rad; time constant of turning to a direction, s."""
NEAR_M = 0.5
"""Distance to the goal, m, below which its direction has less and less weight."""
TOUCH_M = 0.005
TOLERANCE_M = 0.002
"""Smallest distance without contact, m; and largest change of distance that is ignored, m."""
FAR_M = 1e3
ELEMENTS = 1 << 25
"""Number of distances of points from poses that a GPU computes at once; more would take gigabytes of memory."""


@dataclass(frozen=True)
class Drive:
    """Differential drive and its lidar.

    Attributes:
        length_m, width_m: of its outline.
        acceleration_m_s2, deceleration_m_s2, yaw_acceleration_rad_s2: limits.
        lag_s: time constant with which it follows commands.
        angles: of the B beams from the front, rad.
        range_m: ranges of at least this length are not hits.
        lidar_x_m: distance of the lidar in front of the outline's middle.
    """

    length_m: float
    width_m: float
    acceleration_m_s2: float
    deceleration_m_s2: float
    yaw_acceleration_rad_s2: float
    lag_s: float
    angles: tuple[float, ...]
    range_m: float
    lidar_x_m: float = 0.0

    def points(self, ranges: Tensor) -> Tensor:
        """Lidar hits [N, B, 2], m, base, of ranges [N, B]; far away for beams without a hit."""
        beams = torch.tensor(self.angles, device=ranges.device)
        hits = torch.where(ranges < self.range_m, ranges, FAR_M)
        return torch.stack((hits * beams.cos() + self.lidar_x_m, hits * beams.sin()), 2)


@dataclass(frozen=True)
class Weights:
    """Parameters of the planner; tuned on training worlds, see sims/vehicle/README.md.

    Attributes:
        horizon_s: duration of the predicted path that is scored.
        window_s: duration for which speeds may change at full acceleration.
        margin_m, turn_m: clearance of the outline; and, at the stopping pose, of the circle around the outline, so that
            it can turn there.
        clearance_m: distance from obstacles above which the score does not increase.
        free_m: distance for which a free direction must be free.
        goal, heading, clearance, speed: weights of the distance from the goal (m), of the angle to it (rad), of the
            share of `clearance_m`, and of the speed (m/s).
    """

    horizon_s: float = 1.7
    window_s: float = 0.476
    margin_m: float = 0.0611
    turn_m: float = 0.0121
    clearance_m: float = 0.285
    free_m: float = 1.04
    goal: float = 0.57
    heading: float = 0.118
    clearance: float = 1.55
    speed: float = 0.197


NEAR = Weights(
    horizon_s=1.2,
    window_s=0.3,
    margin_m=0.03,
    turn_m=0.02,
    clearance_m=0.3,
    free_m=0.6,
    goal=1.0,
    heading=0.3,
    clearance=0.8,
    speed=0.3,
)
"""Weights where goals are waypoints, near and visible."""


class DynamicWindow:
    """Policy that chooses the best velocity from which it can stop in time; else it brakes, then turns in place.

    If it `backs`, and the contract has speeds below 0, it drives backwards where it can do neither.
    """

    def __init__(
        self, contract: Contract, drive: Drive, weights: Weights | None = None, *, backs: bool = False
    ) -> None:
        self.contract = contract
        self.drive = drive
        self.weights = weights or Weights()
        self.half = 0.5 * drive.length_m, 0.5 * drive.width_m
        self.radius = math.hypot(*self.half) + self.weights.turn_m
        low = contract.action.low[0]
        self.fastest = contract.action.high[0]
        self.slowest = max(low, 0.0)
        self.backwards = min(low, 0.0) if backs else 0.0
        self.turning = contract.action.high[1]
        stopping = self.fastest / drive.deceleration_m_s2 + 2.0 * drive.lag_s
        self.step = round(contract.control_dt_s / SUBSTEP_S)
        self.braking = self.step + math.ceil(stopping / SUBSTEP_S)

    def act(
        self, observation: TensorDict, *, deterministic: bool = False, generator: torch.Generator | None = None
    ) -> Decision:
        """Speed and yaw rate [N, H, 2] for the N observations; deterministic."""
        goal = observation["goal_distance"] * observation["goal_direction"]
        actions = self.command(observation["lidar"], observation["velocity"], goal)
        actions = actions.unsqueeze(1).expand(-1, self.contract.horizon, -1)
        empty = TensorDict({}, batch_size=[len(actions)])
        return Decision(actions, empty, torch.zeros(len(actions), 1, 1, device=actions.device))

    def command(self, ranges: Tensor, velocity: Tensor, goal: Tensor) -> Tensor:
        """Speed and yaw rate [N, 2] for ranges [N, B], velocity [N, 2] and `goal` [N, 2] (m, base)."""
        points = self.drive.points(ranges)
        speed, turn = self._window(velocity)
        now = self._now(points)
        margin = self._margin(now)
        safe, turnable = self._admissible(points, velocity, speed, turn, margin)
        score = self._score(points, velocity, speed, turn, margin, goal)
        forward = torch.where(safe & turnable & (speed >= LEAST_M_S), score, -torch.inf)
        slow = safe & (speed < LEAST_M_S) & (velocity[:, :1] < LEAST_M_S)
        rate, facing = self._turn(points, now[:, 0], goal)
        turning = torch.where(slow & (turn * rate > 0.0), -(turn - rate).abs(), -torch.inf)
        turns = (facing > forward.amax(1)) & turning.isfinite().any(1)
        best = torch.where(turns.unsqueeze(1), turning, forward).max(1)
        best_command = torch.stack([part.gather(1, best.indices.unsqueeze(1)) for part in (speed, turn)], -1)[:, 0]
        best_command = torch.where(best.values.isfinite().unsqueeze(1), best_command, 0.0)
        return self._backed(ranges, velocity, best_command, ~best.values.isfinite())

    def _backed(self, ranges: Tensor, velocity: Tensor, chosen: Tensor, caught: Tensor) -> Tensor:
        """Replace `chosen` [N, 2] by driving straight back where the vehicle is `caught` [N] and the way is free."""
        if self.backwards == 0.0 or not bool(caught.any()):
            return chosen
        back = torch.zeros_like(chosen[caught])
        back[:, 0] = self.backwards
        free = self.admissible(ranges[caught], velocity[caught], back)
        chosen[caught] = torch.where(free.unsqueeze(1), back, chosen[caught])
        return chosen

    def admissible(self, ranges: Tensor, velocity: Tensor, command: Tensor) -> Tensor:
        """Whether [N] it can stop before it touches anything, after one control step with `command` [N, 2]."""
        points = self.drive.points(ranges)
        path = self._foresee(velocity, command[:, :1], command[:, 1:], self.braking, self.step)
        return (_along(path, points, self.half) >= self._margin(self._now(points)).unsqueeze(2)).all(2).squeeze(1)

    def _now(self, points: Tensor) -> Tensor:
        """Distance [N, 1] of the outline from points [N, B, 2], m."""
        return clearance(torch.zeros(len(points), 1, 3, device=points.device), points, self.half)

    def _margin(self, now: Tensor) -> Tensor:
        """Required clearance [N, 1]; a vehicle that is already nearer, at distance `now`, may move away."""
        return now.clamp(TOUCH_M, self.weights.margin_m)

    def _window(self, velocity: Tensor) -> tuple[Tensor, Tensor]:
        """All pairs of reachable speeds and yaw rates, [N, SPEEDS * RATES] each."""
        drive = self.drive
        duration_s = self.weights.window_s
        speed = _between(
            (velocity[:, 0] - duration_s * drive.deceleration_m_s2).clamp(self.slowest, self.fastest),
            (velocity[:, 0] + duration_s * drive.acceleration_m_s2).clamp(self.slowest, self.fastest),
            SPEEDS,
        )
        reach = duration_s * drive.yaw_acceleration_rad_s2
        limit = self.turning
        turn = _between(
            (velocity[:, 1] - reach).clamp(-limit, limit), (velocity[:, 1] + reach).clamp(-limit, limit), RATES
        )
        return speed.repeat_interleave(RATES, 1), turn.repeat(1, SPEEDS)

    def _admissible(
        self, points: Tensor, velocity: Tensor, speed: Tensor, turn: Tensor, margin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Whether each command [N, C], then braking, avoids contact, and whether there is space to turn afterwards."""
        path = self._foresee(velocity, speed, turn, self.braking, self.step)
        safe = (_along(path, points, self.half) >= margin.unsqueeze(2)).all(2)
        around = clearance(path[:, :, -1], points, (0.0, 0.0))
        # if it is already too small, at least the current one
        room = points.norm(dim=2).amin(1, keepdim=True) - TOLERANCE_M
        return safe, around >= room.clamp_max(self.radius)

    def _score(
        self, points: Tensor, velocity: Tensor, speed: Tensor, turn: Tensor, margin: Tensor, goal: Tensor
    ) -> Tensor:
        """Score [N, C] of following commands [N, C] for the horizon or until an obstacle."""
        w = self.weights
        path = self._foresee(velocity, speed, turn, round(w.horizon_s / SUBSTEP_S))
        distance = _along(path, points, self.half)
        reached = (distance >= margin.unsqueeze(2)).cumprod(2).bool()
        dx = goal[:, 0, None, None] - path[..., 0]
        dy = goal[:, 1, None, None] - path[..., 1]
        cost = torch.where(reached, self._cost(dx, dy, path[..., 2]), torch.inf).amin(2)  # it may pass the goal
        current_cost = self._cost(goal[:, :1], goal[:, 1:], torch.zeros_like(goal[:, :1]))
        room = torch.where(reached, (distance / w.clearance_m).clamp_max(1.0), 0.0).mean(2)
        # score = w_v v + w_c mean(min(clearance / c, 1)) - least cost of a pose on the path
        return w.speed * speed + w.clearance * room - torch.where(cost.isfinite(), cost, current_cost)

    def _cost(self, dx: Tensor, dy: Tensor, yaw: Tensor) -> Tensor:
        """Cost of a pose at (-dx, -dy) from the goal with heading `yaw`."""
        distance = (dx.square() + dy.square()).sqrt()
        angle = wrapped(torch.atan2(dy, dx) - yaw).abs()
        # w_g d + w_h |angle to the goal| min(d / NEAR_M, 1)
        return self.weights.goal * distance + self.weights.heading * angle * (distance / NEAR_M).clamp_max(1.0)

    def _turn(self, points: Tensor, now: Tensor, goal: Tensor) -> tuple[Tensor, Tensor]:
        """Yaw rate [N] of turning in place to the free direction nearest to the goal, and score [N] of doing so.

        Turning counts as progress only if that is the goal's direction; otherwise it is the last resort.
        """
        w = self.weights
        fastest = self.turning
        aim = self._free_direction(points, goal)
        bearing = torch.atan2(goal[:, 1], goal[:, 0])
        remaining = (bearing.abs() - w.horizon_s * fastest).clamp_min(0.0)
        score = w.clearance * (now / w.clearance_m).clamp_max(1.0) - self._cost(
            goal[:, 0], goal[:, 1], bearing - remaining
        )
        to_goal = ((aim - bearing).abs() < math.pi / HEADINGS) & (bearing.abs() > AHEAD_RAD)
        return (aim / SETTLE_S).clamp(-fastest, fastest).unsqueeze(1), torch.where(to_goal, score, -FAR_M)

    def _free_direction(self, points: Tensor, goal: Tensor) -> Tensor:
        """Direction [N], rad, nearest to the goal's with space to drive and to turn."""
        bearing = torch.atan2(goal[:, 1:], goal[:, :1])
        turned = torch.arange(HEADINGS, device=goal.device) * (2.0 * math.pi / HEADINGS)
        heading = wrapped(bearing + turned)  # [N, HEADINGS]
        cos = heading.cos().unsqueeze(2)
        sin = heading.sin().unsqueeze(2)
        px = points[:, None, :, 0]
        py = points[:, None, :, 1]
        # A circle of the vehicle's radius meets a point at `along` - sqrt(r^2 - aside^2).
        along = cos * px + sin * py
        chord = self.radius**2 - (cos * py - sin * px).square()
        blocked = (chord > 0.0) & (along > 0.0)
        ahead = torch.where(blocked, along - chord.clamp_min(0.0).sqrt(), torch.inf).amin(2)
        needed = goal.norm(dim=1, keepdim=True).clamp_max(self.weights.free_m)
        off = torch.minimum(turned, 2.0 * math.pi - turned) + STAY * heading.abs()
        best = torch.where(ahead > needed, off, FAR_M - ahead).argmin(1, keepdim=True)
        return heading.gather(1, best).squeeze(1)

    def _foresee(
        self, velocity: Tensor, speed: Tensor, turn: Tensor, substeps: int, commanded: int | None = None
    ) -> Tensor:
        """Predicted poses [N, C, T, 3] with commands [N, C] for `commanded` substeps, then braking."""
        drive = self.drive
        forward = velocity[:, :1].expand_as(speed)
        rate = velocity[:, 1:].expand_as(turn)
        x = y = yaw = torch.zeros_like(speed)
        poses = []
        for step in range(substeps):
            if step == commanded:
                speed = torch.zeros_like(speed)
                turn = torch.zeros_like(turn)
            # first-order lag with limited acceleration: v' = clip((u - v) / lag, -decel, accel)
            change = ((speed - forward) / drive.lag_s).clamp(-drive.deceleration_m_s2, drive.acceleration_m_s2)
            limit = drive.yaw_acceleration_rad_s2
            forward = forward + SUBSTEP_S * change
            rate = rate + SUBSTEP_S * ((turn - rate) / drive.lag_s).clamp(-limit, limit)
            # midpoint rule: the heading halfway through the substep
            middle = yaw + 0.5 * SUBSTEP_S * rate
            x = x + SUBSTEP_S * forward * middle.cos()
            y = y + SUBSTEP_S * forward * middle.sin()
            yaw = yaw + SUBSTEP_S * rate
            if step % EVERY == EVERY - 1:
                poses.append(torch.stack((x, y, yaw), 2))
        return torch.stack(poses, 2)


def _along(path: Tensor, points: Tensor, half: tuple[float, float]) -> Tensor:
    """Clearance [N, C, T] at the poses of `path` [N, C, T, 3]."""
    return clearance(path.flatten(1, 2), points, half).view(path.shape[:-1])


def wrapped(angle: Tensor) -> Tensor:
    """Equivalent angle in [-pi, pi]."""
    return torch.remainder(angle + math.pi, 2.0 * math.pi) - math.pi


def clearance(poses: Tensor, points: Tensor, half: tuple[float, float], backend: str | None = None) -> Tensor:
    """Smallest distance [N, P], m, of the outline at `poses` [N, P, 3] from `points` [N, B, 2]."""
    if choose(backend, poses.device) == "c":
        out = torch.empty(poses.shape[:2])
        poses = poses.contiguous()
        points = points.contiguous()
        maps().clearance(len(poses), *half, poses.shape[1], *pointers(poses), points.shape[1], *pointers(points, out))
        return out
    # one pose at a time on the CPU, to fit into the cache; on a GPU that many calls would dominate
    poses_at_once = 1 if poses.device.type == "cpu" else max(1, ELEMENTS // max(1, points[..., 0].numel()))
    # [N, 1, B]
    px = points[:, None, :, 0]
    py = points[:, None, :, 1]
    distances = []
    for part in poses.split(poses_at_once, 1):
        x, y, yaw = part.unsqueeze(3).unbind(2)  # [N, P, 1]
        cos = yaw.cos()
        sin = yaw.sin()
        dx = px - x
        dy = py - y
        # distance of a point from the rectangle in its own frame: |max(|p| - half, 0)|
        along = ((cos * dx + sin * dy).abs() - half[0]).clamp_min(0.0)
        aside = ((cos * dy - sin * dx).abs() - half[1]).clamp_min(0.0)
        distances.append((along.square() + aside.square()).amin(2).sqrt())
    return torch.cat(distances, 1)


def _between(low: Tensor, high: Tensor, count: int) -> Tensor:
    """Equally spaced numbers from `low` to `high` [N], [N, count]."""
    return low.unsqueeze(1) + (high - low).unsqueeze(1) * torch.linspace(0.0, 1.0, count, device=low.device)
