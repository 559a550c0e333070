"""Random closed tracks between two walls."""

from __future__ import annotations

import numpy as np

from sims.vehicle.geometry import FAR_M
from sims.vehicle.worlds import Array

POINTS = 128
"""Number of points of the centre line, equally spaced."""
FINE = 256
SPEED_M_S = 4.0
"""Largest initial speed, m/s."""
WAVES = np.arange(2, 7)
"""Frequencies of the waves that deform the circle into a track."""
CLEARANCE_M = 0.5
"""Smallest distance between walls of neighbouring parts of a track, and from the inner wall to a curve's centre, m."""


def tracks(
    rng: np.random.Generator, count: int, *, radius_m: tuple[float, float], half_width_m: tuple[float, float]
) -> dict[str, Array]:
    """`count` tracks, see `episode.Mdp.worlds`: the circle's radius r at angle t is R (1 + sum_k a_k cos(k t + c_k)).

    The route is the centre line; vehicles begin at its first point, nearly in its direction. There are no circles.

    Args:
        rng: random generator.
        count: number of tracks.
        radius_m: range of R.
        half_width_m: range of half the width between the walls.
    """
    line = np.zeros((count, POINTS, 2))
    half_widths = np.zeros(count)
    pending = np.arange(count)
    while len(pending):
        half_widths[pending] = rng.uniform(*half_width_m, len(pending))
        line[pending] = _lines(rng, rng.uniform(*radius_m, len(pending)))
        pending = pending[~_passable(line[pending], half_widths[pending])]
    line = np.where(rng.uniform(size=(count, 1, 1)) < 0.5, line, line[:, ::-1])
    edge = np.roll(line, -1, 1) - line
    tangent = np.roll(line, -1, 1) - np.roll(line, 1, 1)
    tangent /= np.linalg.norm(tangent, axis=-1, keepdims=True)
    normal = np.stack((-tangent[..., 1], tangent[..., 0]), -1)
    walls = [line + side * half_widths[:, None, None] * normal for side in (-1.0, 1.0)]
    segments = np.concatenate([np.concatenate((wall, np.roll(wall, -1, 1)), -1) for wall in walls], 1)
    aside, heading_error = rng.uniform(-0.3, 0.3, (2, count))
    position = line[:, 0] + (aside * half_widths)[:, None] * normal[:, 0]
    heading = np.arctan2(tangent[:, 0, 1], tangent[:, 0, 0]) + heading_error
    return {
        "circles": np.full((count, 1, 3), FAR_M) * [1.0, 1.0, 0.0],
        "segments": segments,
        "pose": np.concatenate((position, heading[:, None]), 1),
        "route": line,
        "length_m": np.linalg.norm(edge, axis=-1).sum(1),
        "speed_m_s": rng.uniform(0.0, SPEED_M_S, count),
    }


def _lines(rng: np.random.Generator, radius_m: Array) -> Array:
    """Centre lines [M, POINTS, 2], counter-clockwise, from a random first point."""
    count = len(radius_m)
    turn = np.linspace(0.0, 2.0 * np.pi, FINE + 1)
    size = rng.uniform(0.0, 1.2, (count, len(WAVES), 1)) / WAVES[:, None] ** 1.5
    bend = size * np.cos(WAVES[:, None] * turn + rng.uniform(0.0, 2.0 * np.pi, (count, len(WAVES), 1)))
    radius = radius_m[:, None] * (1.0 + bend.sum(1))
    x = radius * np.cos(turn)
    y = radius * np.sin(turn)
    arc = np.concatenate((np.zeros((count, 1)), np.cumsum(np.hypot(np.diff(x), np.diff(y)), 1)), 1)
    lines = np.zeros((count, POINTS, 2))
    for row in range(count):
        positions = arc[row, -1] * np.arange(POINTS) / POINTS
        lines[row] = np.stack((np.interp(positions, arc[row], x[row]), np.interp(positions, arc[row], y[row])), -1)
        lines[row] = np.roll(lines[row], rng.integers(POINTS), axis=0)
    return lines


def _passable(line: Array, wide: Array) -> Array:
    """Whether curves are wide enough for their inner wall, and walls of different parts do not meet, [M] bool."""
    before = line - np.roll(line, 1, 1)
    after = np.roll(line, -1, 1) - line
    length = np.linalg.norm(after, axis=-1)
    turn = before[..., 0] * after[..., 1] - before[..., 1] * after[..., 0]
    # Radius of a curve: edge length over turning angle.
    angle = np.arctan2(np.abs(turn), (before * after).sum(-1))
    curves = (length / np.maximum(angle, 1e-6)).min(1) > wide + CLEARANCE_M
    rows = np.flatnonzero(curves)
    x, y = line[rows, ::2].astype(np.float32).transpose(2, 0, 1)
    distances = np.hypot(x[:, :, None] - x[:, None], y[:, :, None] - y[:, None])
    steps = np.abs(np.arange(0, POINTS, 2)[:, None] - np.arange(0, POINTS, 2))
    steps = np.minimum(steps, POINTS - steps)[None] * length[rows].mean(1)[:, None, None]
    needed = (2.0 * wide + CLEARANCE_M)[rows, None, None]
    curves[rows] = ((distances > needed) | (steps < 2.0 * needed)).all((1, 2))
    return curves
