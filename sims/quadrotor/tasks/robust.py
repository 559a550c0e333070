"""Hover under realistic conditions: `Hover` with wind, biased measurements, a floor and take-offs.

Differences between drones, such as latencies, are drawn by `variation.Variation`. Needs the dynamics' `OPTIONS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from sims.quadrotor.episode import Moment, Record
from sims.quadrotor.physics.airframes import Airframe, hover_speed
from sims.quadrotor.physics.dynamics import Body, Options
from sims.quadrotor.tasks.hover import INITIAL, Hover
from sims.tracer.arithmetic import Rows, Value, gaussians, sqrt, squares, uniform, where

OPTIONS = Options(drag=True, wind=True, ground_effect=True, floor=True, sag=True, senses=True, delay_steps=3)
TAKE_OFF = 30
WIND = 32
BIAS = 34
HEADING = 40
TAKE_OVER = 41
"""First indices of draws; the draws of `Hover` have smaller indices."""
FAST_M_S = 0.7
TILTED = 0.7
"""A landing faster or more tilted (cosine) than this is a crash."""


@dataclass(frozen=True)
class RobustHover(Hover):
    """Numbers of the task, in addition to `Hover`'s; with all of them 0 it is `Hover` without a ground.

    Attributes:
        take_off_share: share of episodes that begin on the ground, at rest, below the goal.
        take_over_share: share of the others whose past commands are standstill, as when firmware takes over in flight;
            all others have the past commands that hold the rotors' speeds.
        ground_m: distance of the ground below the goal; 0 means no ground. Touching it fast or tilted ends the episode.
        wind_m_s: standard deviation of the wind along each horizontal axis; gusts follow from it.
        bias_velocity_m_s, bias_attitude_rad: standard deviations of an episode's constant errors of measurement.
        heading_rad: largest angle between the heading at take-off and the world's x axis.
    """

    noise_velocity_m_s: Value = 0.01
    noise_angular_velocity_rad_s: Value = 0.01
    take_off_share: Value = 0.15
    take_over_share: Value = 0.25
    ground_m: Value = 0.59
    wind_m_s: Value = 1.0
    bias_velocity_m_s: Value = 0.03
    bias_attitude_rad: Value = 0.015
    heading_rad: Value = 0.5

    PLAN: ClassVar[int] = 6
    MEMORY: ClassVar[int] = 2

    def plan(self, key: Sequence[Value]) -> Rows:
        """Errors of the measured velocity (m/s, world) and attitude (rad, body)."""
        scale = [self.bias_velocity_m_s] * 3 + [self.bias_attitude_rad] * 3
        return [g * std for g, std in zip(gaussians(key, INITIAL, BIAS, 6), scale, strict=True)]

    def initial(self, key: Sequence[Value], airframe: Airframe, plan: Rows) -> Rows:
        """Initial state of `Hover`, or on the ground with rotors at a standstill."""
        x, y, *_ = flying = super().initial(key, airframe, plan)
        half = (uniform(key, INITIAL, HEADING) - 0.5) * self.heading_rad
        zero = [0.0, 0.0, 0.0]
        rotors = [-hover_speed(airframe)] * 4
        standing = Body([x, y, -self.ground_m], [half.cos(), 0.0, 0.0, half.sin()], zero, zero, rotors)
        takes_off = uniform(key, INITIAL, TAKE_OFF) < self.take_off_share
        return [where(takes_off, a, b) for a, b in zip(standing.rows(), flying, strict=True)]

    def commands(self, key: Sequence[Value], airframe: Airframe, rotors: Rows) -> Rows:
        """Past commands of `Hover`, or standstill."""
        unknown = uniform(key, INITIAL, TAKE_OVER) < self.take_over_share
        return [where(unknown, -1.0, command) for command in super().commands(key, airframe, rotors)]

    def disturbance(self, key: Sequence[Value], airframe: Airframe) -> Rows:
        """Force, torque, mean wind, and the height of the ground (m, world)."""
        wind = [g * self.wind_m_s for g in gaussians(key, INITIAL, WIND, 2)]
        ground_m = where(self.ground_m > 0.0, -self.ground_m, -1000.0)
        return [*super().disturbance(key, airframe), *wind, 0.0, ground_m]

    def observe(self, now: Moment) -> Rows:
        """Observation of `Hover`, with the episode's errors of velocity and attitude."""
        velocity = [v + b for v, b in zip(now.body.velocity, now.plan[:3], strict=True)]
        body = replace(now.body, quaternion=_turned(now.body.quaternion, now.plan[3:6]), velocity=velocity)
        return super().observe(replace(now, body=body))

    def update(self, now: Moment) -> Rows:
        """Memory of `Hover`, and 1 once the drone has crashed into the ground."""
        fast = now.before.body.velocity[2] < -FAST_M_S
        x, y = now.before.body.quaternion[1:3]
        tilted = 1.0 - 2.0 * (x * x + y * y) < TILTED
        touching = (now.body.position[2] <= -self.ground_m) & (self.ground_m > 0.0)
        return [*super().update(now), where(touching & (fast | tilted), 1.0, 0.0)]

    def reward(self, now: Moment) -> Value:
        """Reward of `Hover`, with twice the cost of position, ten times that of velocity, and a cost of action changes.

        Damping lets weak drones recover from throws; smooth actions tolerate delays.
        """
        reward = super().reward(now)
        changes = [a - b for a, b in zip(now.action, now.previous, strict=True)]
        return reward - (
            self.weight_position * squares(now.body.position)
            + 9.0 * self.weight_velocity * squares(now.body.velocity)
            + 20.0 * self.weight_action * squares(changes)
        )

    def terminated(self, now: Moment) -> Value:
        """Whether a coordinate left the limits, or the drone crashed."""
        return super().terminated(now) | (now.memory[1] > 0.5)

    def failures(self, now: Record) -> dict[str, Tensor]:
        """Causes of termination: out of bounds, or a crash into the ground."""
        crashed = now.terminated & (now.memory[1] > 0.5)
        return {"out of bounds": now.terminated & ~crashed, "hit the ground": crashed}


DISTURBED = RobustHover(
    noise_velocity_m_s=Hover.noise_velocity_m_s,
    noise_angular_velocity_rad_s=Hover.noise_angular_velocity_rad_s,
    take_off_share=0.0,
    take_over_share=0.0,
    ground_m=0.0,
    wind_m_s=0.0,
    bias_velocity_m_s=0.0,
    bias_attitude_rad=0.0,
)
"""`Hover`, to which single effects can be added."""


def _turned(quaternion: Rows, by: Rows) -> Rows:
    """`quaternion` turned by a small rotation vector in the body, rad."""
    w, x, y, z = quaternion
    a, b, c = (0.5 * angle for angle in by)
    # q * (1, a, b, c), normalised below.
    turned = [
        *(w - x * a - y * b - z * c, x + w * a + y * c - z * b),
        *(y + w * b + z * a - x * c, z + w * c + x * b - y * a),
    ]
    scale = 1.0 / sqrt(squares(turned))
    return [q * scale for q in turned]
