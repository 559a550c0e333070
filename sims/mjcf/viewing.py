"""View of MJCF tasks for the viewer: all visible geoms of the model; every body that moves can be pushed."""

from __future__ import annotations

from dataclasses import replace

import mujoco
import numpy as np
import torch

from embodied.scene.viewable import Array, Scene, View
from sims import mujoco_scene
from sims.mjcf.physics import Worlds

GROUPS = (0, 1, 2)
"""Groups of geoms that MuJoCo's own viewer shows."""
FLOOR_M = 0.003
"""Distance of the viewer's floor below the ground, which prevents flickering."""


class MjcfView(View):
    """View of worlds of one `model` from the task's `camera`."""

    def __init__(self, model: mujoco.MjModel, worlds: Worlds, camera: str) -> None:
        self._model = model
        self._worlds = worlds
        self._data = mujoco.MjData(model)
        bodies = mujoco_scene.bodies(model, mujoco_scene.visible(model, GROUPS))
        self._numbers = list(bodies)
        mujoco.mj_forward(model, self._data)
        target = model.stat.center.copy()
        eye = target + 1.5 * model.stat.extent * np.array([0.6, -0.8, 0.5])
        number = mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_CAMERA, camera)
        self._tracked = -1
        if number >= 0:
            if model.cam_mode[number] != mujoco.mjtCamLight.mjCAMLIGHT_FIXED:
                self._tracked = int(model.cam_bodyid[number])
                self._origin = self._data.xpos[self._tracked, :2].copy()
            eye = self._data.cam_xpos[number]
            ahead = -self._data.cam_xmat[number].reshape(3, 3)[:, 2]
            target = eye + max(0.1, float((target - eye) @ ahead)) * ahead
        reach_m = 1.5 * float(np.linalg.norm(eye - target))
        self._scene = Scene(
            tuple(bodies.values()),
            tuple(eye.tolist()),
            tuple(target.tolist()),
            -FLOOR_M,
            reach_m,
            mujoco_scene.movable(model, bodies),
        )

    def scene(self, row: int) -> Scene:
        """Scene of the model, the same for all worlds; a camera that tracks a body is at its present position."""
        if self._tracked < 0:
            return self._scene
        self.poses(row)
        x, y = self._data.xpos[self._tracked, :2] - self._origin
        eye, target = ((at[0] + x, at[1] + y, at[2]) for at in (self._scene.eye, self._scene.target))
        return replace(self._scene, eye=eye, target=target)

    def poses(self, row: int) -> Array:
        """Poses of the bodies of world `row`; see `View.poses`."""
        for name, values in self._worlds.pose_fields(row).items():
            getattr(self._data, name)[:] = values
        mujoco.mj_kinematics(self._model, self._data)
        return mujoco_scene.poses(self._data, self._numbers)

    def push(self, row: int, body: str, change_m_s: Array) -> None:
        """Change the velocity of a body of world `row`; see `View.push`."""
        change = mujoco_scene.pushed(self._model, self._worlds.pose_fields(row)["qpos"], body, change_m_s)
        velocity = self._worlds.fields["qvel"][row]
        velocity.add_(torch.as_tensor(change).to(velocity))
