"""Follow a moving reference: figure-eights, Lissajous curves and random smooth paths.

Every reference is a sum of `HARMONICS` sines per axis, drawn once per episode; only the way of drawing differs. The
drone observes errors to the reference now and a little later, but neither which path it is nor the elapsed time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from embodied.contract import TensorSpec
from sims.quadrotor.episode import Moment, Record, Weight
from sims.quadrotor.observation import ANGULAR_VELOCITY, AXES, ROTATION, VELOCITY
from sims.quadrotor.physics.airframes import Airframe, hover_speed
from sims.quadrotor.physics.dynamics import DT_S, Body
from sims.quadrotor.tasks.hover import INITIAL, Hover
from sims.tracer.arithmetic import Rows, Value, gaussians, sqrt, squares, uniform, where

HARMONICS = 2
SINES = 3 * HARMONICS
REFERENCE = -3
"""Counter of the draws for references; see `hover.INITIAL`."""
AHEAD_S = (0.1, 0.2, 0.4, 0.6)
"""Times ahead at which the reference is observed."""
SETTLING_STEPS = 100
"""The first second, which is excluded from the error, because an episode begins off the reference."""


@dataclass(frozen=True)
class Track(Hover):
    """Numbers of the task, in addition to `Hover`'s; limits, bounds and weights are relative to the reference.

    Attributes:
        eight_share, lissajous_share: shares of episodes whose reference is a figure-eight (Gerono's, `size_m` to either
            side, half as wide) or a Lissajous curve (3 : 2 : 1, a quarter as high); in all others the amplitude, rate
            and phase of every sine are random.
        speed_low_m_s, speed_high_m_s: the highest speed on the reference is uniform between them; a random reference
            may be slower.
        size_m: amplitude of figure-eights and Lissajous curves.
        rate_low_rad_s, rate_high_rad_s: angular rates of random sines.
        acceleration_m_s2: bound of random references.
        initial_tilt: bound of each element of the initial rotation vector, rad.
    """

    position_limit_m: Value = 1.0
    initial_velocity_m_s: Value = 0.5
    weight_position: Weight = 20.0
    weight_rotation: Weight = 0.2
    eight_share: Value = 0.25
    lissajous_share: Value = 0.25
    speed_low_m_s: Value = 0.5
    speed_high_m_s: Value = 3.0
    size_m: Value = 1.0
    rate_low_rad_s: Value = 0.5
    rate_high_rad_s: Value = 6.0
    acceleration_m_s2: Value = 15.0
    initial_tilt: Value = 0.3

    INSTRUCTION: ClassVar[str] = "follow the reference"
    OBSERVED: ClassVar[Mapping[str, TensorSpec]] = {
        "position_error": TensorSpec((3,), unit="m", frame="world", names=AXES),
        "rotation": ROTATION,
        "velocity_error": VELOCITY,
        "angular_velocity": ANGULAR_VELOCITY,
        "position_error_ahead": TensorSpec(
            (3 * len(AHEAD_S),),
            unit="m",
            frame="world",
            names=tuple(f"{axis}_{round(1000 * ahead)}_ms" for ahead in AHEAD_S for axis in AXES),
        ),
    }
    PLAN: ClassVar[int] = 3 * SINES
    MEMORY: ClassVar[int] = 1

    def plan(self, key: Sequence[Value]) -> Rows:
        """Amplitudes (m), rates (rad/s) and phases (rad) of the sines, x first."""
        speed = uniform(key, REFERENCE, 0)
        speed = self.speed_low_m_s + (self.speed_high_m_s - self.speed_low_m_s) * speed
        phase = 2.0 * math.pi * uniform(key, REFERENCE, 1)
        curves = [self._eight(speed, phase), self._lissajous(speed, phase), self._random(key, speed)]
        kind = uniform(key, REFERENCE, 2)
        eight = kind < self.eight_share
        lissajous = kind < self.eight_share + self.lissajous_share
        return [where(eight, a, where(lissajous, b, c)) for a, b, c in zip(*curves, strict=True)]

    def initial(self, key: Sequence[Value], airframe: Airframe, plan: Rows) -> Rows:
        """Initial state near the reference, at about its velocity, nearly level."""

        def spread(first: int, bound: Value) -> Rows:
            return [(2.0 * uniform(key, INITIAL, first + axis) - 1.0) * bound for axis in range(3)]

        half = [0.5 * angle for angle in spread(4, self.initial_tilt)]
        scale = 1.0 / sqrt(1.0 + squares(half))
        return Body(
            _sum(position(plan, 0.0), spread(1, self.initial_position_m)),
            [scale, *(scale * component for component in half)],
            _sum(velocity(plan, 0.0), spread(12, self.initial_velocity_m_s)),
            spread(15, self.initial_angular_velocity_rad_s),
            [self.initial_rotor_speed - hover_speed(airframe)] * 4,
        ).rows()

    def observe(self, now: Moment) -> Rows:
        """Errors (reference minus drone), rotation, angular velocity; with noise if there is a `key`.

        The errors ahead assume that the drone keeps its velocity.
        """
        body = now.body
        t = now.steps * DT_S
        measured = [*body.position, *body.rotation(), *body.velocity, *body.angular_velocity]
        if now.key is not None:
            scale = [self.noise_position_m] * 3 + [self.noise_rotation] * 9
            scale += [self.noise_velocity_m_s] * 3 + [self.noise_angular_velocity_rad_s] * 3
            noise = gaussians(now.key, now.steps, 0, len(measured))
            measured = [value + g * std for value, g, std in zip(measured, noise, scale, strict=True)]
        place = measured[:3]
        speed = measured[12:15]
        errors = [_difference(position(now.plan, t), place)]
        for ahead in AHEAD_S:
            drifted = [p + ahead * v for p, v in zip(place, speed, strict=True)]
            errors.append(_difference(position(now.plan, t + ahead), drifted))
        velocity_error = _difference(velocity(now.plan, t), speed)
        return [
            *errors[0],
            *measured[3:12],
            *velocity_error,
            *measured[15:18],
            *(e for error in errors[1:] for e in error),
        ]

    def update(self, now: Moment) -> Rows:
        """The sum of the squared distance from the reference after `SETTLING_STEPS`, m^2."""
        settled = now.steps > float(SETTLING_STEPS)
        return [now.before.memory[0] + where(settled, squares(_error(now)), 0.0)]

    def reward(self, now: Moment) -> Value:
        """A constant for staying alive minus squares of errors, yaw, angular velocity and actions.

        See `Hover.reward`.
        """
        hover = 2.0 * hover_speed(now.airframe) - 1.0
        body = now.body
        t = now.steps * DT_S
        yaw = body.quaternion[3]
        cost = (
            self.weight_position * squares(_error(now))
            + self.weight_rotation * (yaw * yaw)  # yaw only: the drone has to tilt to follow
            + self.weight_velocity * squares(_difference(velocity(now.plan, t), body.velocity))
            + self.weight_angular_velocity * squares(body.angular_velocity)
            + self.weight_action * squares([a - hover for a in now.action])
            + self.weight_action_change * squares([a - b for a, b in zip(now.action, now.previous, strict=True)])
        )
        return self.reward_alive - cost

    def terminated(self, now: Moment) -> Value:
        """Whether a coordinate is further from the reference's than the limit."""
        x, y, z = (axis * axis > self.position_limit_m * self.position_limit_m for axis in _error(now))
        return x | y | z

    def failures(self, now: Record) -> dict[str, Tensor]:
        """Cause of termination: too far from the reference."""
        return {"too far from the reference": now.terminated}

    def metrics(self, now: Record) -> dict[str, Tensor]:
        """Whether it survived, and the root mean square of its distance from the reference after the first second."""
        mean = now.memory[0] / (now.limit - SETTLING_STEPS) if now.limit > SETTLING_STEPS else torch.nan
        error = torch.where(now.truncated, mean, torch.nan) ** 0.5
        return {"survive": now.truncated.float(), "position_error_m": error}

    def _eight(self, speed: Value, phase: Value) -> Rows:
        """X = A sin s, y = A/2 sin 2s: fastest in its middle, sqrt(2) A times the rate."""
        rate = speed / (math.sqrt(2.0) * self.size_m)
        sines = {0: (self.size_m, rate, phase), HARMONICS: (0.5 * self.size_m, 2.0 * rate, 2.0 * phase)}
        return _rows(sines)

    def _lissajous(self, speed: Value, phase: Value) -> Rows:
        """X = A sin 3s, y = A sin(2s + pi/2), z = A/4 sin s, no faster than `speed`."""
        rate = speed / (math.sqrt(9.0 + 4.0 + 1.0 / 16.0) * self.size_m)
        x = self.size_m, 3.0 * rate, 3.0 * phase
        y = self.size_m, 2.0 * rate, 2.0 * phase + 0.5 * math.pi
        return _rows({0: x, HARMONICS: y, 2 * HARMONICS: (0.25 * self.size_m, rate, phase)})

    def _random(self, key: Sequence[Value], speed: Value) -> Rows:
        """Sines with random rates, phases and shares of the velocity, half as much of it upwards."""
        draws = [uniform(key, REFERENCE, 3 + index) for index in range(3 * SINES)]
        rate = [self.rate_low_rad_s + (self.rate_high_rad_s - self.rate_low_rad_s) * u for u in draws[:SINES]]
        share = [(0.1 + 0.9 * u) * (0.5 if n >= 2 * HARMONICS else 1.0) for n, u in enumerate(draws[SINES:-SINES])]
        # Amplitude A = v / w of a sine of velocity v and rate w; its acceleration is v w.
        fastest = _bound(share)
        hardest = _bound([v * w for v, w in zip(share, rate, strict=True)])
        by_speed = speed / fastest
        by_acceleration = self.acceleration_m_s2 / hardest
        scale = where(by_speed < by_acceleration, by_speed, by_acceleration)
        amplitude = [scale * v / w for v, w in zip(share, rate, strict=True)]
        return [*amplitude, *rate, *(2.0 * math.pi * u for u in draws[-SINES:])]


def position(plan: Rows, t: Value) -> Rows:
    """Position of the reference of `plan` at `t` s, m, world."""
    sines = [a * (w * t + phase).sin() for a, w, phase in _sines(plan)]
    return [_total(sines[axis * HARMONICS : (axis + 1) * HARMONICS]) for axis in range(3)]


def velocity(plan: Rows, t: Value) -> Rows:
    """Velocity of the reference at `t` s, m/s, world."""
    slopes = [a * w * (w * t + phase).cos() for a, w, phase in _sines(plan)]
    return [_total(slopes[axis * HARMONICS : (axis + 1) * HARMONICS]) for axis in range(3)]


def _sines(plan: Rows) -> list[tuple[Value, ...]]:
    return list(zip(plan[:SINES], plan[SINES : 2 * SINES], plan[2 * SINES : 3 * SINES], strict=True))


def _rows(sines: Mapping[int, tuple[Value, ...]]) -> Rows:
    """A plan with the given sines by number, the others zero."""
    return [sines.get(n, (0.0, 0.0, 0.0))[part] for part in range(3) for n in range(SINES)]


def _bound(amplitudes: Rows) -> Value:
    """Upper bound of the length of a vector of sums of sines."""
    return sqrt(squares([_total(amplitudes[axis * HARMONICS : (axis + 1) * HARMONICS]) for axis in range(3)]))


def _error(now: Moment) -> Rows:
    return _difference(position(now.plan, now.steps * DT_S), now.body.position)


def _difference(first: Rows, second: Rows) -> Rows:
    return [a - b for a, b in zip(first, second, strict=True)]


def _sum(first: Rows, second: Rows) -> Rows:
    return [a + b for a, b in zip(first, second, strict=True)]


def _total(values: Rows) -> Value:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total
