"""Random rooms: circles, boxes and thin walls between a start and a goal, far enough apart to drive between any two."""

from __future__ import annotations

import numpy as np

from sims.vehicle.geometry import FAR_M
from sims.vehicle.worlds import Array

SHAPES = 18
"""Obstacles at most."""
DISCS = 5
"""An obstacle is covered by so many discs along its axis, which its distance from others is taken to."""
TRIES = 48


def rooms(
    rng: np.random.Generator, count: int, *, half_m: float, obstacles: tuple[int, int], gap_m: float, way_m: float
) -> dict[str, Array]:
    """`count` square rooms, see `worlds.Maker`; the route is the goal alone.

    Args:
        rng: draws.
        count: of rooms.
        half_m: half their width.
        obstacles: fewest and most; a room holds fewer where no more fit.
        gap_m: between any two obstacles, and around start and goal, at least.
        way_m: from start to goal, at least.
    """
    start, goal = _ends(rng, count, half_m - gap_m, way_m)
    wanted = rng.integers(obstacles[0], obstacles[1] + 1, count)
    ends = np.stack((start, goal), 1)
    taken = np.full((count, 2 + SHAPES, DISCS, 3), -FAR_M, dtype=np.float32)  # discs of start, goal and obstacles
    taken[:, :2, :, :2], taken[..., 2] = ends[:, :, None], 0.0
    circles, segments = np.full((count, SHAPES, 3), FAR_M), np.full((count, 4 + 4 * SHAPES, 4), FAR_M)
    circles[..., 2], segments[:, :4] = 0.0, _sides(np.zeros((1, 2)), np.zeros(1), np.full((1, 2), half_m))
    placed = np.zeros(count, dtype=int)
    for _ in range(TRIES):
        centre, angle, half, rounded = _shapes(rng, count, half_m)
        discs = _discs(centre, angle, half, rounded)
        free = _gap(taken[:, : 2 + placed.max()].reshape(count, -1, 3), discs) > gap_m
        rows = np.flatnonzero(free & (placed < wanted))
        slot = placed[rows]
        taken[rows, 2 + slot] = discs[rows]
        is_round = rounded[rows]
        circles[rows[is_round], slot[is_round]] = discs[rows[is_round], 0]
        boxes, at = rows[~is_round], slot[~is_round]
        for side, ends_of in enumerate(_sides(centre[boxes], angle[boxes], half[boxes]).swapaxes(0, 1)):
            segments[boxes, 4 + 4 * at + side] = ends_of
        placed[rows] += 1
    pose = np.concatenate((start, rng.uniform(-np.pi, np.pi, (count, 1))), 1)
    return {
        "circles": circles, "segments": segments, "pose": pose, "route": goal[:, None],
        "length_m": np.linalg.norm(goal - start, axis=1),
    }  # fmt: skip


def _ends(rng: np.random.Generator, count: int, reach_m: float, way_m: float) -> tuple[Array, Array]:
    """Start and goal [M, 2] in a square, at least `way_m` apart."""
    start, goal = np.zeros((2, count, 2))
    left = np.arange(count)
    while len(left):
        start[left], goal[left] = rng.uniform(-reach_m, reach_m, (2, len(left), 2))
        left = left[np.linalg.norm(goal[left] - start[left], axis=1) < way_m]
    return start, goal


def _shapes(rng: np.random.Generator, count: int, half_m: float) -> tuple[Array, Array, Array, Array]:
    """Centres [M, 2], angles [M], half length and width [M, 2] and whether it is a circle [M]: half are, a quarter
    are boxes, a quarter thin walls.
    """  # noqa: D205
    kind, size = rng.uniform(size=count), rng.uniform(size=(count, 2))
    rounded, wall = kind < 0.5, kind > 0.75
    radius = 0.15 + 0.35 * size[:, :1]
    box, thin = 0.2 + 0.3 * size, np.stack((0.6 + 0.9 * size[:, 0], np.full(count, 0.05)), 1)
    box = np.sort(box, 1)[:, ::-1]
    half = np.where(rounded[:, None], radius, np.where(wall[:, None], thin, box))
    return rng.uniform(-half_m, half_m, (count, 2)), rng.uniform(-np.pi, np.pi, count), half, rounded


def _discs(centre: Array, angle: Array, half: Array, rounded: Array) -> Array:
    """Discs [M, DISCS, 3] that cover obstacles."""
    along = np.linspace(-1.0, 1.0, DISCS) * (half[:, :1] - half[:, 1:])
    axis = np.stack((np.cos(angle), np.sin(angle)), 1)[:, None]
    radius = np.where(rounded, half[:, 1], np.sqrt(2.0) * half[:, 1])[:, None, None]
    radius = np.broadcast_to(radius, (*along.shape, 1))
    return np.concatenate((centre[:, None] + along[..., None] * axis, radius), 2).astype(np.float32)


def _gap(first: Array, second: Array) -> Array:
    """Smallest distance between two sets of discs [M, D, 3], [M]."""
    x, y, r = (first[:, :, None, axis] - sign * second[:, None, :, axis] for axis, sign in ((0, 1), (1, 1), (2, -1)))
    return (np.sqrt(x * x + y * y) - r).min((1, 2))


def _sides(centre: Array, angle: Array, half: Array) -> Array:
    """The four sides [M, 4, 4] of boxes, both ends of each."""
    corners = half[:, None] * np.array([[1.0, 1.0], [-1.0, 1.0], [-1.0, -1.0], [1.0, -1.0]])
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    x, y = corners[..., 0], corners[..., 1]
    corners = centre[:, None] + np.stack((cos * x - sin * y, sin * x + cos * y), -1)
    return np.concatenate((corners, np.roll(corners, -1, axis=1)), -1)
