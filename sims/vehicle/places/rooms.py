"""Random rooms: circles, boxes and thin walls between a start and a goal, with gaps wide enough to drive through.

Some rooms are divided by a wall with a door.
"""

from __future__ import annotations

import numpy as np

from sims.vehicle.geometry import FAR_M
from sims.vehicle.worlds import Array

SHAPES = 20
"""Largest number of obstacles."""
CLEAR = 2
FIXED = 6
"""Number of positions that obstacles keep clear (start, goal); number of sides of the room and parts of its wall."""
DISCS = 7
"""Number of discs along an obstacle's axis that cover it, for distances between obstacles."""
TRIES = 48


def rooms(
    rng: np.random.Generator,
    count: int,
    *,
    half_m: float,
    divided: float,
    obstacles: tuple[int, int],
    gap_m: float,
    distance_m: float,
) -> dict[str, Array]:
    """`count` square rooms, see `episode.Mdp.worlds`; the route is only the goal.

    Args:
        rng: random generator.
        count: number of rooms.
        half_m: half the width of the rooms.
        divided: share of rooms with a dividing wall.
        obstacles: smallest and largest number of obstacles; a room has fewer if no more fit.
        gap_m: smallest distance between two obstacles, and around start, goal and dividing wall.
        distance_m: smallest distance from start to goal.
    """
    wall, along_x = _partitions(rng, count, half_m, divided)
    aside = _across(wall[:, :1, :2], along_x)[:, 0]
    start, goal = _ends(rng, half_m - gap_m, distance_m, aside, along_x, gap_m)
    numbers = rng.integers(obstacles[0], obstacles[1] + 1, count)
    ends = np.stack((start, goal), 1)
    # start, goal and obstacles as discs
    occupied = np.full((count, CLEAR + SHAPES, DISCS, 3), -FAR_M, dtype=np.float32)
    occupied[:, :CLEAR, :, :2] = ends[:, :, None]
    occupied[..., 2] = 0.0
    circles = np.full((count, SHAPES, 3), FAR_M)
    segments = np.full((count, FIXED + 4 * SHAPES, 4), FAR_M)
    circles[..., 2], segments[:, :4] = 0.0, _sides(np.zeros((1, 2)), np.zeros(1), np.full((1, 2), half_m))
    segments[:, 4:FIXED] = wall
    counts = np.zeros(count, dtype=int)
    for _ in range(TRIES):
        centre, angle, half, rounded = _shapes(rng, count, half_m)
        discs = _discs(centre, angle, half, rounded)
        free = _gap(occupied[:, : CLEAR + counts.max()].reshape(count, -1, 3), discs) > gap_m
        free &= (np.abs(_across(discs[..., :2], along_x) - aside[:, None]) - discs[..., 2]).min(1) > gap_m
        rows = np.flatnonzero(free & (counts < numbers))
        slot = counts[rows]
        occupied[rows, CLEAR + slot] = discs[rows]
        is_round = rounded[rows]
        circles[rows[is_round], slot[is_round]] = discs[rows[is_round], 0]
        boxes = rows[~is_round]
        slots = slot[~is_round]
        for side, ends_of in enumerate(_sides(centre[boxes], angle[boxes], half[boxes]).swapaxes(0, 1)):
            segments[boxes, FIXED + 4 * slots + side] = ends_of
        counts[rows] += 1
    pose = np.concatenate((start, rng.uniform(-np.pi, np.pi, (count, 1))), 1)
    return {
        "circles": circles,
        "segments": segments,
        "pose": pose,
        "route": goal[:, None],
        "length_m": np.linalg.norm(goal - start, axis=1),
        "speed_m_s": np.zeros(count),
    }


def _partitions(rng: np.random.Generator, count: int, half_m: float, share: float) -> tuple[Array, Array]:
    """Both parts of dividing walls [M, 2, 4], one on each side of a door, and whether they lie along x [M].

    Unused walls are far away.
    """
    along_x = rng.uniform(size=count) < 0.5
    middle = rng.uniform(-0.7, 0.7, count) * half_m
    half = rng.uniform(0.6, 0.9, count)
    aside = rng.uniform(-0.3, 0.3, count) * half_m
    aside = np.where(rng.uniform(size=count) < share, aside, FAR_M)
    ends = np.stack((np.full(count, -half_m), middle - half, middle + half, np.full(count, half_m)), 1)
    across = np.broadcast_to(aside[:, None], ends.shape)
    points = np.where(along_x[:, None, None], np.stack((ends, across), -1), np.stack((across, ends), -1))
    return points.reshape(count, 2, 4), along_x


def _across(points: Array, along_x: Array) -> Array:
    """Coordinate [M, D] of `points` [M, D, 2] perpendicular to the dividing wall."""
    return np.where(along_x[:, None], points[..., 1], points[..., 0])


def _ends(
    rng: np.random.Generator, reach_m: float, distance_m: float, aside: Array, along_x: Array, gap_m: float
) -> tuple[Array, Array]:
    """Start and goal [M, 2] in a square, at least `distance_m` apart and `gap_m` from the dividing wall."""
    ends = np.zeros((len(aside), 2, 2))
    pending = np.arange(len(aside))
    while len(pending):
        ends[pending] = rng.uniform(-reach_m, reach_m, (len(pending), 2, 2))
        close = (np.abs(_across(ends[pending], along_x[pending]) - aside[pending, None]) < gap_m).any(1)
        pending = pending[close | (np.linalg.norm(ends[pending, 1] - ends[pending, 0], axis=1) < distance_m)]
    return ends[:, 0], ends[:, 1]


def _shapes(rng: np.random.Generator, count: int, half_m: float) -> tuple[Array, Array, Array, Array]:
    """Centres [M, 2], angles [M], half lengths and widths [M, 2] of random obstacles, and whether they are circles [M].

    Two in five are circles, two in five thin walls, and the others boxes.
    """
    kind = rng.uniform(size=count)
    size = rng.uniform(size=(count, 2))
    rounded = kind < 0.4
    wall = kind > 0.6
    radius = 0.15 + 0.35 * size[:, :1]
    box = 0.2 + 0.3 * size
    thin = np.stack((0.6 + 1.2 * size[:, 0], np.full(count, 0.05)), 1)
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
    cos = np.cos(angle)[:, None]
    sin = np.sin(angle)[:, None]
    x = corners[..., 0]
    y = corners[..., 1]
    corners = centre[:, None] + np.stack((cos * x - sin * y, sin * x + cos * y), -1)
    return np.concatenate((corners, np.roll(corners, -1, axis=1)), -1)
