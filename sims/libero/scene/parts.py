"""Drawers, doors and knobs: parts of fixtures that move on a joint, and their poses."""

from __future__ import annotations

import mujoco
import numpy as np
import torch
from torch import Tensor

from sims.libero.scene.geometry import rotation
from sims.libero.scene.scene import Scene


class Parts:
    """The P moving parts of the fixtures of a scene; `names` are the names of their bodies.

    The position of a part is its centre of mass.
    """

    def __init__(self, scene: Scene, device: torch.device) -> None:
        model = scene.model
        data = mujoco.MjData(scene.model)
        data.qpos[:] = np.where(_is_address(model, scene.object_qposadr), model.qpos0, 0.0)
        mujoco.mj_kinematics(model, data)
        mujoco.mj_comPos(model, data)
        roots = [fixture.body for fixture in scene.fixtures]
        rows = [
            (roots.index(model.body_rootid[body]), joint, body)
            for joint, body in enumerate(model.jnt_bodyid)
            if model.body_rootid[body] in roots
        ]
        fixtures, joints, bodies = np.array(rows, dtype=np.int64).reshape(-1, 3).T
        matrix = data.xmat[np.array(roots, dtype=np.int64)].reshape(-1, 3, 3)[fixtures]
        position = data.xpos[np.array(roots, dtype=np.int64)][fixtures]

        def to_fixture(points: np.ndarray) -> Tensor:  # in the fixture's frame
            return torch.from_numpy(np.einsum("pji,pj->pi", matrix, points)).to(device)

        self.names = tuple(model.body(body).name for body in bodies)
        self._fixture = torch.from_numpy(fixtures).to(device)
        self._address = torch.from_numpy(model.jnt_qposadr[joints].astype(np.int64)).to(device)
        self._hinge = torch.from_numpy(model.jnt_type[joints] == mujoco.mjtJoint.mjJNT_HINGE).to(device)
        self._axis = to_fixture(data.xaxis[joints])
        self._anchor = to_fixture(data.xanchor[joints] - position)
        self._centre = to_fixture(data.xipos[bodies] - position)
        rotations = np.einsum("pji,pjk->pik", matrix, data.xmat[bodies].reshape(-1, 3, 3))
        self._matrix = torch.from_numpy(rotations).to(device)

    def where(self, fixtures: Tensor, qpos: Tensor) -> tuple[Tensor, Tensor]:
        """Positions [n, P, 3] and rotation matrices [n, P, 3, 3], from `fixtures` [n, F, 7] and `qpos` [n, nq]."""
        pose = fixtures[:, self._fixture]
        value = qpos[:, self._address]
        slide, angle = (torch.where(chosen, value, 0.0) for chosen in (~self._hinge, self._hinge))
        half = angle[..., None] / 2
        turn = rotation(torch.cat((half.cos(), half.sin() * self._axis), -1))
        # In the fixture's frame: a + R (c - a) for a hinge, c + q x for a slide; then the fixture's pose.
        local = self._anchor + torch.einsum("npij,pj->npi", turn, self._centre - self._anchor)
        local = local + slide[..., None] * self._axis
        matrix = rotation(pose[..., 3:])
        return pose[..., :3] + torch.einsum("npij,npj->npi", matrix, local), matrix @ turn @ self._matrix


def _is_address(model: mujoco.MjModel, free: np.ndarray) -> np.ndarray:
    """Whether elements of qpos [nq] belong to the free joints at the addresses `free` [M]."""
    mask = np.zeros(model.nq, dtype=bool)
    mask[(free[:, None] + np.arange(7)).ravel()] = True
    return mask
