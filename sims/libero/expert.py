"""A scripted expert that picks and places with privileged state, for demonstrations and as an upper bound.

It closes the loop at every control step: reach above the grasp and down a funnel, close, lift, carry above the target
and down another funnel, open. What is lost on the way is grasped again.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import mujoco
import numpy as np
from numpy.typing import NDArray

from sims.libero.geometry import Array, Cloud
from sims.libero.grasping import best_grasp
from sims.libero.predicates import Predicate, holds
from sims.libero.scene import Scene
from sims.libero.simulation import Simulation

SPACING_M = 0.006
CLOSING_STEPS = 9
OPENING_STEPS = 12
PLACES = ("in", "on_object", "on_site")


class Phase(IntEnum):
    """What an environment's arm is doing."""

    PLAN = 0
    REACH = 1
    CLOSE = 2
    CARRY = 3
    OPEN = 4


@dataclass
class _Plan:
    """Constants of one pick-and-place; heights are of the grip point, world frame, m."""

    grasp: Array  # [3] grip point, relative to the object
    yaw: float
    hover: float
    carry: float
    place: Array  # [3]: horizontal offset of the object from the target's origin, height of the grip point


class Expert:
    """Acts in all environments of `simulation`; call `reset` where an episode began.

    `noise` is the standard deviation of smooth noise on the actions (1 is full speed).

    Raises:
        ValueError: for a task whose goal is not to put objects somewhere.
    """

    def __init__(self, simulation: Simulation, *, noise: float = 0.0, seed: int = 0) -> None:
        for scene in dict.fromkeys(simulation.scenes):
            if any(predicate.kind not in PLACES for predicate in scene.goal):
                raise ValueError(
                    f"no scripted expert for {scene.task.name}: its goal is more than putting objects somewhere"
                )
        self.simulation, self.noise = simulation, noise
        self._planners = {scene: _Planner(scene) for scene in dict.fromkeys(simulation.scenes)}
        self._rng = np.random.default_rng(seed)
        n = simulation.num
        pairs = list(zip(simulation.data, simulation.scenes, strict=True))
        self._hand = [data.site_xpos[scene.grip_site] for data, scene in pairs]
        self._matrix = [data.site_xmat[scene.grip_site] for data, scene in pairs]
        self._object, self._target = list(self._hand), list(self._hand)
        self.phase, self._timer = np.zeros(n, dtype=int), np.zeros(n, dtype=int)
        self._grasp, self._place, self._yaw = np.zeros((n, 3)), np.zeros((n, 3)), np.zeros(n)
        self._planned, self._smooth = np.zeros((n, 3)), np.zeros((n, 6))
        self._hover, self._carry = np.zeros(n), np.zeros(n)

    def reset(self, ids: NDArray[np.int64] | None = None) -> None:
        """Forget the plans of environments `ids` (all if None)."""
        ids = np.arange(self.simulation.num) if ids is None else ids
        self.phase[ids], self._smooth[ids] = Phase.PLAN, 0.0

    def act(self, ids: NDArray[np.int64] | None = None) -> Array:
        """Actions [n, 7] for environments `ids` (all if None) in their present state."""
        ids = np.arange(self.simulation.num) if ids is None else np.asarray(ids)
        for env in ids[self.phase[ids] == Phase.PLAN]:
            self._plan(int(env))
        hand = np.stack([self._hand[env] for env in ids])
        matrix = np.stack([self._matrix[env] for env in ids]).reshape(-1, 3, 3)
        held = np.stack([self._object[env] for env in ids])
        target = np.stack([self._target[env] for env in ids])
        phase = self.phase[ids]

        turn = _rotation_error(matrix, self._yaw[ids])
        before = phase <= Phase.CLOSE
        goal = np.where(before[:, None], held + self._grasp[ids], hand + target + self._place[ids] - held)
        goal[~before, 2] = self._place[ids][~before, 2]
        top = np.where(before, self._hover[ids], self._carry[ids])
        away = np.linalg.norm(goal[:, :2] - hand[:, :2], axis=1)
        funnel = np.where(before, away + 0.06 * np.linalg.norm(turn, axis=1) - 0.005, away - 0.01)
        funnel[phase == Phase.CLOSE] = 0.0
        height = np.minimum(goal[:, 2] + 8.0 * np.maximum(funnel, 0.0), np.maximum(top, goal[:, 2]))
        self._advance(ids, hand, held, goal, away)
        opening = self.phase[ids] == Phase.OPEN
        error = np.column_stack((goal[:, :2], np.where(opening, hand[:, 2], height))) - hand
        # sideways only once high enough
        error[:, :2] *= np.clip(1.5 - np.maximum(error[:, 2], 0.0) / 0.04, 0.0, 1.0)[:, None]
        error[opening, :2] = 0.0
        sideways, upwards = 1.6 * error[:, :2] / 0.05, 1.6 * error[:, 2:] / 0.05
        motion = np.column_stack((_limited(sideways), _limited(upwards), _limited(1.2 * turn / 0.5)))
        grip = np.where((self.phase[ids] == Phase.CLOSE) | (self.phase[ids] == Phase.CARRY), 1.0, -1.0)
        return np.column_stack((np.clip(motion + self._noise(ids), -1.0, 1.0), grip))

    def _advance(self, ids: NDArray[np.int64], hand: Array, held: Array, goal: Array, away: Array) -> None:
        """Move to the next phase where the present one is done or has failed."""
        phase = self.phase[ids].copy()
        self._timer[ids] += 1
        timer = self._timer[ids]
        there = (away < 0.007) & (np.abs(goal[:, 2] - hand[:, 2]) < 0.007)
        stuck = (away < 0.015) & (timer > 60)
        lost = np.linalg.norm(hand - held - self._grasp[ids], axis=1) > 0.035
        after = phase.copy()
        moved = np.linalg.norm(held - self._planned[ids], axis=1) > 0.015
        after[(phase == Phase.REACH) & moved] = Phase.PLAN
        after[(phase == Phase.REACH) & ~moved & (there | stuck)] = Phase.CLOSE
        after[(phase == Phase.CLOSE) & (timer >= CLOSING_STEPS)] = Phase.CARRY
        released = (away < 0.012) & (goal[:, 2] > hand[:, 2] - 0.012)
        after[(phase == Phase.CARRY) & (released | (timer > 120))] = Phase.OPEN
        after[(phase == Phase.CARRY) & lost] = Phase.PLAN
        after[(phase == Phase.OPEN) & (timer >= OPENING_STEPS)] = Phase.PLAN
        self.phase[ids] = after
        self._timer[ids[after != phase]] = 0
        for env in ids[after == Phase.PLAN]:
            self._plan(int(env))

    def _plan(self, env: int) -> None:
        scene, data = self.simulation.scenes[env], self.simulation.data[env]
        planner = self._planners[scene]
        predicate = next((p for p in scene.goal if not holds(p, scene.geom_owner, data)), scene.goal[0])
        plan = planner.plan(data, predicate)
        self._object[env] = data.xpos[predicate.a]
        self._target[env] = (data.xpos if predicate.kind == "on_object" else data.site_xpos)[predicate.b]
        self._grasp[env], self._place[env], self._yaw[env] = plan.grasp, plan.place, plan.yaw
        self._planned[env] = data.xpos[predicate.a]
        self._hover[env], self._carry[env] = plan.hover, plan.carry
        self.phase[env], self._timer[env] = Phase.REACH, 0

    def _noise(self, ids: NDArray[np.int64]) -> Array:
        """Noise [n, 6] with a correlation time of some five steps, less on rotations."""
        fresh = self._rng.standard_normal((len(ids), 6)) * self.noise * [1, 1, 1, 0.3, 0.3, 0.3]
        self._smooth[ids] = 0.8 * self._smooth[ids] + 0.6 * fresh
        return self._smooth[ids]


class _Planner:
    """Plans for one scene, from the points of its collision geometry."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.cloud = Cloud(scene.model, SPACING_M)
        robot = scene.model.body_rootid[scene.hand_body]
        self.select = self.cloud.root != robot
        self.root = self.cloud.root[self.select]
        self.robot = int(robot)

    def plan(self, data: mujoco.MjData, predicate: Predicate) -> _Plan:
        """Plan how to make `predicate` true from the present state."""
        points = self.cloud.world(data, self.select)
        mine = self.root == predicate.a
        own, others = points[mine], points[~mine]
        on_object = predicate.kind == "on_object"
        target = (data.xpos if on_object else data.site_xpos)[predicate.b]
        start = data.xpos[predicate.a]
        base, hand = data.xpos[self.robot], data.site_xpos[self.scene.grip_site]
        preference = _wrist_middle(base, start, target)
        grasp = best_grasp(own, others, base, _axis_yaw(data.xmat[predicate.a].reshape(3, 3)), preference)
        below = grasp.position[2] - own[:, 2].min()
        container = points[self.root == self._root(predicate)]
        place = np.array([0.0, 0.0, self._place_height(data, predicate, container, below)])
        hover = max(grasp.position[2] + 0.05, _highest(others, hand, grasp.position) + 0.03)
        carry = max(place[2], _highest(others, grasp.position, target) + below + 0.02)
        return _Plan(grasp.position - start, grasp.yaw, hover, carry, place)

    def _root(self, predicate: Predicate) -> int:
        body = predicate.b if predicate.kind == "on_object" else self.scene.model.site_bodyid[predicate.b]
        return int(self.scene.model.body_rootid[body])

    def _place_height(self, data: mujoco.MjData, predicate: Predicate, container: Array, below: float) -> float:
        """Height of the grip point at which to open, when the object's bottom is `below` it."""
        if predicate.kind == "on_object":
            centre = data.xpos[predicate.b]
            top = container[np.linalg.norm(container[:, :2] - centre[:2], axis=1) < 0.03, 2].max(initial=centre[2])
            return top + below + 0.008
        site = data.site_xpos[predicate.b]
        half = np.abs(data.site_xmat[predicate.b].reshape(3, 3) @ predicate.size)[2]
        if predicate.kind == "on_site":
            return site[2] + half + below + 0.008
        rim = container[np.linalg.norm(container[:, :2] - site[:2], axis=1) < 0.12, 2].max(initial=site[2] - half)
        return max(rim - 0.02, site[2] - half + below + 0.01)


def _highest(points: Array, start: Array, end: Array, radius: float = 0.09) -> float:
    """Top of `points` within `radius` of the straight way between two places, seen from above."""
    way = end[:2] - start[:2]
    along = ((points[:, :2] - start[:2]) @ way / max(way @ way, 1e-9)).clip(0.0, 1.0)
    away = np.linalg.norm(points[:, :2] - start[:2] - along[:, None] * way, axis=1)
    return float(points[away < radius, 2].max(initial=-np.inf))


def _axis_yaw(matrix: Array) -> float:
    """Yaw of the horizontal one among a body's axes."""
    axis = matrix[:, np.argmin(np.abs(matrix[2]))]
    return float(np.arctan2(axis[1], axis[0]))


def _wrist_middle(base: Array, start: Array, target: Array) -> float:
    """Yaw of the closing direction at which the last joint stays clear of its limits from `start` to `target`.

    With the hand pointing down, joint 7 is at pi/4 + pi/2 + (direction from the base) - yaw; its range is +-2.9 rad.
    """
    directions = [np.arctan2(*(place - base)[1::-1]) for place in (start, target)]
    return float(np.pi / 2 + np.mean(directions) + 0.4)


def _rotation_error(matrix: Array, yaw: Array) -> Array:
    """Rotation vectors [n, 3] from hand orientations [n, 3, 3] to pointing down with the closing direction at `yaw`."""
    cosine, sine, zero = np.cos(yaw), np.sin(yaw), np.zeros_like(yaw)
    columns = ((cosine, sine, zero), (sine, -cosine, zero), (zero, zero, zero - 1.0))
    wanted = np.stack([np.stack(column, -1) for column in columns], -1)
    error = wanted @ matrix.transpose(0, 2, 1)
    vector = (
        np.stack(
            (error[:, 2, 1] - error[:, 1, 2], error[:, 0, 2] - error[:, 2, 0], error[:, 1, 0] - error[:, 0, 1]), -1
        )
        / 2
    )
    sine_angle = np.linalg.norm(vector, axis=1)
    angle = np.arctan2(sine_angle, (np.trace(error, axis1=1, axis2=2) - 1.0) / 2)
    return vector * (angle / np.maximum(sine_angle, 1e-9))[:, None]


def _limited(motion: Array) -> Array:
    """Shorten rows to the limits of the action, keeping their direction."""
    return motion / np.maximum(np.abs(motion).max(1, keepdims=True), 1.0)
