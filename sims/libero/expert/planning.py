"""Plans of the scripted expert: the grasp of a body, and the heights or the path on which it is moved.

Three skills differ only in their plans: a picked object is lifted and released over its target; an object that the hand
cannot grasp is dragged by closed fingers; a body on a joint is held and moved along that joint.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import mujoco
import numpy as np

from sims.libero.expert.grasping import SHOULDER_M, Grasp, best_grasp, free_yaw
from sims.libero.scene.geometry import Array, Cloud
from sims.libero.scene.predicates import Predicate, holds
from sims.libero.scene.scene import Scene

SPACING_M = 0.006
CORRIDOR_M = 0.09
"""Half width of the corridor for the hand and the object, m."""
WRIST_BIAS_RAD = 0.4
"""Offset of the last joint's nominal position from the middle of its used range, rad."""
WRIST_ROOM_RAD = 1.2
"""Offset from the middle, rad, up to which the last joint can still turn by a quarter."""
WRIST_LIMIT_RAD = 1.8
"""Offset from the middle, rad, beyond which the hand is turned by half a turn, which gives the same grasp."""
UP = np.array([0.0, 0.0, 1.0])
TILTS_RAD = np.radians([0.0, 45.0, 60.0, 75.0, 90.0])
"""Angles from the vertical from which handles are approached."""
NEAR_M = 0.44
KNOB_TILT_RAD = 0.4
"""Distance, m, from the base below which the hand cannot point straight down; tilt with which it then grasps knobs."""
LEANS_RAD = np.radians([15.0, 30.0])
"""Angles from the vertical for a leaning hand, where an upright hand would touch something."""
BEFORE_M = 0.08
"""Distance, m, from a handle at which the hand has its final orientation."""
BEYOND = 0.1
"""Motion of a joint beyond the goal's threshold, as a share of its range."""
LEAD_M = 0.06
LEAD_RAD = 0.4
"""Lead of the hand's target over the joint's position."""
PRESS_M = 0.015
"""Depth of the target of dragging fingers below the object's surface, so that they press on it."""
CEILING_M = 0.29
"""Height over the base, m, above which the hand cannot point down everywhere on its paths."""
DEPTH_M = 0.006
"""Height above the grip point that the object in a leaning hand has to reach: a lower rim slips out of the fingers."""
UNTOUCHED = 1.0
"""Cost below which a grasp touches nothing."""


@dataclass(frozen=True)
class Joint:
    """A joint to move from `start` to `end`, rad or m, and the pose of the hand at the start, [3] and [3, 3]."""

    index: int
    address: int
    start: float
    end: float
    position: Array
    matrix: Array

    def hand(self, data: mujoco.MjData, ahead: bool) -> tuple[Array, Array]:
        """Pose of the hand at the joint's present position, or `ahead` of it in the direction of the end."""
        value = float(data.qpos[self.address])
        hinge = data.model.jnt_type[self.index] == mujoco.mjtJoint.mjJNT_HINGE
        if ahead:
            lead = LEAD_RAD if hinge else LEAD_M
            value += float(np.clip(self.end - value, -lead, lead))
        axis = data.xaxis[self.index]
        anchor = data.xanchor[self.index]
        if not hinge:
            return self.position + (value - self.start) * axis, self.matrix
        turn = _about(axis, value - self.start)
        return anchor + turn @ (self.position - anchor), turn @ self.matrix

    def moved(self, data: mujoco.MjData) -> bool:
        """Whether the joint is near the end."""
        low, high = data.model.jnt_range[self.index]
        return abs(data.qpos[self.address] - self.end) < 0.5 * BEYOND * (high - low)


@dataclass(frozen=True)
class Plan:
    """Plan that makes one predicate true.

    `body` is held at `grasp` [3] m, relative to its origin, by a hand of orientation `matrix` [3, 3]. The hand comes
    from the direction of the unit vector `axis` [3], at the coordinate `hover` along it; it carries at `carry` and lets
    go at `release`, m, world frame. It is closed from the beginning if it drags the body. `joint` is the joint to move
    instead of carrying the body, if any.
    """

    body: int
    grasp: Array
    matrix: Array
    hover: float
    carry: float
    release: float
    target: Array
    axis: Array
    drag: bool = False
    joint: Joint | None = None


class Planner:
    """Plans for one scene, from the points of its collision geometry."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._robot = int(scene.model.body_rootid[scene.hand_body])
        self._cloud = Cloud(scene.model, SPACING_M)
        self._select = self._cloud.root != self._robot
        self._root, self._body = self._cloud.root[self._select], self._cloud.body[self._select]
        self._loose = np.isin(self._root, scene.object_body)

    def next(self, data: mujoco.MjData, goal: tuple[Predicate, ...]) -> Predicate:
        """Next part of the `goal`: openings first, then placements (lower objects of a stack first), then closings."""
        scene = self._scene
        waiting = [part for part in goal if not holds(part, scene.geom_owner, data)] or list(goal[:1])
        moving = {part.a for part in waiting if part.kind != "joint"}
        first = min(
            waiting,
            key=lambda part: (
                part.kind == "joint" and not part.any_joint,
                part.kind != "joint",
                part.kind == "on_object" and part.b in moving,
            ),
        )
        opening = scene.openings.get(first.b) if first.kind == "in" else None
        return first if opening is None or holds(opening, scene.geom_owner, data) else opening

    def plan(self, data: mujoco.MjData, predicate: Predicate) -> Plan:
        """A plan that makes `predicate` true from the state of `data`."""
        return self._move(data, predicate) if predicate.kind == "joint" else self._place(data, predicate)

    def _place(self, data: mujoco.MjData, predicate: Predicate) -> Plan:
        """Plan to pick an object and place it, or to drag it."""
        points = self._cloud.world(data, self._select)
        own = points[self._root == predicate.a]
        others = points[self._root != predicate.a]
        start = data.xpos[predicate.a]
        target = target_position(data, predicate)
        hand = data.site_xpos[self._scene.grip_site]
        base = data.xpos[self._robot]
        axis_yaw = _axis_yaw(data.xmat[predicate.a].reshape(3, 3))
        closing = _closing(data.site_xmat[self._scene.grip_site].reshape(3, 3), UP)
        middle = _wrist_middle(base, start, target)
        preference = _near(float(np.arctan2(closing[1], closing[0])), middle)
        axis = UP
        grasp = best_grasp(own, others, base + SHOULDER_M, axis_yaw, preference)
        # Above all movable objects, wherever they are: heights that depend on obstacles in the way are hard to learn.
        loose = float(points[self._loose & (self._root != predicate.a), 2].max(initial=-np.inf))
        drag = predicate.kind == "on_site" and predicate.owner_b < 0 and grasp.cost > UNTOUCHED
        if drag:
            inside = own[np.linalg.norm(own[:, :2] - start[:2], axis=1) < 0.02, 2].max() + 0.010
            places = [np.array([*place[:2], inside]) for place in (start, target)]
            grasp = Grasp(places[0], free_yaw(others, places, preference), 0.0)
        yaw = grasp.yaw - np.pi * np.round((grasp.yaw - middle) / (2 * WRIST_LIMIT_RAD))
        matrix = _pointing(UP, np.array([np.cos(yaw), np.sin(yaw), 0.0]))
        if grasp.cost > UNTOUCHED and not drag:
            grasp, axis, matrix = self._leaning(data, own, others, (grasp, axis, matrix))
        hover = max(grasp.position[2] + 0.05, loose + 0.03, _highest(others, hand, grasp.position) + 0.03)
        hover += float(grasp.position @ axis - grasp.position[2])  # as high over the grasp, along the axis
        below = grasp.position[2] - own[:, 2].min()
        release = grasp.position[2] - PRESS_M if drag else self._release(data, predicate, points, below)
        carry = max(
            release,
            min(loose + below + 0.035, base[2] + CEILING_M),
            _highest(others, grasp.position, target) + below + 0.035,
        )
        return Plan(
            predicate.a,
            grasp.position - start,
            matrix,
            hover,
            release if drag else carry,
            release,
            target,
            axis,
            drag=drag,
        )

    def _move(self, data: mujoco.MjData, predicate: Predicate) -> Plan:
        """Plan to hold a body on a joint, from above or from the front, and to move it along."""
        model = data.model
        address = predicate.addresses[0]
        index = int(np.flatnonzero(model.jnt_qposadr == address)[0])
        body = int(model.jnt_bodyid[index])
        points = self._cloud.world(data, self._select)
        own = points[self._body == body]
        others = points[self._body != body]
        hand = data.site_xmat[self._scene.grip_site].reshape(3, 3)
        candidates = [
            (grasp.cost, tilt, axis, grasp.position, matrix)
            for tilt, axis in _directions(data, index, own, data.xpos[self._robot])
            for grasp, matrix in (self._best_grasp(data, axis, own, others, hand),)
        ]
        *_, axis, position, matrix = min(candidates, key=lambda each: each[:2])
        low, high = model.jnt_range[index]
        end = float(np.clip(predicate.threshold + predicate.sign * BEYOND * (high - low), low, high))
        joint = Joint(index, address, float(data.qpos[address]), end, position, matrix)
        hover = float(position @ axis) + BEFORE_M
        return Plan(body, position - data.xpos[body], matrix, hover, -np.inf, hover, position, axis, joint=joint)

    def _leaning(
        self, data: mujoco.MjData, own: Array, others: Array, upright: tuple[Grasp, Array, Array]
    ) -> tuple[Grasp, Array, Array]:
        """Best grasp of a leaning hand, its axis and the hand's orientation; `upright` is the alternative."""
        hand = data.site_xmat[self._scene.grip_site].reshape(3, 3)
        candidates = [upright]
        for tilt in LEANS_RAD:
            for yaw in np.arange(8) * np.pi / 4:
                side = np.array([np.cos(yaw), np.sin(yaw), 0.0])
                axis = np.cos(tilt) * UP + np.sin(tilt) * side
                grasp, matrix = self._best_grasp(data, axis, own, others, hand)
                candidates.append((grasp, axis, matrix))
        return min(candidates, key=lambda each: each[0].cost)

    def _best_grasp(
        self, data: mujoco.MjData, axis: Array, own: Array, others: Array, hand: Array
    ) -> tuple[Grasp, Array]:
        """The best grasp from the direction `axis`, in the world frame, and the orientation [3, 3] of the hand."""
        side = np.cross(UP, axis) if axis[2] < 0.99 else np.array([0.0, -1.0, 0.0])
        frame = np.stack((side / np.linalg.norm(side), np.cross(axis, side / np.linalg.norm(side)), axis))
        closing = frame @ _closing(hand, axis)
        preference = float(np.arctan2(closing[1], closing[0]))
        shoulder = frame @ (data.xpos[self._robot] + SHOULDER_M)
        grasp = best_grasp(own @ frame.T, others @ frame.T, shoulder, 0.0, preference, DEPTH_M)
        fingers = frame.T @ np.array([np.cos(grasp.yaw), np.sin(grasp.yaw), 0.0])
        return Grasp(frame.T @ grasp.position, grasp.yaw, grasp.cost), _pointing(axis, fingers)

    def _release(self, data: mujoco.MjData, predicate: Predicate, points: Array, below: float) -> float:
        """Height of the grip point at which to open the hand, if the object's bottom is `below` it."""
        target = target_position(data, predicate)
        if predicate.kind == "on_object":
            container = points[self._root == predicate.b]
            away = np.linalg.norm(container[:, :2] - target[:2], axis=1)
            return float(container[away < 0.03, 2].max(initial=target[2])) + below + 0.008
        container = points[self._body == self._scene.model.site_bodyid[predicate.b]]
        away = np.linalg.norm(container[:, :2] - target[:2], axis=1)
        half = np.abs(data.site_xmat[predicate.b].reshape(3, 3) @ predicate.size)[2]
        if predicate.kind == "on_site":
            return target[2] + half + below + 0.008
        rim = float(container[away < 0.12, 2].max(initial=target[2] - half))
        return max(rim - 0.02, target[2] - half + below + 0.01)  # the palm is 3 cm above the grip point


def target_position(data: mujoco.MjData, predicate: Predicate) -> Array:
    """Target position [3] of the object, of another object or a region; a view into the simulation's state."""
    return (data.xpos if predicate.kind == "on_object" else data.site_xpos)[predicate.b]


def _directions(data: mujoco.MjData, index: int, own: Array, base: Array) -> Iterator[tuple[float, Array]]:
    """Tilts and unit vectors [3] from which to hold the points `own` [P, 3]: from above, and along the joint's path."""
    if data.model.jnt_type[index] == mujoco.mjtJoint.mjJNT_SLIDE:
        front = data.xaxis[index]
    else:
        front = np.cross(data.xaxis[index], own.mean(0) - data.xanchor[index])
    if np.linalg.norm(front) < 0.02:  # a knob; near the base the arm cannot point down, but away
        away = (data.xanchor[index] - base) * (1.0, 1.0, 0.0)
        distance = float(np.linalg.norm(away))
        tilt = KNOB_TILT_RAD if distance < NEAR_M else 0.0
        yield tilt, np.cos(tilt) * UP + np.sin(tilt) * away / distance
        return
    front = front / np.linalg.norm(front)
    for tilt in TILTS_RAD:
        yield tilt, np.cos(tilt) * UP + np.sin(tilt) * front
        if tilt > 0.0:
            yield tilt, np.cos(tilt) * UP - np.sin(tilt) * front


def _pointing(axis: Array, closing: Array) -> Array:
    """Orientation [3, 3] of a hand that points against `axis` and closes along `closing`."""
    return np.stack((closing, np.cross(closing, axis), -axis), 1)


def _closing(hand: Array, axis: Array) -> Array:
    """Closing direction [3] of a `hand` [3, 3] after the smallest rotation to point against `axis`."""
    way = np.cross(-hand[:, 2], axis)
    sine = float(np.linalg.norm(way))
    return _about(way / max(sine, 1e-9), float(np.arctan2(sine, -hand[:, 2] @ axis))) @ hand[:, 0]


def _about(axis: Array, angle: float) -> Array:
    """Rotation matrix [3, 3] about the unit vector `axis`."""
    quaternion = np.empty(4)
    matrix = np.empty(9)
    mujoco.mju_axisAngle2Quat(quaternion, axis, angle)
    mujoco.mju_quat2Mat(matrix, quaternion)
    return matrix.reshape(3, 3)


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
