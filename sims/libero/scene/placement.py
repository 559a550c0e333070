"""Initial states: LIBERO's own and two distributions, fixed functions of (task, distribution, split, index).

All place the task's fixtures at random, as stock does at every reset, in the areas named by its description.
`official` are LIBERO's 50 stored states of a task; as in stock, objects do not follow the fixtures that they are on.
`areas` places every object in the area that the description names for it, as stock's reset does: a few centimetres, of
which the stored states use little.
`wide` is similar to LIBERO-Plus: every object of the workspace anywhere within reach of the arm, at any yaw, with
perturbed robot joints; arrangements without space for a gripper between objects are drawn again. Where a scene has two
objects of a kind, instructions distinguish them by their places ("the bowl next to the ramekin"), so that all objects
of the workspace are moved and turned together, and each only a little by itself.
"""

from __future__ import annotations

import copy
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import mujoco
import numpy as np

from embodied.environments.engine import STARTS_PER_SEED, check_starts
from embodied.errors import UserError
from sims.libero.scene.arena import workspace_of
from sims.libero.scene.bddl import Region
from sims.libero.scene.geometry import DIRECTIONS, Array, Cloud, footprint, gap, hull, planar, points_gap, turned
from sims.libero.scene.scene import Scene, satisfied
from sims.libero.suite import initial_states

DISTRIBUTIONS = ("official", "wide", "areas")
SPLITS = ("train", "eval")

REACH_X_M = (0.34, 0.74)
"""Range of distances in front of the robot's base for objects, m."""
REACH_Y_M = (-0.31, 0.31)
"""Range of distances to the sides of the base, m."""
REACH_RADIUS_M = (0.44, 0.74)
"""Range of distances from the base, m, in which the hand can point straight down; nearer is singular."""
CLEARANCE_M = 0.035
"""Space between objects, m: a finger and some tolerance."""
CONTAINER_YAW_RAD = 0.2
"""Largest deviation, rad, of a goal container's yaw from quarter turns: see `_Stack.container`."""
TOGETHER_M = 0.08
TOGETHER_RAD = 0.4
OWN_MOTION_M = 0.02
"""Largest common motion and rotation of objects that instructions distinguish by place; own motion of each."""
JOINT_NOISE_RAD = 0.1
"""Largest distance of each arm joint from its nominal position at the start, rad."""
RESET_NOISE_RAD = 0.02
"""Standard deviation of each arm joint after a reset of stock, rad."""

ARRANGEMENTS = 100
THROWS = 50
SPACING_M = 0.015
FIXTURES = 1
"""Purpose of the random numbers of fixtures, separate from those of objects."""


def check_names(distribution: str, split: str) -> None:
    """Raise UserError for an unknown distribution or split."""
    if distribution not in DISTRIBUTIONS:
        raise UserError(f"unknown distribution {distribution!r}; expected one of {', '.join(DISTRIBUTIONS)}")
    if split not in SPLITS:
        raise UserError(f"unknown split {split!r}; expected one of {', '.join(SPLITS)}")


class InitialState(NamedTuple):
    """`qpos` [nq], `qvel` [nv]; `body_pos` [nbody, 3] m and `body_quat` [nbody, 4] with the fixtures placed.

    `model_fields` are other fields of the model, by MuJoCo's name, that differ from the scene's.
    """

    qpos: Array
    qvel: Array
    body_pos: Array
    body_quat: Array
    model_fields: Mapping[str, Array] | None = None


class Placement:
    """Initial states of one scene by index.

    Official states are the same in both splits. A share `areas_share` of the training
    split of `wide` are of `areas`, evenly spread: at 0.2 every fifth of a seed's states, from its first one on.
    """

    def __init__(self, scene: Scene, distribution: str, split: str, areas_share: float = 0.0) -> None:
        check_names(distribution, split)
        self.scene = scene
        self.official = initial_states(scene.task)[:, 1:]
        self._nq = scene.model.nq
        if self.official.shape[1] != self._nq + scene.model.nv:
            raise AssertionError(f"{scene.task.name}: states of width {self.official.shape[1]} do not fit the scene")
        sampler = {"wide": _Wide, "areas": _Areas}.get(distribution)
        self._sampler = sampler(scene, self.official[0, : self._nq]) if sampler else None
        self._areas_share = areas_share if (distribution, split) == ("wide", "train") else 0.0
        self._areas = _Areas(scene, self.official[0, : self._nq]) if self._areas_share else None
        split_number = 0 if self._sampler is None else SPLITS.index(split)
        self._key = (zlib.crc32(f"{scene.task.suite}/{scene.task.name}".encode()), split_number)

    def __call__(self, index: int) -> InitialState:
        """Initial state number `index` >= 0.

        Raises:
            UserError: if there are fewer official states.
        """
        if self._sampler is None:
            check_starts(index, len(self.official))
        fixture_poses = place_fixtures(self.scene, np.random.default_rng((*self._key, index, FIXTURES)))
        if self._sampler is None:
            qpos, qvel = np.split(self.official[index].copy(), [self._nq])
            return InitialState(qpos, qvel, *fixture_poses)
        sampler = self._areas if self._areas is not None and self.in_areas(index) else self._sampler
        qpos = sampler.sample(np.random.default_rng((*self._key, index)), *fixture_poses)
        return InitialState(qpos, np.zeros(self.official.shape[1] - self._nq), *fixture_poses)

    def in_areas(self, index: int) -> bool:
        """Whether the initial state number `index` is of the share in areas."""
        number = index % STARTS_PER_SEED
        return math.ceil((number + 1) * self._areas_share) > math.ceil(number * self._areas_share)


def place_fixtures(scene: Scene, rng: np.random.Generator) -> tuple[Array, Array]:
    """Positions [nbody, 3] m and quaternions [nbody, 4] of all bodies with the fixtures placed as stock draws them."""
    position = scene.model.body_pos.copy()
    quaternion = scene.model.body_quat.copy()
    for fixture in scene.fixtures:
        x0, y0, x1, y1 = rng.choice(fixture.ranges)
        position[fixture.body] = rng.uniform(x0, x1), rng.uniform(y0, y1), fixture.height
        angle = rng.uniform(*fixture.yaw)
        quaternion[fixture.body] = np.cos(angle / 2), 0.0, 0.0, np.sin(angle / 2)
    return position, quaternion


@dataclass(frozen=True)
class _Stack:
    """An object on the workspace and the objects on it, which are placed together.

    `container` marks one with a region of the goal. LIBERO measures such regions along the world's axes; at 45 degrees
    to them the box has no width, so that nothing would count as inside.
    """

    qposadr: tuple[int, ...]
    points: Array  # [P, 2] outline seen from above at the nominal pose
    pivot: Array  # [2] nominal position of the object below
    container: bool
    areas: Array  # [R, 4] (x0, y0, x1, y1) in m, world frame, of the task's description
    yaw: tuple[float, float]  # range there, rad

    def draw_yaw(self, rng: np.random.Generator) -> float:
        """A random yaw relative to the nominal pose, rad."""
        if not self.container:
            return rng.uniform(-np.pi, np.pi)
        return rng.integers(4) * np.pi / 2 + rng.uniform(-CONTAINER_YAW_RAD, CONTAINER_YAW_RAD)


class _Wide:
    """Sampler of the wide distribution; `official` [nq] defines upright orientations and which objects are stacked."""

    def __init__(self, scene: Scene, official: Array) -> None:
        self.scene = scene
        self.model = copy.copy(scene.model)
        self.data = mujoco.MjData(self.model)
        self.cloud = Cloud(scene.model, SPACING_M)
        self.robot = int(scene.model.body_rootid[scene.hand_body])
        members = _stacks(scene)
        self.loads = _loads(scene)
        self.nominal = self._standing(official.copy(), members)
        self._kinematics(self.nominal)
        self.base = self.data.xpos[self.robot, :2].copy()
        self.anchor = members[0][0]
        self.edge, self.obstacles = self._workspace()
        self.stacks = sorted((self._stack(group) for group in members), key=lambda s: -np.ptp(s.points, axis=0).max())
        self.middle = np.mean([stack.pivot for stack in self.stacks], 0)
        kinds = list(scene.task.problem.objects.values())
        self.together = len(set(kinds)) < len(kinds)

    def sample(self, rng: np.random.Generator, body_pos: Array, body_quat: Array) -> Array:
        """One arrangement, qpos [nq], with the given fixture poses.

        The required space shrinks with every failed arrangement.
        """
        nominal = self._among(body_pos, body_quat)
        for number in range(ARRANGEMENTS):
            qpos = self._arrange(rng, nominal, CLEARANCE_M * 0.97**number)
            if qpos is not None and self._is_start(qpos):
                return qpos
        raise AssertionError(f"{self.scene.task.name}: no arrangement without overlap in {ARRANGEMENTS}")

    def _among(self, body_pos: Array, body_quat: Array) -> Array:
        """The nominal qpos [nq] with the given fixture poses; objects that begin on or in fixtures move with them."""
        nominal = self.nominal.copy()
        if not self.scene.fixtures:
            return nominal
        for fixture, members in self.loads.items():
            before = self.scene.model.body_pos[fixture, :2]
            after = body_pos[fixture, :2]
            yaw = _yaw(body_quat[fixture]) - _yaw(self.scene.model.body_quat[fixture])
            for address in members:
                _move(nominal[address : address + 7], before, yaw, after - before)
        self.model.body_pos[:] = body_pos
        self.model.body_quat[:] = body_quat
        self._kinematics(nominal)
        self.edge, self.obstacles = self._workspace()
        return nominal

    def _arrange(self, rng: np.random.Generator, nominal: Array, clearance: float) -> Array | None:
        qpos = nominal.copy()
        qpos[self.scene.arm_qposadr] = self.scene.initial_arm + rng.uniform(-JOINT_NOISE_RAD, JOINT_NOISE_RAD, 7)
        for joint in self.scene.initial_joints:
            qpos[joint.qposadr] = rng.uniform(joint.low, joint.high)
        placed: list[Array] = []
        target: Array | None = None
        if self.together:
            turn = planar(rng.uniform(-TOGETHER_RAD, TOGETHER_RAD))
            shift = rng.uniform(-TOGETHER_M, TOGETHER_M, 2)
        for stack in self.stacks:
            if self.together:
                target = turn @ (stack.pivot - self.middle) + self.middle + shift - self.base
            throw = self._throw(rng, stack, target, placed, clearance)
            if throw is None:
                return None
            yaw, shift, shape = throw
            placed.append(shape)
            for address in stack.qposadr:
                _move(qpos[address : address + 7], stack.pivot, yaw, shift)
        return qpos

    def _throw(
        self, rng: np.random.Generator, stack: _Stack, near: Array | None, placed: list[Array], clearance: float
    ) -> tuple[float, Array, Array] | None:
        """A free (yaw, shift [2], footprint [64]) for one stack, `near` a place [2] if any; None after too many draws.

        Places are relative to the base. An object that stock places out of reach may be as far away, but no farther.
        """
        excess = 0.0 if near is None else _out_of_reach(stack.pivot - self.base)
        for _ in range(THROWS):
            yaw = stack.draw_yaw(rng)
            if near is None:
                place = np.array([rng.uniform(*REACH_X_M), rng.uniform(*REACH_Y_M)])
            else:
                place = near + rng.uniform(-OWN_MOTION_M, OWN_MOTION_M, 2)
            if _out_of_reach(place) > excess:
                continue
            shape = footprint((stack.points - stack.pivot) @ planar(yaw).T + self.base + place)
            free = all(gap(shape, other) >= clearance for other in placed)
            if free and (shape <= self.edge).all() and points_gap(shape, self.obstacles) >= CLEARANCE_M:
                return yaw, self.base + place - stack.pivot, shape
        return None

    def _is_start(self, qpos: Array) -> bool:
        """Whether the robot touches nothing and the goal is not satisfied."""
        self._kinematics(qpos)
        roots = self.scene.model.body_rootid[self.scene.model.geom_bodyid[self.data.contact.geom]]
        return not (roots == self.robot).any() and not satisfied(self.scene, self.data)

    def _standing(self, qpos: Array, stacks: list[tuple[int, ...]]) -> Array:
        """Raise or lower every stack onto the surface below it (official stacks start inside the floor)."""
        self._kinematics(qpos)
        for members in stacks:
            body = int(self.scene.object_body[members[0]])
            bottom = self.cloud.world(self.data, self.cloud.root == body)[:, 2].min()
            for member in members:
                qpos[self.scene.object_qposadr[member] + 2] += self._support(body) - bottom + 5e-4
        return qpos

    def _stack(self, members: tuple[int, ...]) -> _Stack:
        bodies = self.scene.object_body[list(members)]
        points = hull(self.cloud.world(self.data, np.isin(self.cloud.root, bodies)))[:, :2]
        addresses = tuple(int(self.scene.object_qposadr[member]) for member in members)
        model = self.scene.model
        regions = [model.site_bodyid[goal.b] for goal in self.scene.goal if goal.kind in ("in", "on_site")]
        container = bool(np.isin(model.body_rootid[regions], bodies).any())
        name = self.scene.objects[members[0]]
        workspace = workspace_of(self.scene.task.problem)
        region = _regions(self.scene)[name]
        areas = np.array(region.ranges) + np.tile(workspace.origin[:2], 2)
        return _Stack(addresses, points, self.data.xpos[bodies[0], :2].copy(), container, areas, region.yaw)

    def _workspace(self) -> tuple[Array, Array]:
        """Support function [64] of the surface under the anchor object; points [P, 2] of fixed bodies above it."""
        fixed = ~np.isin(self.cloud.root, [self.robot, *self.scene.object_body])
        points = self.cloud.world(self.data, fixed)
        height = points[:, 2] - self._support(int(self.scene.object_body[self.anchor]))
        top = points[np.abs(height) < 0.01]
        edge = footprint(top) if len(top) else np.full(len(DIRECTIONS), np.inf)
        obstacles = points[(height > 0.01) & (height < 0.5), :2]
        return edge, np.unique(np.round(obstacles / SPACING_M), axis=0) * SPACING_M

    def _support(self, body: int) -> float:
        """Height, m, of the surface under a body, searched from 5 cm above its origin."""
        start = self.data.xpos[body] + (0.0, 0.0, 0.05)
        down = np.array([0.0, 0.0, -1.0])
        distance = mujoco.mj_ray(self.model, self.data, start, down, None, 1, body, np.zeros(1, np.int32))
        if distance < 0:
            raise AssertionError(f"{self.scene.task.name}: nothing under {self.scene.model.body(body).name}")
        return float(start[2] - distance)

    def _kinematics(self, qpos: Array) -> None:
        self.data.qpos[:] = qpos
        mujoco.mj_fwdPosition(self.model, self.data)


class _Areas(_Wide):
    """Sampler of the areas that the task's description names for its objects."""

    def _arrange(self, rng: np.random.Generator, nominal: Array, clearance: float) -> Array | None:
        """One arrangement, qpos [nq], if no two objects overlap; objects are turned as in LIBERO's first state."""
        qpos = nominal.copy()
        qpos[self.scene.arm_qposadr] = self.scene.initial_arm + rng.normal(0.0, RESET_NOISE_RAD, 7)
        for joint in self.scene.initial_joints:
            qpos[joint.qposadr] = rng.uniform(joint.low, joint.high)
        placed: list[Array] = []
        for stack in self.stacks:
            x0, y0, x1, y1 = rng.choice(stack.areas)
            place = np.array([rng.uniform(x0, x1), rng.uniform(y0, y1)])
            yaw = rng.uniform(*stack.yaw) - sum(stack.yaw) / 2
            shape = footprint((stack.points - stack.pivot) @ planar(yaw).T + place)
            if any(gap(shape, other) < 0.0 for other in placed):
                return None
            placed.append(shape)
            for address in stack.qposadr:
                _move(qpos[address : address + 7], stack.pivot, yaw, place - stack.pivot)
        return qpos


def _regions(scene: Scene) -> dict[str, Region]:
    """Region in which the task's description places each object on the workspace."""
    regions = scene.task.problem.regions
    below = {atom[1]: atom[2] for atom in scene.task.problem.init if len(atom) == 3 and atom[1] in scene.objects}
    return {name: regions[place] for name, place in below.items() if place in regions and regions[place].ranges}


def _stacks(scene: Scene) -> list[tuple[int, ...]]:
    """Indices of the objects on the workspace, each followed by the indices of the objects on it."""
    names = scene.objects
    below = {atom[1]: atom[2] for atom in scene.task.problem.init if len(atom) == 3 and atom[1] in names}
    riders = {name: [rider for rider, place in below.items() if place == name] for name in _regions(scene)}
    return [(names.index(name), *map(names.index, riders[name])) for name in riders]


def _loads(scene: Scene) -> dict[int, list[int]]:
    """Addresses in qpos of the objects that begin on or in a fixture, by the fixture's body."""
    regions = scene.task.problem.regions
    bodies = {fixture.name: fixture.body for fixture in scene.fixtures}
    loads: dict[int, list[int]] = {}
    for _, name, *place in scene.task.problem.init:
        if name in scene.objects and place[0] in regions and regions[place[0]].target in bodies:
            address = int(scene.object_qposadr[scene.objects.index(name)])
            loads.setdefault(bodies[regions[place[0]].target], []).append(address)
    return loads


def _out_of_reach(place: Array) -> float:
    """Distance, m, of `place` [2], relative to the base, outside the area that the hand reaches from above."""
    low, high = np.transpose((REACH_X_M, REACH_Y_M, REACH_RADIUS_M))
    values = np.array((*place, np.linalg.norm(place)))
    return float(np.maximum(low - values, values - high).max(initial=0.0))


def _move(pose: Array, pivot: Array, yaw: float, shift: Array) -> None:
    """Rotate a `pose` [7] in place about the vertical through `pivot` [2], and shift it."""
    pose[:2] = planar(yaw) @ (pose[:2] - pivot) + pivot + shift
    pose[3:] = turned(pose[3:], yaw)


def _yaw(quaternion: Array) -> float:
    """Angle, rad, of a rotation about the vertical."""
    return float(2.0 * np.arctan2(quaternion[3], quaternion[0]))
