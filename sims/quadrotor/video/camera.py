"""A perspective camera, and one that follows a drone without jerks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating]
NEAR_M = 0.12
"""Near clipping distance."""
ABOVE_FLOOR_M = 0.15
"""Lowest height of a following camera above the floor."""
UP = np.array([0.0, 0.0, 1.0])


class Camera:
    """Camera at `eye` that looks towards `target` (m, world), upright; `focal` and `size` (width, height) in pixels."""

    def __init__(self, eye: Array, target: Array, focal: float, size: tuple[int, int]) -> None:
        self.eye = np.asarray(eye, dtype=float)
        self.focal = focal
        self.size = size
        forward = np.asarray(target, dtype=float) - self.eye
        forward /= np.linalg.norm(forward)
        right = np.cross(forward, UP)
        right = right / np.linalg.norm(right) if np.any(right) else np.array([1.0, 0.0, 0.0])
        self.axes = np.stack([right, np.cross(right, forward), forward])

    def projected(self, points: Array) -> Array:
        """Camera coordinates of `points` [..., 3] m, world: to the right, upwards and in depth."""
        return (points - self.eye) @ self.axes.T

    def pixels(self, coordinates: Array) -> Array:
        """Pixels from the left and from the top, [..., 2], of points with the camera `coordinates` [..., 3]."""
        scale = self.focal / np.maximum(coordinates[..., 2:], NEAR_M)
        width, height = self.size
        return np.array([0.5 * width, 0.5 * height]) + scale * coordinates[..., :2] * np.array([1.0, -1.0])

    @property
    def horizon(self) -> float:
        """The horizon's row."""
        _, up, forward = self.axes
        return 0.5 * self.size[1] + self.focal * float(forward[2]) / max(float(up[2]), 1e-6)


@dataclass
class Spring:
    """A value that follows another smoothly, as a critically damped spring of `rate_rad_s`."""

    rate_rad_s: float
    value: Array | None = None
    _speed: Array = field(default_factory=lambda: np.zeros(1))

    def follow(self, goal: Array, dt_s: float) -> Array:
        """The value `dt_s` later, if `goal` does not move meanwhile; at first `goal` itself."""
        if self.value is None:
            self.value, self._speed = goal.copy(), np.zeros_like(goal)
        off = self.value - goal
        decay = math.exp(-self.rate_rad_s * dt_s)
        # x(t) = g + (x0 - g + (v0 + w (x0 - g)) t) exp(-w t).
        change = (self._speed + self.rate_rad_s * off) * dt_s
        self.value = goal + (off + change) * decay
        self._speed = (self._speed - self.rate_rad_s * change) * decay
        return self.value


@dataclass
class Follow:
    """A camera that follows a drone.

    Attributes:
        distance_m, height_m: distance of the camera behind the drone, and its height above it.
        floor_m: height of the floor, above which the camera stays.
        above: height above the drone of the point that the camera looks at, in distances.
        orbit_rad_s: angular velocity around a drone that is not chased.
    """

    distance_m: float
    height_m: float
    floor_m: float
    above: float = 0.0
    orbit_rad_s: float = 0.15
    _place: Spring = field(default_factory=lambda: Spring(14.0))
    _heading: Spring = field(default_factory=lambda: Spring(5.0))
    _angle: float = 2.2

    def camera(self, position: Array, ahead: Array | None, dt_s: float, focal: float, size: tuple[int, int]) -> Camera:
        """The camera `dt_s` after the last one, of a drone at `position` [3].

        It looks along `ahead` [2], which need not be a unit vector, or goes slowly around the drone.
        """
        place = self._place.follow(position, dt_s)
        self._angle += self.orbit_rad_s * dt_s
        around = np.array([math.cos(self._angle), math.sin(self._angle)])
        x, y = around if ahead is None else self._heading.follow(ahead / max(float(np.linalg.norm(ahead)), 1e-6), dt_s)
        behind = np.array([x, y, 0.0]) / max(math.hypot(x, y), 1e-6)
        eye = place - self.distance_m * behind + self.height_m * UP
        eye[2] = max(eye[2], self.floor_m + ABOVE_FLOOR_M)
        return Camera(eye, position + self.above * self.distance_m * UP, focal, size)
