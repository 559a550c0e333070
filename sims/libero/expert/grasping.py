"""Grasp planner of the scripted expert: grasps from above, on points of the collision geometry.

Candidates are the hand's own yaw and steps of 15 degrees from the object's axes. A slice of the object between the
fingertips consists of intervals along the closing direction: one for a can, two for a bowl's rim. An interval that fits
between the fingers is a grasp if neither fingers nor palm would touch anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
"""Largest depth of the fingertips below an object's top before it touches the palm, with 6 mm to spare."""
FLOOR_M = 0.0125
"""Lowest height of the grip point over the surface below the object: the fingertips reach 9 mm further down."""
STRETCHED_M = 0.64
"""Distance from the shoulder to the wrist of a hand that points down beyond which the arm is nearly straight."""
SHOULDER_M = np.array([0.0, 0.0, 0.333])
"""Position of the shoulder relative to the base."""
WRIST_UP_M = 0.21
WRIST_BACK_M = 0.088
LIFT_M = 0.10
"""Wrist relative to the grip point of a hand that points down: upwards and towards the base; height of a lift."""
STRETCH_COST = 8.0
"""Cost per m by which the arm is too straight, a posture that it can hardly leave."""
ABOUT_M = 0.004
"""Difference of costs up to which they count as equal."""
SHIFTS = np.array([0.0, 0.5, -0.5, 1.0, -1.0])
"""Offsets of the object between the open fingers when they close, as shares of the free space."""
MARGIN_M = 0.008
"""Preferred clearance of fingers and palm, m."""


@dataclass(frozen=True)
class Grasp:
    """Position [3] of the grip point and yaw of the closing direction, world frame, m and rad; low `cost` is good."""

    position: Array
    yaw: float
    cost: float


def best_grasp(
    own: Array, others: Array, shoulder: Array, axis_yaw: float, preference: float, depth: float = -np.inf
) -> Grasp:
    """The grasp of lowest cost: narrow, near the object's middle, within reach, deep, with clearance around the hand.

    Args:
        own: [P, 3] points of the object, world frame.
        others: [Q, 3] points of everything else but the robot, world frame.
        shoulder: position of the robot's shoulder, world frame, m.
        axis_yaw: yaw of one of the object's horizontal axes, rad.
        preference: the hand's yaw, within the wrist's range, rad; the result is within a quarter turn of it.
        depth: height above the grip point, m, that the part between the fingers has to reach.
    """
    middle = (own[:, :2].max(0) + own[:, :2].min(0)) / 2
    near = others[(np.abs(others[:, :2] - middle) < 0.22).all(1) & (others[:, 2] > own[:, 2].min())]
    candidates = []
    for yaw in (preference, *(axis_yaw + number * np.pi / YAWS for number in range(YAWS))):
        yaw -= np.pi * np.round((yaw - preference) / np.pi)
        turn = np.array([[np.cos(yaw), -np.sin(yaw)], [np.sin(yaw), np.cos(yaw)]])
        frames = (_framed(own, middle, turn), _framed(near, middle, turn))
        for height in _heights(own):
            for along, cost in _slots(*frames, height, depth):
                position = np.array([*(middle + turn[:, 0] * along), height])
                candidates.append(Grasp(position, yaw, cost + STRETCH_COST * _stretched(position - shoulder)))
    if not candidates:
        return Grasp(np.array([*middle, _heights(own)[0]]), axis_yaw, np.inf)
    # of nearly equal grasps the smallest rotation: it is a function of the observed hand pose, which helps imitation
    minimum = min(grasp.cost for grasp in candidates)
    good = [grasp for grasp in candidates if grasp.cost < minimum + ABOUT_M]
    return min(good, key=lambda grasp: (abs(grasp.yaw - preference), grasp.cost))


def _stretched(place: Array) -> float:
    """Distance, m, of the lifted wrist beyond comfortable reach, with the grip point at `place` from the shoulder."""
    across = float(np.linalg.norm(place[:2])) - WRIST_BACK_M
    return max(0.0, float(np.hypot(across, place[2] + WRIST_UP_M + LIFT_M)) - STRETCHED_M)


def free_yaw(others: Array, places: Sequence[Array], preference: float) -> float:
    """The yaw nearest to `preference`, rad, at which a hand at none of `places` [3] touches `others` [Q, 3]."""
    turns = np.pi / YAWS * np.arange(YAWS // 2 + 1)
    yaws = preference + np.stack((turns, -turns), 1).ravel()
    touching = [sum(_touching(others, place, yaw) for place in places) for yaw in yaws]
    return float(yaws[np.argmin(touching)])


def _touching(others: Array, place: Array, yaw: float) -> int:
    turn = np.array([[np.cos(yaw), -np.sin(yaw)], [np.sin(yaw), np.cos(yaw)]])
    return _touched(np.empty((0, 3)), _framed(others, place[:2], turn), 0.0, place[2], MARGIN_M)


def _framed(points: Array, middle: Array, turn: Array) -> Array:
    """Points along and across the closing direction, relative to the middle; heights unchanged."""
    return np.column_stack(((points[:, :2] - middle) @ turn, points[:, 2]))


def _heights(own: Array) -> tuple[float, ...]:
    bottom = own[:, 2].min()
    top = own[:, 2].max()
    return tuple(max(top - depth, bottom + FLOOR_M) for depth in (PALM_M, PALM_M / 2))


def _slots(own: Array, others: Array, height: float, depth: float) -> Iterator[tuple[float, float]]:
    """Grip points along one closing direction, each with its cost."""
    level = own[(own[:, 2] > height - 0.012) & (own[:, 2] < height + 0.006)]
    ordered = np.sort(level[np.abs(level[:, 1]) <= PAD_HALF_M, 0])
    if not len(ordered):
        return
    # an object grasped off-axis rotates in the hand: its whole width matters, not that of the slice
    common = 0.3 * np.ptp(level[:, 0]) + 0.3 * (height - own[:, 2].max())
    for run in np.split(ordered, 1 + np.flatnonzero(np.diff(ordered) > FINGER_GAP_M)):
        width = run[-1] - run[0]
        between_fingers = (np.abs(own[:, 1]) <= PAD_HALF_M) & (own[:, 0] >= run[0]) & (own[:, 0] <= run[-1])
        if width > OPENING_M or own[between_fingers, 2].max() < height + depth:
            continue
        free_space = max(0.0, (OPENING_M - width) / 2 - 0.004)
        for shift in SHIFTS * free_space:
            along = (run[0] + run[-1]) / 2 + shift
            touching, tight = (_touched(own, others, along, height, margin) for margin in (0.0, MARGIN_M))
            cost = width + abs(along) + abs(shift) + 0.1 * (tight > 0) + touching
            yield along, cost + common


def _touched(own: Array, others: Array, along: float, height: float, margin: float) -> int:
    """Points inside the open fingers or the palm, each grown by `margin`, when the grip point is at `along`.

    Points of `others` between the fingers count too, because they would be grasped as well.
    """
    level = (others[:, 2] > height - 0.0105) & (others[:, 2] < height + 0.01)
    count = int((level & (np.abs(others[:, 0] - along) < 0.0385) & (np.abs(others[:, 1]) < PAD_HALF_M)).sum())
    for points, grown in ((own, min(margin, 0.001)), (others, margin)):
        away = np.abs(points[:, 0] - along)
        across = np.abs(points[:, 1])
        above = points[:, 2] - height
        fingers = (away > 0.0385 - grown) & (away < 0.068 + grown) & (across < 0.0125 + grown) & (above > -0.0105)
        palm = (away < 0.106 + grown) & (across < 0.034 + grown) & (above > 0.030)
        count += int((palm | (fingers & (above < 0.05))).sum())
    return count
