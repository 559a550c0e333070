"""Displacements of the end effector as velocities: LIBERO's actions on an arm that follows velocities.

A policy trained with robosuite's OSC_POSE commands a displacement from the hand's current pose in every period. The
controller moves the hand like a critically damped spring, and receives the next goal long before the hand arrives: at
robosuite's stiffness the hand covers a quarter of a displacement that is commanded repeatedly. A robot that covered all
of it would move four times as fast as in training.
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
"""Unit of the velocities that replace them."""


@dataclass(frozen=True)
class Response:
    """Response of a hand of unit inertia to goals that are set relative to it every `dt_s`: e'' = -w^2 e - 2 w e'.

    Attributes:
        dt_s: period of the goals, s.
        scale: m (three times) and rad (three times) for an action of 1.
        stiffness: w^2, 1/s^2; robosuite's OSC_POSE has 150 (its torques are multiplied by the hand's inertia).
    """

    dt_s: float
    scale: tuple[float, ...] = (0.05,) * 3 + (0.5,) * 3
    stiffness: float = 150.0

    def after(self, action: Array, velocity: Array) -> tuple[Array, Array]:
        """Mean and final velocity [6] of a period that begins with `velocity` [6] and goal `action` [6].

        This is the closed solution of the equation for e(0) = -goal, e'(0) = velocity.
        """
        # e(t) = (-goal + (velocity - w goal) t) exp(-w t); the hand moves by e(t) + goal
        goal = np.asarray(self.scale) * action
        w = math.sqrt(self.stiffness)
        t = self.dt_s
        decay = math.exp(-w * t)
        distance = goal * (1.0 - (1.0 + w * t) * decay) + velocity * t * decay
        return distance / t, goal * w * w * t * decay + velocity * (1.0 - w * t) * decay

    @property
    def fastest(self) -> Array:
        """Steady mean velocities [6] under actions of 1: the upper bound, because the response does not overshoot."""
        velocity = np.zeros(6)
        for _ in range(1000):
            mean, velocity = self.after(np.ones(6), velocity)
        return mean


class Displaced:
    """An executor that converts displacements, LIBERO's actions of `executor`, to velocities [7].

    The gripper's element is unchanged. A period without an action lets the hand come to rest.
    """

    def __init__(self, executor: Executor, response: Response) -> None:
        self._executor = executor
        self._response = response
        self._velocity = np.zeros(6)

    def reset(self) -> None:
        """Begin an episode, at rest."""
        self._executor.reset()
        self._velocity = np.zeros(6)

    def observe(self, reading: Reading) -> None:
        """Pass in the newest measurement."""
        self._executor.observe(reading)

    def action(self, now_s: float) -> Array | None:
        """The velocities [6] and the gripper's direction for this period; call it once per period."""
        displacement = self._executor.action(now_s)
        if displacement is None:
            self._velocity = np.zeros(6)
            return None
        clipped = np.clip(np.asarray(displacement, np.float64), -1.0, 1.0)
        mean, self._velocity = self._response.after(clipped[:6], self._velocity)
        return np.append(mean, clipped[6])
