"""A picture in perspective: sky, floor, and faces and lines that are drawn from far to near."""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from sims.quadrotor.video.camera import NEAR_M, Array, Camera

SKY = (16, 20, 31)
HORIZON = (76, 95, 126)
HAZE = (56, 66, 82)
GROUND = (37, 42, 51)
LINES = (112, 126, 148)
FADED_M = 9.0
"""Distance over which colours fade into those of the horizon by 63%, in floor cells."""
WIDEST = 9
"""Largest width of lines, pixels."""
RGBA = tuple[int, int, int, int]


class Canvas:
    """Picture of `camera`; `cell_m` is the size of the floor's cells, the unit in which colours fade with distance."""

    def __init__(self, camera: Camera, cell_m: float) -> None:
        self.camera = camera
        self.fade_m = FADED_M * cell_m
        width, height = camera.size
        top = round(min(max(1.5 * height - camera.horizon, 0.0), 2.0 * height))
        self.image = _sky(width, height).crop((0, top, width, top + height))
        self.pen, self.plain = ImageDraw.Draw(self.image, "RGBA"), ImageDraw.Draw(self.image)
        self._parts: list[tuple[float, list[float], RGBA, int]] = []

    def floor(self, ends: Array) -> None:
        """Draw lines on the floor between `ends` [S, 2, 3], now."""
        segments = self._before(self.camera.projected(ends))
        pixels = self.camera.pixels(segments)
        visible = self._within(pixels)
        share = self._nearness(segments[visible, :, 2].mean(-1))[:, None]
        colours = (np.array(HAZE) + share * (np.array(LINES) - np.array(HAZE))).astype(int).tolist()
        for line, colour in zip(pixels[visible].reshape(-1, 4).tolist(), colours, strict=True):
            self.plain.line(line, fill=tuple(colour))

    def shadow(self, corners: Array, alpha: float) -> None:
        """Darken the convex polygon `corners` [P, 3] on the floor, now."""
        if len(outline := self._clipped(self.camera.projected(corners))) > 2:
            self.pen.polygon(self.camera.pixels(outline).ravel().tolist(), fill=(0, 0, 0, round(255 * alpha)))

    def faces(self, corners: Array, colours: Array, alpha: float = 1.0, solid_m: float = 0.0) -> None:
        """Add flat convex faces with `corners` [Q, P, 3] and `colours` [Q, 3]; nearer than `solid_m` they fade."""
        vertices = self.camera.projected(corners)
        depth = vertices[..., 2].mean(-1)
        share = self._nearness(depth)[:, None]
        faded = (np.array(HORIZON) + share * (colours - np.array(HORIZON))).astype(int).tolist()
        in_front = (vertices[..., 2] > NEAR_M).all(-1)
        partly_in_front = (vertices[..., 2] > NEAR_M).any(-1)
        pixels = self.camera.pixels(vertices)
        alphas = np.rint(255 * alpha * np.clip(depth / max(solid_m, 1e-6), 0.15, 1.0)).astype(int).tolist()
        for row in np.flatnonzero(partly_in_front & (self._within(pixels) | ~in_front)):
            points = pixels[row] if in_front[row] else self.camera.pixels(self._clipped(vertices[row]))
            red, green, blue = faded[row]
            self._parts.append((float(depth[row]), points.ravel().tolist(), (red, green, blue, alphas[row]), 0))

    def lines(self, ends: Array, width_m: float, colour: tuple[int, int, int], alphas: Array | None = None) -> None:
        """Add lines between `ends` [S, 2, 3], `width_m` wide, with `alphas` [S] in [0, 1], by default 1."""
        segments = self.camera.projected(ends)
        visible = (segments[..., 2] > NEAR_M).any(-1)
        segments = self._before(segments)
        opacities = np.full(len(segments), 255) if alphas is None else (255 * alphas[visible]).astype(int)
        depth = segments[..., 2].mean(-1)
        wide = np.clip(np.rint(self.camera.focal * width_m / depth), 1, WIDEST).astype(int).tolist()
        pixels = self.camera.pixels(segments)
        for row in np.flatnonzero(self._within(pixels)):
            self._parts.append(
                (float(depth[row]), pixels[row].ravel().tolist(), (*colour, int(opacities[row])), wide[row])
            )

    def path(self, points: Array, width_m: float, colour: tuple[int, int, int], alpha: float = 1.0) -> None:
        """Add one line through `points` [P, 3] as a whole, if all of it is in front of the camera, else in pieces."""
        vertices = self.camera.projected(points)
        if (vertices[:, 2] < NEAR_M).any():
            return self.lines(np.stack([points[:-1], points[1:]], 1), width_m, colour, np.full(len(points) - 1, alpha))
        depth = float(vertices[:, 2].mean())
        width = int(np.clip(np.rint(self.camera.focal * width_m / depth), 1, WIDEST))
        line = self.camera.pixels(vertices).ravel().tolist()
        return self._parts.append((depth, line, (*colour, round(255 * alpha)), width))

    def finished(self) -> Image.Image:
        """Picture with all added faces and lines."""
        for _, points, colour, width in sorted(self._parts, key=lambda part: -part[0]):
            pen = self.plain if colour[3] == 255 else self.pen
            if width:
                pen.line(points, fill=colour, width=width)
            else:
                pen.polygon(points, fill=colour)
        self._parts.clear()
        return self.image

    def place(self, point: Array) -> tuple[float, float, float] | None:
        """Column, row and depth of `point` [3]; None behind the camera."""
        coordinates = self.camera.projected(point)
        return (*self.camera.pixels(coordinates).tolist(), float(coordinates[2])) if coordinates[2] > NEAR_M else None

    def _within(self, pixels: Array) -> NDArray[np.bool_]:
        """Whether lines or faces with corners `pixels` [S, P, 2] may reach into the picture, [S]."""
        low = pixels.min(1)
        high = pixels.max(1)
        return ((high > 0.0) & (low < np.array(self.camera.size))).all(-1)

    def _nearness(self, depth: Array) -> Array:
        return np.exp(-np.maximum(depth, 0.0) / self.fade_m)

    def _before(self, projected: Array) -> Array:
        """The parts of lines `projected` [S, 2, 3] that are in front of the camera."""
        projected = projected[(projected[..., 2] > NEAR_M).any(-1)]
        first = projected[:, 0]
        last = projected[:, 1]
        run = last[:, 2] - first[:, 2]
        share = ((NEAR_M - first[:, 2]) / np.where(np.abs(run) < 1e-9, 1.0, run))[:, None]
        cut = first + share * (last - first)
        behind = projected[..., 2:] < NEAR_M
        return np.stack([np.where(behind[:, 0], cut, first), np.where(behind[:, 1], cut, last)], 1)

    def _clipped(self, projected: Array) -> Array:
        """The part of the convex polygon `projected` [P, 3] that is in front of the camera."""
        inside = projected[:, 2] > NEAR_M
        corners = []
        for row, point in enumerate(projected):
            before = projected[row - 1]
            was_inside = inside[row - 1]
            if was_inside != inside[row]:
                corners.append(before + (NEAR_M - before[2]) / (point[2] - before[2]) * (point - before))
            if inside[row]:
                corners.append(point)
        return np.array(corners).reshape(-1, 3)


@functools.cache
def _sky(width: int, height: int) -> Image.Image:
    """Sky above the horizon and floor below it, three pictures high, the horizon in the middle."""
    rows = np.abs(np.arange(3 * height) - 1.5 * height)[:, None] / height
    sky, ground = (np.exp(-rows * steep) for steep in (3.0, 5.0))
    above = np.array(SKY) + sky * (np.array(HORIZON) - np.array(SKY))
    below = np.array(GROUND) + ground * (np.array(HAZE) - np.array(GROUND))
    column = np.where(np.arange(3 * height)[:, None] < 1.5 * height, above, below)
    return Image.fromarray(np.broadcast_to(column[:, None], (3 * height, width, 3)).astype(np.uint8).copy())
