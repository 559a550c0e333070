"""Drawings of vehicles from above: walls, obstacles, driven path, lidar hits, vehicle and goal."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from sims.vehicle.geometry import FAR_M

Array = NDArray[np.floating]
PAPER = (24, 26, 30)
WALL = (150, 155, 165)
SHAPE = (92, 98, 110)
RAY = (58, 70, 58)
TRAIL = (90, 160, 250)
GOAL = (70, 190, 90)
BODY = (225, 225, 230)
FRONT = (235, 80, 70)
SCALE = 2
"""Factor of supersampling, for smooth lines."""


@dataclass(frozen=True, eq=False)
class Map:
    """The static parts of one world: circles [C, 3], segments [S, 4], goals or a centre line [P, 2], m."""

    circles: Array
    segments: Array
    route: Array
    size: int = 256

    @property
    def walls(self) -> Array:
        """The used segments [W, 4]; unused ones are far away in x or in y."""
        return self.segments[(self.segments < FAR_M / 2).all(1)]

    def frame(self) -> tuple[Array, float]:
        """Centre of the image, m, and pixels per metre."""
        points = self.walls.reshape(-1, 2)
        low = points.min(0)
        high = points.max(0)
        return (low + high) / 2.0, SCALE * self.size / (float((high - low).max()) + 0.4)


def draw(world: Map, trail: Array, outline: tuple[float, float], origin: Array, hits: Array) -> NDArray[np.uint8]:
    """Draw one image [size, size, 3].

    Args:
        world: static parts of the world.
        trail: poses so far [T, 3], the last one present; m, rad, world.
        outline: length and width of the vehicle, m.
        origin: position of the lidar [2], m, world.
        hits: end points of the lidar's beams [B, 2], m, world.
    """
    image = Image.new("RGB", (SCALE * world.size, SCALE * world.size), PAPER)
    pen, (middle, scale) = ImageDraw.Draw(image), world.frame()

    def pixels(points: Array) -> list[tuple[float, float]]:
        image_points = (np.asarray(points, dtype=float) - middle) * scale * [1.0, -1.0] + SCALE * world.size / 2.0
        return [(float(x), float(y)) for x, y in image_points]

    for end in hits:
        pen.line(pixels(np.stack((origin, end))), fill=RAY, width=1)
    for x, y, radius in world.circles[world.circles[:, 2] > 0.0]:
        pen.ellipse(
            [*pixels(np.array([[x - radius, y + radius]]))[0], *pixels(np.array([[x + radius, y - radius]]))[0]], SHAPE
        )
    for segment in world.walls:
        pen.line(pixels(segment.reshape(2, 2)), fill=WALL, width=2 * SCALE)
    if len(world.route) == 1:
        (x, y), r = pixels(world.route)[0], 0.3 * scale
        pen.ellipse((x - r, y - r, x + r, y + r), outline=GOAL, width=2 * SCALE)
    if len(trail) > 1:
        pen.line(pixels(trail[:, :2]), fill=TRAIL, width=2 * SCALE)
    yaw = trail[-1, 2]
    ahead = np.array([np.cos(yaw), np.sin(yaw)]) * outline[0] / 2.0
    aside = np.array([-np.sin(yaw), np.cos(yaw)]) * outline[1] / 2.0
    corners = np.stack((ahead + aside, ahead - aside, -ahead - aside, aside - ahead)) + trail[-1, :2]
    pen.polygon(pixels(corners), fill=BODY)
    pen.line(pixels(corners[:2]), fill=FRONT, width=2 * SCALE)
    return np.asarray(image.resize((world.size, world.size), Image.Resampling.LANCZOS))
