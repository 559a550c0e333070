"""Race through gates: square openings in solid frames, passed in order and from the right side, for three laps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from embodied.contract import TensorSpec
from sims.quadrotor.episode import Moment, Record, Weight
from sims.quadrotor.observation import ANGULAR_VELOCITY, AXES, ROTATION
from sims.quadrotor.physics.airframes import Airframe, hover_speed
from sims.quadrotor.physics.dynamics import DT_S, Body
from sims.quadrotor.tasks.hover import INITIAL, Hover
from sims.tracer.arithmetic import Rows, Value, gaussians, sqrt, squares, uniform, where


class Gate(NamedTuple):
    """Centre of an opening, m, world, and the heading in which to pass it, from the x axis, rad."""

    x: float
    y: float
    z: float
    heading: float

    @property
    def normal(self) -> tuple[float, float]:
        """Unit vector of the heading, world x and y."""
        return math.cos(self.heading), math.sin(self.heading)


TRACK = tuple(
    Gate(x, y, z, math.radians(degrees))
    for x, y, z, degrees in (
        *((4.0, -2.5, 1.2, 50.0), (5.0, 2.0, 2.2, 110.0), (1.0, 4.5, 1.5, 180.0)),
        *((-4.0, 3.0, 2.8, 215.0), (-5.0, -1.5, 1.5, 280.0), (-0.5, -4.0, 2.0, 0.0)),
    )
)
"""A track around a field of 10 m by 9 m; a lap is about 30 m."""
RADIUS_M = 0.15
"""Radius of the drone."""
HALF_OPENING_M = 0.75 - RADIUS_M
"""Largest offset of the drone's centre from the middle of an opening, 1.5 m wide, sideways and vertically."""
BEAM_M = 0.14
"""Width of a frame's beams."""
HALF_FRAME_M = HALF_OPENING_M + BEAM_M + 2.0 * RADIUS_M
"""Offset beyond which the drone passes outside the frame."""
BACK_M = 2.0
"""Distance before a gate to which a drone returns that has missed it."""
CENTRE_Z_M = 2.0
"""Height of the middle of the flying space."""
GATE = TensorSpec((6,), unit="m", frame="body", names=(*AXES, *(f"normal_{axis}" for axis in AXES)))


@dataclass(frozen=True)
class Race(Hover):
    """Numbers of the task, in addition to `Hover`'s; an episode begins between any two gates.

    Attributes:
        position_limit_m: half the width of the flying space; `height_limit_m` is half its height.
        laps: number of laps to finish.
        initial_speed_m_s: bound of the initial speed towards the next gate.
        initial_tilt: bound of each element of the initial rotation vector, rad, relative to facing the gate.
        speed_m_s: speed at which progress and its cost balance, see `reward`; no drone reaches it on this track.
    """

    position_limit_m: Value = 8.0
    height_limit_m: Value = 2.0
    initial_position_m: Value = 0.3
    initial_velocity_m_s: Value = 0.5
    force_scale: Value = 1.0 / 50.0
    laps: Value = 3.0
    initial_speed_m_s: Value = 4.0
    initial_tilt: Value = 0.3
    speed_m_s: Value = 24.0
    weight_velocity: Weight = 1.0
    weight_angular_velocity: Weight = 0.001
    weight_action: Weight = 0.0
    weight_action_change: Weight = 0.005

    INSTRUCTION: ClassVar[str] = "fly through the gates in order, fast"
    OBSERVED: ClassVar[Mapping[str, TensorSpec]] = {
        "rotation": ROTATION,
        "velocity": TensorSpec((3,), unit="m/s", frame="body", names=AXES),
        "angular_velocity": ANGULAR_VELOCITY,
        "gate": GATE,
        "following_gate": GATE,
    }
    PLAN: ClassVar[int] = 1
    MEMORY: ClassVar[int] = 4

    def plan(self, key: Sequence[Value]) -> Rows:
        """The number of the first gate."""
        u = uniform(key, INITIAL, 0) * float(len(TRACK))
        return [_count([u > float(number) for number in range(1, len(TRACK))])]

    def initial(self, key: Sequence[Value], airframe: Airframe, plan: Rows) -> Rows:
        """Initial state between the first gate and the one before, nearly level, facing and approaching the first."""

        def spread(first: int, bound: Value) -> Rows:
            return [(2.0 * uniform(key, INITIAL, first + axis) - 1.0) * bound for axis in range(3)]

        start = [_chosen(plan[0], values) for values in _rows(TRACK[-1:] + TRACK[:-1])]
        goal = [_chosen(plan[0], values) for values in _rows(TRACK)]
        share = 0.1 + 0.6 * uniform(key, INITIAL, 4)
        speed = self.initial_speed_m_s * uniform(key, INITIAL, 5)
        path = [b - a for a, b in zip(start[:3], goal[:3], strict=True)]
        pace = speed / sqrt(squares(path))
        position = [a + share * d + e for a, d, e in zip(start, path, spread(1, self.initial_position_m), strict=False)]
        velocity = [pace * d + e for d, e in zip(path, spread(12, self.initial_velocity_m_s), strict=True)]
        # Half-angle formulas of the heading from its cosine, start[3]; start[4] is its sine.
        half = sqrt(0.5 * (1.0 + start[3])), sqrt(0.5 * (1.0 - start[3]))
        yaw = where(start[4] < 0.0, -half[1], half[1])
        turning = spread(15, self.initial_angular_velocity_rad_s)
        # The quaternion of the heading times the tilt (1, a, b, c), normalised.
        a, b, c = (0.5 * angle for angle in spread(6, self.initial_tilt))
        scale = 1.0 / sqrt(1.0 + squares([a, b, c]))
        facing = half[0] - yaw * c, half[0] * a - yaw * b, half[0] * b + yaw * a, half[0] * c + yaw
        rotors = [self.initial_rotor_speed - hover_speed(airframe)] * 4
        return Body(position, [scale * component for component in facing], velocity, turning, rotors).rows()

    def observe(self, now: Moment) -> Rows:
        """Rotation, velocity, angular velocity, and centre and heading of the next two gates.

        All but the first are in the body frame; with noise if there is a `key`.
        """
        body = now.body
        measured = [*body.position, *body.rotation(), *body.velocity, *body.angular_velocity]
        if now.key is not None:
            scale = [self.noise_position_m] * 3 + [self.noise_rotation] * 9
            scale += [self.noise_velocity_m_s] * 3 + [self.noise_angular_velocity_rad_s] * 3
            noise = gaussians(now.key, now.steps, 0, len(measured))
            measured = [value + g * std for value, g, std in zip(measured, noise, scale, strict=True)]
        position = measured[:3]
        rotation = measured[3:12]
        velocity = measured[12:15]
        turning = measured[15:18]
        gates: Rows = []
        for further in (0, 1):
            x, y, z, *normal = next_gate(now, further)
            gates += _to_body(rotation, [x - position[0], y - position[1], z - position[2]]) + _to_body(
                rotation, [*normal, 0.0]
            )
        return [*rotation, *_to_body(rotation, velocity), *turning, *gates]

    def update(self, now: Moment) -> Rows:
        """Gates passed in this lap, laps, control steps at the end of the last lap, whether a frame was hit."""
        gates, laps, lap_steps, _ = now.before.memory
        crossed, _, offset = crossing(now.before, now, next_gate(now.before))
        passed = crossed & within(offset, HALF_OPENING_M)
        hit = 0.0
        for gate in TRACK:
            forth, back, offset = crossing(now.before, now, [*gate[:3], *gate.normal])
            struck = (forth | back) & within(offset, HALF_FRAME_M) & ~within(offset, HALF_OPENING_M)
            hit = where(struck, 1.0, hit)
        gates = gates + where(passed, 1.0, 0.0)
        lap = gates > len(TRACK) - 0.5
        return [where(lap, 0.0, gates), laps + where(lap, 1.0, 0.0), where(lap, now.steps, lap_steps), hit]

    def reward(self, now: Moment) -> Value:
        """Progress towards the next gate, minus the square of the speed, turning and jerk.

        For the direction d and the desired speed V, 2 v d / V - v^2 / V^2 - 1 is -(v - V d)^2 / V^2.
        """
        desired = [self.speed_m_s * d for d in way(now.before)]
        excess = squares([v - w for v, w in zip(now.body.velocity, desired, strict=True)])
        cost = (
            self.weight_velocity / (self.speed_m_s * self.speed_m_s) * excess
            + self.weight_angular_velocity * squares(now.body.angular_velocity)
            + self.weight_action_change * squares([a - b for a, b in zip(now.action, now.previous, strict=True)])
        )
        return self.reward_alive - cost

    def terminated(self, now: Moment) -> Value:
        """Whether the frame of a gate was hit, or the flying space was left."""
        x, y, z = now.body.position
        height = z - CENTRE_Z_M
        wide = (x * x > self.position_limit_m * self.position_limit_m) | (
            y * y > self.position_limit_m * self.position_limit_m
        )
        return (now.memory[3] > 0.5) | wide | (height * height > self.height_limit_m * self.height_limit_m)

    def finished(self, now: Moment) -> Value:
        """Whether all laps are complete."""
        return now.memory[1] >= self.laps

    def success(self, now: Record) -> Tensor:
        """Whether all laps are complete."""
        return now.truncated & (now.memory[1] >= self.laps)

    def failures(self, now: Record) -> dict[str, Tensor]:
        """Causes of termination: a hit gate, or out of bounds."""
        return {"hit a gate": now.terminated & (now.memory[3] > 0.5), "out of bounds": now.terminated}

    def metrics(self, now: Record) -> dict[str, Tensor]:
        """Completed laps, and the mean lap time, NaN before the first lap is complete."""
        _, laps, steps, _ = now.memory
        return {"laps": laps.clone(), "lap_time_s": torch.where(laps > 0, steps * DT_S / laps, torch.nan)}


def next_gate(now: Moment, further: int = 0) -> Rows:
    """Centre x, y, z and normal x, y of the next gate, or of the one `further` on."""
    number = now.plan[0] + now.memory[0]
    number = where(number > len(TRACK) - 0.5, number - float(len(TRACK)), number)
    track = TRACK[further:] + TRACK[:further]
    return [_chosen(number, values) for values in _rows(track)]


def way(now: Moment) -> Rows:
    """Direction (unit vector, world) towards the next gate, along a parabola that meets its opening in the middle.

    The parabola is normal to the gate: for the distance s to its plane and the offset l from its axis, dl/ds = 2 l / s.
    Behind the plane of a gate that was not passed, it leads back to `BACK_M` before the opening.
    """
    x, y, z, nx, ny = next_gate(now)
    px, py, pz = now.body.position
    aside = [px - x, py - y, pz - z]
    along = nx * aside[0] + ny * aside[1]
    back = [-BACK_M * nx - aside[0], -BACK_M * ny - aside[1], -aside[2]]
    aside = [aside[0] - along * nx, aside[1] - along * ny, aside[2]]
    reach = sqrt(along * along + 0.25)  # half a metre: close to the plane there is no time to steer
    # Direction times s: s towards the plane, and dl/ds s = 2 l towards the axis.
    ahead = [nx * reach - 2.0 * aside[0], ny * reach - 2.0 * aside[1], -2.0 * aside[2]]
    vector = [where(along > 0.0, a, b) for a, b in zip(back, ahead, strict=True)]
    scale = 1.0 / sqrt(squares(vector))
    return [scale * component for component in vector]


def crossing(before: Moment, after: Moment, gate: Rows) -> tuple[Value, Value, Rows]:
    """Whether this step crossed the plane of `gate` in its heading, or against it, and squared offsets there.

    `gate` is its centre x, y, z and normal x, y. The offsets from the centre, m^2, are sideways and upwards, where the
    straight line between the two positions meets the plane.
    """
    x, y, z, nx, ny = gate
    old = before.body.position
    new = after.body.position
    behind = nx * (old[0] - x) + ny * (old[1] - y)
    ahead = nx * (new[0] - x) + ny * (new[1] - y)
    forth = (behind < 0.0) & (ahead >= 0.0)
    back = (behind >= 0.0) & (ahead < 0.0)
    share = behind / where(forth | back, behind - ahead, 1.0)
    meets = [a + share * (b - a) for a, b in zip(old, new, strict=True)]
    aside = nx * (meets[1] - y) - ny * (meets[0] - x)
    above = meets[2] - z
    return forth, back, [aside * aside, above * above]


def within(offset: Rows, half_m: float) -> Value:
    """Whether both squared offsets are of at most `half_m`."""
    return (offset[0] < half_m**2) & (offset[1] < half_m**2)


def _rows(track: Sequence[Gate]) -> list[list[float]]:
    """x, y, z, normal x, normal y of all gates, each as a list."""
    return [list(values) for values in zip(*((g.x, g.y, g.z, *g.normal) for g in track), strict=True)]


def _chosen(number: Value, values: Sequence[float]) -> Value:
    """The element of `values` with this number."""
    chosen: Value = values[-1]
    for index in reversed(range(len(values) - 1)):
        chosen = where(number < index + 0.5, values[index], chosen)
    return chosen


def _count(conditions: Sequence[Value]) -> Value:
    total: Value = 0.0
    for condition in conditions:
        total = total + where(condition, 1.0, 0.0)
    return total


def _to_body(rotation: Rows, vector: Rows) -> Rows:
    """R^T v for a rotation matrix R from body to world, row by row."""
    x, y, z = vector
    return [rotation[axis] * x + rotation[3 + axis] * y + rotation[6 + axis] * z for axis in range(3)]
