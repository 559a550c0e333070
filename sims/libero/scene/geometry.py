"""Collision geometry as points, for placement and the scripted expert."""

from __future__ import annotations

from collections.abc import Sequence

import mujoco
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sims.libero.scene.scene import Scene

Array = NDArray[np.float64]

DIRECTIONS: Array = np.stack([(np.cos(a), np.sin(a)) for a in np.arange(64) * (2 * np.pi / 64)])
"""Unit vectors [64, 2] in which footprints are measured; the opposite of direction k is direction k + 32."""

MOST_TICKS = 30


class Cloud:
    """Points that fill every collision geom at about `spacing` m, including faces and corners; planes have none.

    `points` [P, 3] are in the frame of their `body` [P]; `root` [P] is the topmost body above it, one per free object
    or fixture.
    """

    def __init__(self, model: mujoco.MjModel, spacing: float) -> None:
        geoms = np.flatnonzero((model.geom_contype | model.geom_conaffinity) != 0)
        clouds = [np.empty((0, 3)), *(_geom_points(model, geom, spacing) for geom in geoms)]
        self.points = np.concatenate(clouds)
        self.body = np.repeat(model.geom_bodyid[geoms], [len(cloud) for cloud in clouds[1:]])
        self.root = model.body_rootid[self.body]

    def world(self, data: mujoco.MjData, select: NDArray[np.bool_] | slice = slice(None)) -> Array:
        """Selected points [P', 3] in the world frame, at the kinematics in `data`."""
        body = self.body[select]
        return data.xpos[body] + np.einsum("pij,pj->pi", data.xmat[body].reshape(-1, 3, 3), self.points[select])


def _geom_points(model: mujoco.MjModel, geom: int, spacing: float) -> Array:
    """Points of one geom in the frame of its body."""
    kind = int(model.geom_type[geom])
    if kind == mujoco.mjtGeom.mjGEOM_PLANE:
        return np.empty((0, 3))
    if kind == mujoco.mjtGeom.mjGEOM_MESH:
        mesh = model.geom_dataid[geom]
        first = model.mesh_vertadr[mesh]
        local = model.mesh_vert[first : first + model.mesh_vertnum[mesh]].astype(np.float64)
    else:
        centre, half = np.split(model.geom_aabb[geom].astype(np.float64), 2)
        unit = np.stack(np.meshgrid(*(_ticks(size, spacing) for size in half), indexing="ij"), -1).reshape(-1, 3)
        local = centre + _rounded(unit, kind) * half
    return model.geom_pos[geom] + local @ rotation(model.geom_quat[geom]).T


def _ticks(half: float, spacing: float) -> Array:
    return np.linspace(-1.0, 1.0, min(MOST_TICKS, max(2, int(np.ceil(2 * half / spacing)) + 1)))


def _rounded(unit: Array, kind: int) -> Array:
    """Map the cube [-1, 1]^3 to a box (unchanged), a ball or an upright cylinder."""
    if kind == mujoco.mjtGeom.mjGEOM_BOX:
        return unit
    whole = kind in (mujoco.mjtGeom.mjGEOM_SPHERE, mujoco.mjtGeom.mjGEOM_ELLIPSOID)
    axes = slice(0, 3) if whole else slice(0, 2)
    length = np.linalg.norm(unit[:, axes], axis=1, keepdims=True)
    rounded = unit.copy()
    rounded[:, axes] *= np.abs(unit[:, axes]).max(1, keepdims=True) / np.maximum(length, 1e-12)
    return rounded


def rotation(quaternion: Array | Tensor) -> Array | Tensor:
    """Rotation matrices [..., 3, 3] of quaternions [..., 4], scalar first; a tensor for a tensor, else an array."""
    library = torch if isinstance(quaternion, Tensor) else np
    w, x, y, z = library.moveaxis(library.asarray(quaternion, dtype=library.float64), -1, 0)
    rows = [
        [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
        [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
        [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
    ]
    return library.stack([library.stack(row, -1) for row in rows], -2)


def planar(yaw: float) -> Array:
    """Rotation matrix [2, 2] by `yaw` rad."""
    return np.array([[np.cos(yaw), -np.sin(yaw)], [np.sin(yaw), np.cos(yaw)]])


def turned(quaternion: Array, yaw: float) -> Array:
    """`quaternion` [4] turned by `yaw` rad about the world's vertical axis."""
    product = np.empty(4)
    mujoco.mju_mulQuat(product, np.array([np.cos(yaw / 2), 0.0, 0.0, np.sin(yaw / 2)]), quaternion)
    return product


def hull(points: Array) -> Array:
    """The subset of `points` [P, 2 or 3] that determines the footprint at any yaw."""
    return points[np.unique((points[:, :2] @ DIRECTIONS.T).argmax(0))]


def footprint(points: Array) -> Array:
    """Support function [64] of the convex hull of `points` seen from above, along DIRECTIONS, in m."""
    return (points[:, :2] @ DIRECTIONS.T).max(0)


def gap(first: Array, second: Array) -> float:
    """Distance in m between two footprints, negative where they overlap (exact to 0.2 %)."""
    return float(np.max(-np.roll(second, 32) - first))


def points_gap(shape: Array, points: Array) -> float:
    """Distance in m from a footprint to the nearest of `points` [P, 2], negative where one is inside."""
    return float((points @ DIRECTIONS.T - shape).max(1).min(initial=np.inf))


class ArmKinematics:
    """Pose of the controlled point from joint angles in N environments on `device`, by the product of exponentials.

    MuJoCo's own poses are from before the last physics step; these poses are consistent with the joint angles.
    """

    def __init__(self, scenes: Sequence[Scene], device: torch.device | str = "cpu") -> None:
        at_zero = {scene: _at_zero(scene) for scene in dict.fromkeys(scenes)}
        fields = zip(*(at_zero[scene] for scene in scenes), strict=True)
        fields = (torch.from_numpy(np.stack(field)).to(device) for field in fields)
        self._anchor, axis, self._position, self._matrix = fields
        x, y, z = axis.unbind(-1)
        zero = torch.zeros_like(x)
        rows = [[zero, -z, y], [z, zero, -x], [-y, x, zero]]
        self._cross = torch.stack([torch.stack(row, -1) for row in rows], -2)  # [N, 7, 3, 3]
        self._cross_twice = self._cross @ self._cross
        self._eye = torch.eye(3, dtype=axis.dtype, device=device)

    def end_effector(self, joints: Tensor) -> tuple[Tensor, Tensor]:
        """Position [N, 3] in m and rotation matrix [N, 3, 3] in the world frame at `joints` [N, 7] rad."""
        angle = joints[..., None, None]
        turn = self._eye + angle.sin() * self._cross + (1.0 - angle.cos()) * self._cross_twice  # Rodrigues
        position = self._position[..., None]
        matrix = self._matrix
        # x <- a + R (x - a) and M <- R M, from the last joint to the first.
        for joint in reversed(range(turn.shape[1])):
            anchor = self._anchor[:, joint, :, None]
            position = anchor + turn[:, joint] @ (position - anchor)
            matrix = turn[:, joint] @ matrix
        return position[..., 0], matrix


def _at_zero(scene: Scene) -> tuple[Array, Array, Array, Array]:
    """Anchors and axes [7, 3] of the arm's joints, position [3] and matrix [3, 3] of its end, all joints at zero."""
    data = mujoco.MjData(scene.model)
    data.qpos[scene.arm_qposadr] = 0.0
    mujoco.mj_kinematics(scene.model, data)
    joints = scene.model.dof_jntid[scene.arm_dofadr]
    site = scene.grip_site
    return data.xanchor[joints], data.xaxis[joints], data.site_xpos[site], data.site_xmat[site].reshape(3, 3)
