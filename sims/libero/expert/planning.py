"""Plans of the scripted expert: the grasp, the carrying height and the release position."""

from __future__ import annotations

from dataclasses import dataclass

import mujoco
import numpy as np

from sims.libero.expert.grasping import best_grasp
from sims.libero.scene.geometry import Array, Cloud
from sims.libero.scene.predicates import Predicate
from sims.libero.scene.scene import Scene

SPACING_M = 0.006
CORRIDOR_M = 0.09
"""Half width of the corridor for the hand and the object, m."""
WRIST_BIAS_RAD = 0.4
"""Offset of the last joint's nominal position from the middle of its used range, rad."""
WRIST_ROOM_RAD = 1.2
"""Offset from the middle, rad, up to which the last joint can still turn by a quarter."""


@dataclass(frozen=True)
class Plan:
    """One pick and place; heights are of the grip point in the world frame, m.

    `grasp` [3] is the grip point relative to the object, `yaw` rad that of the closing direction. The hand approaches
    at the height `hover`, carries at `carry` and opens at `release`.
    """

    grasp: Array
    yaw: float
    hover: float
    carry: float
    release: float


class Planner:
    """Plans for one scene, from the points of its collision geometry."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._robot = int(scene.model.body_rootid[scene.hand_body])
        self._cloud = Cloud(scene.model, SPACING_M)
        self._select = self._cloud.root != self._robot
        self._root = self._cloud.root[self._select]
        self._loose = np.isin(self._root, scene.object_body)

    def plan(self, data: mujoco.MjData, predicate: Predicate) -> Plan:
        """A plan that makes the "in" or "on" `predicate` true from the state of `data`."""
        points = self._cloud.world(data, self._select)
        own, others = points[self._root == predicate.a], points[self._root != predicate.a]
        start, target = data.xpos[predicate.a], target_position(data, predicate)
        hand, base = data.site_xpos[self._scene.grip_site], data.xpos[self._robot]
        axis_yaw = _axis_yaw(data.xmat[predicate.a].reshape(3, 3))
        closing = data.site_xmat[self._scene.grip_site].reshape(3, 3)[:, 0]
        preference = _near(float(np.arctan2(closing[1], closing[0])), _wrist_middle(base, start, target))
        grasp = best_grasp(own, others, base, axis_yaw, preference)
        below = grasp.position[2] - own[:, 2].min()
        release = self._release(data, predicate, points, below)
        # Above all movable objects, wherever they are: heights that depend on obstacles in the way are hard to learn.
        loose = float(points[self._loose & (self._root != predicate.a), 2].max(initial=-np.inf))
        hover = max(grasp.position[2] + 0.05, loose + 0.03, _highest(others, hand, grasp.position) + 0.03)
        carry = max(release, loose + below + 0.02, _highest(others, grasp.position, target) + below + 0.02)
        return Plan(grasp.position - start, grasp.yaw, hover, carry, release)

    def _release(self, data: mujoco.MjData, predicate: Predicate, points: Array, below: float) -> float:
        """Height at which to open, if the object's bottom is `below` the grip point."""
        target = target_position(data, predicate)
        on_object = predicate.kind == "on_object"
        body = predicate.b if on_object else self._scene.model.site_bodyid[predicate.b]
        container = points[self._root == self._scene.model.body_rootid[body]]
        away = np.linalg.norm(container[:, :2] - target[:2], axis=1)
        if on_object:
            return float(container[away < 0.03, 2].max(initial=target[2])) + below + 0.008
        half = np.abs(data.site_xmat[predicate.b].reshape(3, 3) @ predicate.size)[2]
        if predicate.kind == "on_site":
            return target[2] + half + below + 0.008
        rim = float(container[away < 0.12, 2].max(initial=target[2] - half))
        return max(rim - 0.02, target[2] - half + below + 0.01)  # the palm is 3 cm above the grip point


def target_position(data: mujoco.MjData, predicate: Predicate) -> Array:
    """Target position [3] of the object, of another object or a region; a view into the simulation's state."""
    return (data.xpos if predicate.kind == "on_object" else data.site_xpos)[predicate.b]


def _highest(points: Array, start: Array, end: Array) -> float:
    """Maximum height of `points` in the horizontal corridor between two places."""
    way = end[:2] - start[:2]
    along = ((points[:, :2] - start[:2]) @ way / max(way @ way, 1e-9)).clip(0.0, 1.0)
    away = np.linalg.norm(points[:, :2] - start[:2] - along[:, None] * way, axis=1)
    return float(points[away < CORRIDOR_M, 2].max(initial=-np.inf))


def _axis_yaw(matrix: Array) -> float:
    """Yaw of the most horizontal of a body's axes."""
    axis = matrix[:, np.argmin(np.abs(matrix[2]))]
    return float(np.arctan2(axis[1], axis[0]))


def _wrist_middle(base: Array, start: Array, target: Array) -> float:
    """Yaw of the closing direction that keeps the last joint farthest from its limits from `start` to `target`.

    With the hand pointing down, that joint is at 3/4 pi + (direction from the base) - yaw; its range is +-2.9 rad.
    """
    directions = [np.arctan2(*(place - base)[1::-1]) for place in (start, target)]
    return float(np.pi / 2 + np.mean(directions) + WRIST_BIAS_RAD)


def _near(yaw: float, middle: float) -> float:
    """The equivalent of the closing direction `yaw` (modulo half a turn) nearest to `middle`."""
    away = yaw - middle
    away -= np.pi * np.round(away / np.pi)
    return middle + float(np.clip(away, -WRIST_ROOM_RAD, WRIST_ROOM_RAD))
