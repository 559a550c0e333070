"""Distance keeping: changes the commanded velocity as little as possible so that the robot can still stop.

A control barrier function h, the distance minus a margin, with h' >= -alpha(h) (Ames et al., arXiv:1903.11199). alpha
is the speed from which braking stops within h, so the filter never needs more braking than available. Each obstacle
gives one half-space of velocities that contains standing still, so a solution always exists, and it is found exactly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from embodied.configuration import Configuration, FiniteFloat, Limit, NonNegativeFloat
from embodied.errors import UserError
from real_robot.robots.robot import Array

TOLERANCE = 1e-12
HALVINGS = 8


class Motion(Enum):
    """Meaning of the action elements of a `Distance`, before scaling.

    POINT: the velocity of a point, along the elements of its observed position. TURNING: a vehicle's speed and turn
    rate. STEERED: a vehicle's speed and steering angle; only the speed is changed. All but the steering angle are of
    kind VELOCITY or DELTA.
    """

    POINT = "point"
    TURNING = "turning"
    STEERED = "steered"


@dataclass
class Distance(Configuration):
    """Obstacles to keep away from, and how hard the robot can brake.

    A POINT keeps `margin_m` from `planes` [normal..., offset], the half-spaces normal x >= offset, and from `spheres`
    [centre..., radius], in the frame of the observation `position`. A vehicle keeps it from the obstacles in the
    observation `ranges`, m, measured from the origin of its body frame at `first_angle_rad` and then every
    `angle_step_rad`; the point `ahead_m` in front of the origin keeps the distance.

    `acceleration` and `jerk` are the smallest with which the robot can brake in any direction, at most those of its
    elements' limits. These are applied afterwards: elements that brake independently rotate the velocity slightly,
    which the margin has to cover.
    """

    elements: list[str] = field(default_factory=list)
    motion: Motion = Motion.POINT
    position: str = ""
    planes: list[list[FiniteFloat]] = field(default_factory=list)
    spheres: list[list[FiniteFloat]] = field(default_factory=list)
    ranges: str = ""
    first_angle_rad: FiniteFloat = 0.0
    angle_step_rad: FiniteFloat = 0.0
    ahead_m: NonNegativeFloat = 0.0
    wheelbase_m: NonNegativeFloat = 0.0
    margin_m: NonNegativeFloat = 0.0
    acceleration: Limit = math.inf
    jerk: Limit = math.inf

    def __post_init__(self) -> None:
        """Raise UserError if the parts do not fit together."""
        super().__post_init__()
        point = self.motion is Motion.POINT
        if point != bool(self.position) or point == bool(self.ranges):
            raise UserError("expected `position` for motion=point, and `ranges` for a vehicle")
        if not point and (len(self.elements) != 2 or self.ahead_m == 0):
            raise UserError("expected a vehicle's two elements and ahead_m > 0, the point in front that keeps distance")
        if self.motion is Motion.STEERED and self.wheelbase_m == 0:
            raise UserError("expected wheelbase_m > 0 of a steered vehicle")
        if point and not self.planes and not self.spheres:
            raise UserError("expected `planes` or `spheres` for motion=point, the obstacles to keep away from")
        if not point and self.angle_step_rad == 0:
            raise UserError("expected angle_step_rad, the angle from one of `ranges` to the next")
        wrong = [row for row in self.planes + self.spheres if len(row) != len(self.elements) + 1]
        if wrong:
            raise UserError(f"expected rows of {len(self.elements) + 1} numbers, got {wrong[0]}")
        if math.isinf(self.acceleration) and not math.isinf(self.jerk):
            raise UserError("expected an acceleration together with a jerk")


class Barrier:
    """Filter that enforces a `Distance` in control periods of `dt_s`.

    The last command may continue for `pause_s` before the robot begins to brake.

    Raises:
        UserError: for a plane without a normal.
    """

    def __init__(self, distance: Distance, dt_s: float, pause_s: float = 0.0) -> None:
        self._distance = distance
        self._dt_s = dt_s
        size = len(distance.elements)
        planes = np.array(distance.planes, np.float64).reshape(-1, size + 1)
        lengths = np.linalg.norm(planes[:, :-1], axis=1, keepdims=True)
        if (lengths == 0).any():
            raise UserError("expected a plane's normal to have a length, got zeros")
        self._planes = planes / lengths
        self._spheres = np.array(distance.spheres, np.float64).reshape(-1, size + 1)
        ramp_s = 0.0 if math.isinf(distance.jerk) else distance.acceleration / distance.jerk
        self._lag = dt_s + pause_s + 0.5 * ramp_s

    def filter(
        self,
        velocity: Array,
        observation: dict[str, Array],
        reach: tuple[Array, Array] | None = None,
        recent: Array | None = None,
    ) -> Array:
        """The command closest to `velocity` (elements in m/s, rad/s and rad) that keeps distance.

        `reach` bounds the elements in the next period: if possible, the command is within it. `recent` [T, elements],
        newest first, are the commands of periods whose motion may not be in the measurement yet.
        """
        distance = self._distance
        if distance.motion is Motion.POINT:
            normals, room = self._from_shapes(np.asarray(observation[distance.position], np.float64))
        else:
            normals, room = self._from_ranges(np.asarray(observation[distance.ranges], np.float64))
        if recent is not None and len(recent):
            # room used up by commanded motion that is not measured yet: the largest over its prefixes
            displacements = np.cumsum(np.stack([self._of_point(each) for each in recent]), 0) * self._dt_s  # [T, D]
            room = room - np.maximum(-(normals @ displacements.T).min(1), 0.0)
        speed = self._speed(room)
        if distance.motion is Motion.POINT:
            return _inside(velocity, normals, speed, reach)
        if distance.motion is Motion.TURNING:
            # velocity of the point ahead: (v, l w) for the action (v, w)
            arm = np.array([1.0, distance.ahead_m])
            box = (reach[0] * arm, reach[1] * arm) if reach else None
            return _inside(velocity * arm, normals, speed, box) / arm
        return np.array([velocity[0] * share(self._of_point(velocity), normals, speed), velocity[1]])

    def _of_point(self, velocity: Array) -> Array:
        """Velocity [D] of the point that keeps distance; a vehicle's in its body frame."""
        distance = self._distance
        if distance.motion is Motion.POINT:
            return velocity
        if distance.motion is Motion.TURNING:
            return velocity * np.array([1.0, distance.ahead_m])
        # bicycle model: yaw rate v tan(steering) / wheelbase, so the point ahead moves with (v, l v tan / wheelbase)
        return velocity[0] * np.array([1.0, distance.ahead_m * math.tan(velocity[1]) / distance.wheelbase_m])

    def _speed(self, room: Array) -> Array:
        """The speed toward an obstacle from which braking stops within `room`: v lag + v^2 / 2a = room."""
        room = np.maximum(room, 0.0)
        if math.isinf(self._distance.acceleration):
            return room / self._lag
        # positive root: v = a (sqrt(lag^2 + 2 room / a) - lag)
        a = self._distance.acceleration
        return a * (np.sqrt(self._lag * self._lag + 2.0 * room / a) - self._lag)

    def _from_shapes(self, position: Array) -> tuple[Array, Array]:
        """Directions away from obstacles [M, D] and the remaining room [M]."""
        offsets = position - self._spheres[:, :-1]
        lengths = np.linalg.norm(offsets, axis=1)
        spheres = offsets / np.maximum(lengths, TOLERANCE)[:, None]
        normals = np.concatenate([self._planes[:, :-1], spheres])
        room = np.concatenate([self._planes[:, :-1] @ position - self._planes[:, -1], lengths - self._spheres[:, -1]])
        return normals, room - self._distance.margin_m

    def _from_ranges(self, ranges: Array) -> tuple[Array, Array]:
        """Directions from obstacles to the point ahead [M, 2], in the body frame, and the remaining room [M]."""
        angles = self._distance.first_angle_rad + self._distance.angle_step_rad * np.arange(len(ranges))
        offsets = np.stack([self._distance.ahead_m - ranges * np.cos(angles), -ranges * np.sin(angles)], 1)
        lengths = np.linalg.norm(offsets, axis=1)
        return offsets / np.maximum(lengths, TOLERANCE)[:, None], lengths - self._distance.margin_m


def share(velocity: Array, normals: Array, speed: Array) -> float:
    """The largest share in [0, 1] of `velocity` [D] with normals [M, D] velocity >= -speed [M] >= 0."""
    toward = -(normals @ velocity)
    exceeding = toward > speed
    return float((speed[exceeding] / toward[exceeding]).min()) if exceeding.any() else 1.0


def nearest(velocity: Array, normals: Array, speed: Array) -> Array | None:
    """The point x closest to `velocity` [D] with normals [M, D] x >= -speed [M]; exact, None if no x satisfies them.

    Non-negative least squares for the multipliers (Lawson and Hanson 1974, chapter 23): the most violated half-space
    joins the active ones, and those whose multiplier reaches zero leave. With one half-space this is the closed form.
    """
    solution = velocity
    active = []
    multipliers = np.zeros(0)
    for _ in range(8 * len(velocity)):
        slack = normals @ solution + speed
        if slack.min(initial=0.0) >= -TOLERANCE:
            return solution
        worst = int(slack.argmin())
        # stationarity: x = velocity + sum over active half-spaces of multiplier * normal
        active, multipliers = _join(velocity, normals, speed, [*active, worst], np.append(multipliers, 0.0))
        if not active:
            return None
        solution = velocity + multipliers @ normals[active]
    return None


def _inside(velocity: Array, normals: Array, speed: Array, reach: tuple[Array, Array] | None) -> Array:
    """The closest point inside all half-spaces and `reach`; if they are disjoint, the point in reach that brakes most.

    A half-space that is out of reach by itself is exceeded as little as possible. Several that exclude each other are
    all exceeded by the same, smallest speed.
    """
    if reach is None:
        solution = nearest(velocity, normals, speed)
        # if the solver fails, scale the velocity down: standing still is always inside
        return velocity * share(velocity, normals, speed) if solution is None else solution
    start = np.minimum(np.maximum(velocity, reach[0]), reach[1])
    ends = np.where(normals > 0.0, reach[1], reach[0])
    braked = np.where(normals == 0.0, 0.0, ends * normals).sum(1)  # the most along each normal
    speed = np.maximum(speed, -braked)
    excess = float((-(normals @ start) - speed).max(initial=0.0))
    if excess <= 0.0:
        return start
    if (solution := _in_reach(start, normals, speed, reach)) is not None:
        return solution
    # `start` is inside if all may be exceeded by this much
    solution = start
    allowed = excess
    step = 0.5 * excess
    for _ in range(HALVINGS):
        if (tighter := _in_reach(start, normals, speed + (allowed - step), reach)) is not None:
            solution = tighter
            allowed = allowed - step
        step *= 0.5
    return solution


def _in_reach(velocity: Array, normals: Array, speed: Array, reach: tuple[Array, Array]) -> Array | None:
    """The point closest to `velocity` inside all half-spaces and `reach`, or None."""
    identity = np.eye(len(velocity))
    return nearest(
        velocity, np.concatenate([normals, identity, -identity]), np.concatenate([speed, -reach[0], reach[1]])
    )


def _join(
    velocity: Array, normals: Array, speed: Array, active: list[int], multipliers: Array
) -> tuple[list[int], Array]:
    """The half-spaces of `active` that stay active, and their multipliers >= 0; an empty list if they contradict."""
    while active:
        rows = normals[active]
        # tight: rows (velocity + rows^T multipliers) = -speed, so (rows rows^T) multipliers = missing
        gram = rows @ rows.T
        missing = -(rows @ velocity + speed[active])
        tight = np.linalg.lstsq(gram, missing, rcond=None)[0]
        direction = tight - multipliers
        loose = missing - gram @ tight
        if np.abs(loose).max() > 1e-9:  # dependent half-spaces that can't all be tight: one of them has to go
            direction = loose
        elif (tight >= 0).all():
            return active, tight
        falling = direction < 0
        if not falling.any():
            return [], multipliers  # they contradict each other
        # step along `direction` up to the first multiplier that reaches zero
        ratio = np.full(len(active), np.inf)
        ratio[falling] = multipliers[falling] / -direction[falling]
        first = int(ratio.argmin())
        multipliers = np.maximum(multipliers + ratio[first] * direction, 0.0)
        active = active[:first] + active[first + 1 :]
        multipliers = np.delete(multipliers, first)
    return active, multipliers
