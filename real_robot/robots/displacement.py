"""Displacements of the end effector as velocities: LIBERO's actions on an arm that follows velocities.

A policy trained with robosuite's OSC_POSE commands where the hand is to go from where it is, anew in every period; the
controller pulls it there like a critically damped spring, and is told the next goal long before it arrives: at
robosuite's stiffness the hand covers a quarter of a displacement that is commanded again and again. A robot that
covered all of it would move four times as fast as in training.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from real_robot.robots.control_loop import Executor
from real_robot.robots.robot import Array, Reading

AXES = ("x", "y", "z", "rotation_x", "rotation_y", "rotation_z")
GRIPPER = "gripper"
DISPLACEMENTS = "0.05 m (x, y, z); 0.5 rad, axis-angle (rotation); direction of travel (gripper)"
"""Unit of LIBERO's actions."""
VELOCITIES = "m/s (x, y, z); rad/s (rotation); direction of travel (gripper)"
"""Unit of what they are turned into."""


@dataclass(frozen=True)
class Response:
    """How a hand of unit inertia follows goals that are set relative to it every `dt_s`: e'' = -w^2 e - 2 w e'.

    Attributes:
        dt_s: period of the goals, s.
        scale: m (three times) and rad (three times) for an action of 1.
        stiffness: w^2, 1/s^2; robosuite's OSC_POSE has 150 (its torques are multiplied by the hand's inertia).
    """

    dt_s: float
    scale: tuple[float, ...] = (0.05,) * 3 + (0.5,) * 3
    stiffness: float = 150.0

    def after(self, action: Array, velocity: Array) -> tuple[Array, Array]:
        """Mean velocity [6] over the period that begins with `velocity` [6] and goal `action` [6], and that at its end.

        The closed solution of the equation for e(0) = -goal, e'(0) = velocity.
        """
        goal = np.asarray(self.scale) * action
        w, t = math.sqrt(self.stiffness), self.dt_s
        decay = math.exp(-w * t)
        moved = goal * (1.0 - (1.0 + w * t) * decay) + velocity * t * decay
        return moved / t, goal * w * w * t * decay + velocity * (1.0 - w * t) * decay

    @property
    def fastest(self) -> Array:
        """Mean velocities [6] that actions of 1 lead to in the end; none is ever faster, as nothing overshoots."""
        velocity = np.zeros(6)
        for _ in range(1000):
            mean, velocity = self.after(np.ones(6), velocity)
        return mean


class Displaced:
    """An executor whose displacements are turned into velocities [7]: `executor`'s actions are LIBERO's.

    The gripper's element stays what it is. A period without an action lets the hand come to rest.
    """

    def __init__(self, executor: Executor, response: Response) -> None:
        self._executor, self._response = executor, response
        self._velocity = np.zeros(6)

    def reset(self) -> None:
        """Begin an episode, at rest."""
        self._executor.reset()
        self._velocity = np.zeros(6)

    def observe(self, reading: Reading) -> None:
        """Offer the newest measurement."""
        self._executor.observe(reading)

    def action(self, now_s: float) -> Array | None:
        """The velocities [6] and the gripper's direction for this period; call it once per period."""
        displacement = self._executor.action(now_s)
        if displacement is None:
            self._velocity = np.zeros(6)
            return None
        wanted = np.clip(np.asarray(displacement, np.float64), -1.0, 1.0)
        mean, self._velocity = self._response.after(wanted[:6], self._velocity)
        return np.append(mean, wanted[6])
