"""Drones drawn in perspective: a floor grid, the path, the goal, and the airframe with its front in red."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

Array = NDArray[np.floating]
PAPER, GRID, TRAIL, GOAL = (24, 26, 30), (62, 66, 74), (90, 160, 250), (70, 190, 90)
ARM, FRONT = (225, 225, 230), (235, 80, 70)
CIRCLE = np.stack([np.cos(np.linspace(0, 2 * np.pi, 13)), np.sin(np.linspace(0, 2 * np.pi, 13)), np.zeros(13)], -1)


class Camera:
    """Looks at `centre` (m, world) such that a ball of `radius` m fills the image of `size` pixels."""

    def __init__(self, centre: Array, radius: float, size: int = 256) -> None:
        self.size, self.radius, self.centre = size, radius, np.asarray(centre, dtype=float)
        forward = np.array([-0.62, 0.70, -0.36])
        forward /= np.linalg.norm(forward)
        right = np.cross(forward, [0.0, 0.0, 1.0])
        right /= np.linalg.norm(right)
        self.axes = np.stack([right, np.cross(right, forward), forward])
        self.eye = self.centre - 4.0 * radius * forward

    def project(self, points: Array) -> list[tuple[float, float]]:
        """Pixels of `points` [P, 3]."""
        seen = (np.asarray(points, dtype=float) - self.eye) @ self.axes.T
        depth = np.maximum(seen[:, 2], 0.05 * self.radius)
        scale = 3.7 * self.size / 2 / depth
        return [
            (float(x), float(y))
            for x, y in zip(
                self.size / 2 + scale * seen[:, 0], self.size / 2 - scale * seen[:, 1], strict=True
            )
        ]  # fmt: skip


def draw(
    camera: Camera,
    trails: list[Array],
    poses: list[tuple[Array, Array]],
    *,
    arm_m: float,
    paths: tuple[Array, ...] = (),
    markers: tuple[Array, ...] = (),
) -> NDArray[np.uint8]:
    """One image [size, size, 3].

    Args:
        camera: viewpoint.
        trails: path of each drone, [P, 3] m.
        poses: position [3] m and rotation matrix [3, 3] (body FLU to world) of each drone.
        arm_m: distance of the rotors from the middle; enlarged if it would be too small to see.
        paths: lines to follow, gates and obstacles, [P, 3] m.
        markers: goals, [3] m.
    """
    image = Image.new("RGB", (camera.size, camera.size), PAPER)
    pen = ImageDraw.Draw(image)
    _floor(pen, camera)
    for path in paths:
        pen.line(camera.project(path), fill=GOAL, width=2)
    for marker in markers:
        for axis in np.eye(3):
            ends = marker + 0.06 * camera.radius * axis * np.array([[-1.0], [1.0]])
            pen.line(camera.project(ends), fill=GOAL, width=2)
    for trail in trails:
        if len(trail) > 1:
            pen.line(camera.project(trail), fill=TRAIL, width=1)
    for position, rotation in poses:
        _airframe(pen, camera, position, rotation, max(arm_m, 0.11 * camera.radius))
    return np.asarray(image)


def _floor(pen: ImageDraw.ImageDraw, camera: Camera) -> None:
    reach = camera.radius
    base = camera.centre - [0.0, 0.0, reach]
    for offset in np.linspace(-reach, reach, 9):
        for line in ([[-reach, offset, 0], [reach, offset, 0]], [[offset, -reach, 0], [offset, reach, 0]]):
            pen.line(camera.project(base + np.array(line)), fill=GRID)


def _airframe(pen: ImageDraw.ImageDraw, camera: Camera, position: Array, rotation: Array, arm: float) -> None:
    for x, y in ((1, -1), (-1, -1), (-1, 1), (1, 1)):
        hub = np.array([x, y, 0.0]) * arm / np.sqrt(2)
        colour = FRONT if x > 0 else ARM
        pen.line(camera.project(position + np.stack([np.zeros(3), hub]) @ rotation.T), fill=ARM, width=2)
        pen.line(camera.project(position + (hub + 0.45 * arm * CIRCLE) @ rotation.T), fill=colour, width=2)
