"""Recover from a throw: upside down, moving and spinning; become upright and slow as soon as possible."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from embodied.contract import TensorSpec
from sims.quadrotor.episode import Moment, Record, Weight
from sims.quadrotor.observation import ANGULAR_VELOCITY, ROTATION, VELOCITY
from sims.quadrotor.physics.airframes import Airframe, hover_speed
from sims.quadrotor.physics.dynamics import DT_S, Body
from sims.quadrotor.tasks.hover import INITIAL, Hover
from sims.tracer.arithmetic import Rows, Value, squares, uniform, where

CALM_TILT_RAD = math.radians(20.0)
CALM_SPEED_M_S = 0.5
CALM_ANGULAR_SPEED_RAD_S = 1.0
"""Recovered: all three values are below these until the episode ends."""


@dataclass(frozen=True)
class Recover(Hover):
    """Numbers of the task, in addition to `Hover`'s.

    The position of the recovery does not matter and is not observed; a coordinate beyond the limit is the ground, a
    wall or a ceiling.

    Attributes:
        tilt_low_rad: smallest initial tilt; it is uniform from there to pi, about any horizontal axis, after any yaw.
        within_s: time limit of a successful recovery.
    """

    position_limit_m: Value = 5.0
    initial_velocity_m_s: Value = 2.0
    initial_angular_velocity_rad_s: Value = 6.0
    weight_rotation: Weight = 0.5
    weight_velocity: Weight = 0.2
    weight_angular_velocity: Weight = 0.01
    tilt_low_rad: Value = 2.0 * math.pi / 3.0
    within_s: Value = 2.0

    INSTRUCTION: ClassVar[str] = "recover from a throw and hover at the origin"
    OBSERVED: ClassVar[Mapping[str, TensorSpec]] = {
        "rotation": ROTATION,
        "velocity": VELOCITY,
        "angular_velocity": ANGULAR_VELOCITY,
    }
    MEMORY: ClassVar[int] = 1

    def initial(self, key: Sequence[Value], airframe: Airframe, plan: Rows) -> Rows:
        """Initial state at the origin, tilted between `tilt_low_rad` and pi, with random velocities."""

        def spread(first: int, bound: Value) -> Rows:
            return [(2.0 * uniform(key, INITIAL, first + axis) - 1.0) * bound for axis in range(3)]

        tilt = self.tilt_low_rad + (math.pi - self.tilt_low_rad) * uniform(key, INITIAL, 4)
        axis, yaw = (2.0 * math.pi * uniform(key, INITIAL, index) for index in (5, 6))
        return Body(
            [0.0, 0.0, 0.0],
            _tilted(tilt, axis, yaw),
            spread(12, self.initial_velocity_m_s),
            spread(15, self.initial_angular_velocity_rad_s),
            [self.initial_rotor_speed - hover_speed(airframe)] * 4,
        ).rows()

    def observe(self, now: Moment) -> Rows:
        """Rotation, velocity, angular velocity; with noise if there is a `key`."""
        return super().observe(now)[3:]

    def update(self, now: Moment) -> Rows:
        """Control step since which the drone has been calm; 0 if it is not."""
        since = where(now.before.memory[0] > 0.5, now.before.memory[0], now.steps)
        return [where(calm(now.body), since, 0.0)]

    def reward(self, now: Moment) -> Value:
        """A constant for staying alive minus tilt (1 - cos) and squares of velocities and actions.

        See `Hover.reward`.
        """
        hover = 2.0 * hover_speed(now.airframe) - 1.0
        body = now.body
        cost = (
            self.weight_rotation * (1.0 - _up(body))
            + self.weight_velocity * squares(body.velocity)
            + self.weight_angular_velocity * squares(body.angular_velocity)
            + self.weight_action * squares([a - hover for a in now.action])
            + self.weight_action_change * squares([a - b for a, b in zip(now.action, now.previous, strict=True)])
        )
        return self.reward_alive - cost

    def success(self, now: Record) -> Tensor:
        """Whether it recovered by `within_s` and stayed so to the step limit."""
        since = now.memory[0]
        return now.truncated & (since > 0.5) & (since < self.within_s / DT_S + 0.5)

    def failures(self, now: Record) -> dict[str, Tensor]:
        """Cause of termination: a crash into the ground, a wall or a ceiling, which the limits stand for."""
        return {"crash": now.terminated}

    def metrics(self, now: Record) -> dict[str, Tensor]:
        """Whether it survived, and the recovery time; NaN if it has not recovered at the step limit."""
        recovered = now.truncated & (now.memory[0] > 0.5)
        return {"survive": now.truncated.float(), "recovery_s": torch.where(recovered, now.memory[0] * DT_S, torch.nan)}


def calm(body: Body) -> Value:
    """Whether the drone is upright, slow and hardly turning, see `CALM_TILT_RAD` and the constants after it."""
    upright = _up(body) > math.cos(CALM_TILT_RAD)
    slow = squares(body.velocity) < CALM_SPEED_M_S**2
    return upright & slow & (squares(body.angular_velocity) < CALM_ANGULAR_SPEED_RAD_S**2)


def _up(body: Body) -> Value:
    """Cosine of the tilt."""
    _, x, y, _ = body.quaternion
    return 1.0 - 2.0 * (x * x + y * y)


def _tilted(tilt: Value, axis: Value, yaw: Value) -> Rows:
    """The quaternion of a rotation by `yaw` about z, then by `tilt` about the horizontal axis at angle `axis`."""
    # (cos t/2, sin t/2 cos a, sin t/2 sin a, 0) * (cos y/2, 0, 0, sin y/2)
    sine = (0.5 * tilt).sin()
    cosine = (0.5 * tilt).cos()
    spin = (0.5 * yaw).sin()
    still = (0.5 * yaw).cos()
    x = sine * axis.cos()
    y = sine * axis.sin()
    return [cosine * still, x * still + y * spin, y * still - x * spin, cosine * spin]
