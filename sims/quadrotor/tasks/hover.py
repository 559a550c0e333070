"""Hover at the origin: the Markov decision process of Learning to Fly in Seconds (arXiv 2311.13081).

Initial states, disturbances, noise and termination follow that paper; the reward does not, see `Hover.reward`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from embodied.contract import TensorSpec
from sims.quadrotor.episode import Mdp, Moment, Record, Reward, Weight
from sims.quadrotor.observation import ANGULAR_VELOCITY, AXES, ROTATION, VELOCITY
from sims.quadrotor.physics.airframes import GRAVITY, Airframe, hover_speed
from sims.tracer.arithmetic import Rows, Value, gaussians, sqrt, squares, uniform, where

INITIAL = -1
"""Counter of the draws for initial states; observation noise uses the control step, from 0."""
ERROR_STEPS = 100
"""The last second, over which the position error of an episode is averaged."""


@dataclass(frozen=True)
class Hover(Mdp):
    """Numbers of the task; each is an input of the kernels, so that changing it needs no compilation.

    Attributes:
        position_limit_m: the episode ends if a coordinate leaves [-limit, limit].
        origin_share: share of episodes that begin level and at the origin, with velocities like the others.
        initial_position_m, initial_velocity_m_s, initial_angular_velocity_rad_s: bounds of each coordinate; away from
            the origin the rotation is uniform among those of at most 90 degrees.
        initial_rotor_speed: initial speed of all rotors, as a fraction of the highest.
        force_scale, torque_scale: standard deviation of the episode's force and torque per axis, in weights (torque:
            weight times 1 m).
        noise_position_m, noise_rotation, noise_velocity_m_s, noise_angular_velocity_rad_s: standard
            deviations of the measurement noise.
        reward_alive, weight_*: see `reward`.
    """

    position_limit_m: Value = 0.6
    origin_share: Value = 0.1
    initial_position_m: Value = 0.2
    initial_velocity_m_s: Value = 1.0
    initial_angular_velocity_rad_s: Value = 1.0
    initial_rotor_speed: Value = 0.5
    force_scale: Value = 1.0 / 20.0
    torque_scale: Value = 1.0 / 10000.0
    noise_position_m: Value = 0.001
    noise_rotation: Value = 0.001
    noise_velocity_m_s: Value = 0.002
    noise_angular_velocity_rad_s: Value = 0.002
    reward_alive: Reward = 1.0
    weight_position: Weight = 5.0
    weight_rotation: Weight = 0.5
    weight_velocity: Weight = 0.05
    weight_angular_velocity: Weight = 0.01
    weight_action: Weight = 0.01
    weight_action_change: Weight = 0.0

    INSTRUCTION: ClassVar[str] = "hover at the origin"
    OBSERVED: ClassVar[Mapping[str, TensorSpec]] = {
        "position": TensorSpec((3,), unit="m", frame="world", names=AXES),
        "rotation": ROTATION,
        "velocity": VELOCITY,
        "angular_velocity": ANGULAR_VELOCITY,
    }
    MEMORY: ClassVar[int] = 1

    def initial(self, key: Sequence[Value], airframe: Airframe, plan: Rows) -> Rows:
        """The body's rows at the beginning of the episode of `key`."""

        def spread(first: int, bound: Value) -> Rows:
            return [(2.0 * uniform(key, INITIAL, first + axis) - 1.0) * bound for axis in range(3)]

        at_origin = uniform(key, INITIAL, 0) < self.origin_share
        anywhere = [*spread(1, self.initial_position_m), *self._rotation(key)]
        return [
            *(where(at_origin, a, b) for a, b in zip([0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0], anywhere, strict=True)),
            *spread(12, self.initial_velocity_m_s),
            *spread(15, self.initial_angular_velocity_rad_s),
            *[self.initial_rotor_speed - hover_speed(airframe)] * 4,
        ]

    def commands(self, key: Sequence[Value], airframe: Airframe, rotors: Rows) -> Rows:
        """Last commands before the episode: set-points at which the `rotors` hold their (excess) speeds."""
        hover = hover_speed(airframe)
        return [2.0 * (excess + hover) - 1.0 for excess in rotors]

    def disturbance(self, key: Sequence[Value], airframe: Airframe) -> Rows:
        """Force (N, world) and torque (N m, body) of the episode."""
        weight = airframe.mass_kg * GRAVITY
        scale = [self.force_scale] * 3 + [self.torque_scale] * 3
        return [draw * (weight * each) for draw, each in zip(disturbed(key), scale, strict=True)]

    def observe(self, now: Moment) -> Rows:
        """Position, rotation, velocity, angular velocity; with noise if there is a `key`."""
        body = now.body
        measured = [*body.position, *body.rotation(), *body.velocity, *body.angular_velocity]
        if now.key is None:
            return measured
        scale = [self.noise_position_m] * 3 + [self.noise_rotation] * 9
        scale += [self.noise_velocity_m_s] * 3 + [self.noise_angular_velocity_rad_s] * 3
        noise = gaussians(now.key, now.steps, 0, len(measured))
        return [value + g * std for value, g, std in zip(measured, noise, scale, strict=True)]

    def update(self, now: Moment) -> Rows:
        """The sum of the distance from the origin over the last `ERROR_STEPS` steps before the step limit, m."""
        error = sqrt(squares(now.body.position))
        return [now.before.memory[0] + where(now.steps > now.limit - float(ERROR_STEPS), error, 0.0)]

    def reward(self, now: Moment) -> Value:
        """A constant for staying alive minus squares: position, rotation (1 - q_w^2), velocities, actions.

        The shape is that of Learning to Fly, without its clipping at zero, because gradients need the slope far away.
        Inside the position limit the constant keeps most rewards positive, so that ending early is no gain. Actions are
        measured from the hover action.
        """
        hover = 2.0 * hover_speed(now.airframe) - 1.0
        body = now.body
        w = body.quaternion[0]
        cost = (
            self.weight_position * squares(body.position)
            + self.weight_rotation * (1.0 - w * w)
            + self.weight_velocity * squares(body.velocity)
            + self.weight_angular_velocity * squares(body.angular_velocity)
            + self.weight_action * squares([a - hover for a in now.action])
            + self.weight_action_change * squares([a - b for a, b in zip(now.action, now.previous, strict=True)])
        )
        return self.reward_alive - cost

    def terminated(self, now: Moment) -> Value:
        """Whether a coordinate left the limits."""
        x, y, z = (axis * axis > self.position_limit_m * self.position_limit_m for axis in now.body.position)
        return x | y | z

    def success(self, now: Record) -> Tensor:
        """Whether the episode survived to its step limit."""
        return now.truncated

    def failures(self, now: Record) -> dict[str, Tensor]:
        """Causes of termination: out of bounds, which includes states that diverge."""
        return {"out of bounds": now.terminated}

    def metrics(self, now: Record) -> dict[str, Tensor]:
        """Whether it survived, and its mean distance from the origin over the last second."""
        error = torch.where(now.truncated, now.memory[0] / min(ERROR_STEPS, now.limit), torch.nan)
        return {"survive": now.truncated.float(), "position_error_m": error}

    def _rotation(self, key: Sequence[Value]) -> Rows:
        """A quaternion, uniform among rotations of at most 90 degrees.

        The angle t has the distribution (t - sin t) / (pi/2 - 1). Its inverse is a series in the cube root, and the
        cube root of a uniform number is distributed like the largest of three.
        """
        a, b, c = (uniform(key, INITIAL, index) for index in (4, 5, 6))
        # F = (t - sin t) / (pi/2 - 1) = t^3 / (6 (pi/2 - 1)) - ..., so that t = s (1 + s^2 / 60 + ...) for
        # s = (6 (pi/2 - 1) F)^(1/3).
        largest = where(a < b, b, a)
        largest = where(largest < c, c, largest)
        s = largest * (6.0 * (math.pi / 2.0 - 1.0)) ** (1.0 / 3.0)
        q = s * s
        series = 1.0 + q * (1 / 60 + q * (1 / 1400 + q * (1 / 25200 + q * (43 / 17248000 + q * (1213 / 7207200000)))))
        half = 0.5 * s * series
        axis = gaussians(key, INITIAL, 8, 3)
        sine = half.sin() / sqrt(squares(axis))
        return [half.cos(), *(sine * along for along in axis)]


def disturbed(key: Sequence[Value]) -> Rows:
    """Force (world) and torque (body) of the episode of `key`, in standard deviations."""
    return [*gaussians(key, INITIAL, 18, 3), *gaussians(key, INITIAL, 22, 3)]
