"""Grasp planner of the scripted expert: grasps from above, on points of the collision geometry.

Candidates are the hand's own yaw and steps of 15 degrees from the object's axes. A slice of the object between the
fingertips consists of intervals along the closing direction: one for a can, two for a bowl's rim. An interval that fits
between the fingers is a grasp if neither fingers nor palm would touch anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sims.libero.scene.geometry import Array

YAWS = 12
OPENING_M = 0.076
"""Widest interval grasped, m, by fingers that open to 80 mm."""
FINGER_GAP_M = 0.018
"""Space, m, that a finger needs between two intervals."""
PAD_HALF_M = 0.009
PALM_M = 0.025
"""How deep below an object's top the fingertips can go before it touches the palm, with 6 mm to spare."""
FLOOR_M = 0.0125
"""Lowest height of the grip point over the surface below the object: the fingertips reach 9 mm further down."""
STRETCHED_M = 0.72
"""Horizontal distance from the base beyond which the arm is nearly straight."""
ABOUT_M = 0.004
"""Costs that differ by less count as equal."""
MARGIN_M = 0.008
"""Preferred clearance beside fingers and palm, m."""


@dataclass(frozen=True)
class Grasp:
    """Position [3] of the grip point and yaw of the closing direction, world frame, m and rad; low `cost` is good."""

    position: Array
    yaw: float
    cost: float


def best_grasp(own: Array, others: Array, base: Array, axis_yaw: float, preference: float) -> Grasp:
    """The grasp of lowest cost: narrow, near the object's middle, within reach, deep, with clearance around the hand.

    Args:
        own: [P, 3] points of the object, world frame.
        others: [Q, 3] points of everything else but the robot, world frame.
        base: position of the robot's base, world frame, m.
        axis_yaw: yaw of one of the object's horizontal axes, rad.
        preference: the hand's yaw, within the wrist's range, rad; the result is within a quarter turn of it.
    """
    middle = (own[:, :2].max(0) + own[:, :2].min(0)) / 2
    near = others[(np.abs(others[:, :2] - middle) < 0.22).all(1) & (others[:, 2] > own[:, 2].min())]
    candidates = []
    for yaw in (preference, *(axis_yaw + number * np.pi / YAWS for number in range(YAWS))):
        yaw -= np.pi * np.round((yaw - preference) / np.pi)
        turn = np.array([[np.cos(yaw), -np.sin(yaw)], [np.sin(yaw), np.cos(yaw)]])
        frames = (_framed(own, middle, turn), _framed(near, middle, turn))
        for height in _heights(own):
            for along, cost in _slots(*frames, height):
                position = np.array([*(middle + turn[:, 0] * along), height])
                stretched = max(0.0, float(np.linalg.norm(position[:2] - base[:2])) - STRETCHED_M)
                cost += 2.0 * stretched
                candidates.append(Grasp(position, yaw, cost))
    if not candidates:
        return Grasp(np.array([*middle, _heights(own)[0]]), axis_yaw, np.inf)
    # of nearly equal grasps the smallest rotation: it is a function of the observed hand pose, which helps imitation
    least = min(grasp.cost for grasp in candidates)
    good = [grasp for grasp in candidates if grasp.cost < least + ABOUT_M]
    return min(good, key=lambda grasp: (abs(grasp.yaw - preference), grasp.cost))


def _framed(points: Array, middle: Array, turn: Array) -> Array:
    """Points along and across the closing direction, relative to the middle; heights unchanged."""
    return np.column_stack(((points[:, :2] - middle) @ turn, points[:, 2]))


def _heights(own: Array) -> tuple[float, ...]:
    bottom, top = own[:, 2].min(), own[:, 2].max()
    return tuple(max(top - depth, bottom + FLOOR_M) for depth in (PALM_M, PALM_M / 2))


def _slots(own: Array, others: Array, height: float) -> Iterator[tuple[float, float]]:
    """Grip points along one closing direction, each with its cost."""
    level = own[(own[:, 2] > height - 0.012) & (own[:, 2] < height + 0.006)]
    ordered = np.sort(level[np.abs(level[:, 1]) <= PAD_HALF_M, 0])
    if not len(ordered):
        return
    # an object grasped off-axis rotates in the hand: its whole width matters, not that of the slice
    common = 0.3 * np.ptp(level[:, 0]) + 0.3 * (height - own[:, 2].max())
    for run in np.split(ordered, 1 + np.flatnonzero(np.diff(ordered) > FINGER_GAP_M)):
        width = run[-1] - run[0]
        if width > OPENING_M:
            continue
        room = max(0.0, (OPENING_M - width) / 2 - 0.004)
        for shift in (0.0, room, -room):
            along = (run[0] + run[-1]) / 2 + shift
            touching, tight = (_touched(own, others, along, height, margin) for margin in (0.0, MARGIN_M))
            cost = width + abs(along) + abs(shift) + 0.1 * (tight > 0) + touching
            yield along, cost + common


def _touched(own: Array, others: Array, along: float, height: float, margin: float) -> int:
    """Points inside the open fingers or the palm, each grown by `margin`, when the grip point is at `along`.

    Of `others` also those between the fingers, which would be grasped as well.
    """
    level = (others[:, 2] > height - 0.0105) & (others[:, 2] < height + 0.01)
    count = int((level & (np.abs(others[:, 0] - along) < 0.0385) & (np.abs(others[:, 1]) < PAD_HALF_M)).sum())
    for points, grown in ((own, min(margin, 0.001)), (others, margin)):
        away, across, above = np.abs(points[:, 0] - along), np.abs(points[:, 1]), points[:, 2] - height
        fingers = (away > 0.0385 - grown) & (away < 0.068 + grown) & (across < 0.0125 + grown) & (above > -0.0105)
        palm = (away < 0.106 + grown) & (across < 0.034 + grown) & (above > 0.030)
        count += int((palm | (fingers & (above < 0.05))).sum())
    return count
