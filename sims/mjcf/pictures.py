"""Pictures of worlds, with shadows and soft edges, by MuJoCo's own renderer.

It needs OpenGL: EGL, which also draws without a graphics card, or what the environment variable MUJOCO_GL names.
"""

from __future__ import annotations

import mujoco
import numpy as np
from numpy.typing import NDArray

from embodied.errors import UserError
from embodied.evaluation.video import Frames
from sims.mjcf.environment import MjcfEnvironment
from sims.opengl import opengl

SIZE = 256
"""Pixels along an edge."""


class Studio:
    """Films the worlds of `env` with the task's camera.

    Raises:
        UserError: where OpenGL does not work.
    """

    def __init__(self, env: MjcfEnvironment) -> None:
        if opengl() is None:
            raise UserError("films need OpenGL, which does not work here; install libegl1, or use video=false")
        self._env, self._data = env, mujoco.MjData(env.model)
        self._scene = mujoco.MjvScene(env.model, maxgeom=env.model.ngeom + 64)
        env.model.vis.global_.offwidth, env.model.vis.global_.offheight = SIZE, SIZE
        env.model.vis.quality.offsamples, env.model.vis.quality.shadowsize = 8, 4096
        self._context = mujoco.MjrContext(env.model, mujoco.mjtFontScale.mjFONTSCALE_100)
        self._camera, self._option = mujoco.MjvCamera(), mujoco.MjvOption()
        self._camera.type, self._camera.fixedcamid = (
            mujoco.mjtCamera.mjCAMERA_FIXED,
            env.model.camera(env.mdp.CAMERA).id,
        )
        self._option.sitegroup[:] = 0

    def render(self, ids: NDArray[np.int64]) -> Frames:
        """Pictures [n, height, width, 3] of environments `ids` [n] as they are now."""
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)  # another's may be bound
        return np.stack([self._draw(row) for row in ids.tolist()])

    def _draw(self, row: int) -> Frames:
        model, data = self._env.model, self._data
        for name, values in self._env.worlds.shown(row).items():
            getattr(data, name)[:] = values
        mujoco.mj_kinematics(model, data)
        mujoco.mj_comPos(model, data)
        mujoco.mj_camlight(model, data)
        everything, whole = mujoco.mjtCatBit.mjCAT_ALL, mujoco.MjrRect(0, 0, SIZE, SIZE)
        mujoco.mjv_updateScene(model, data, self._option, mujoco.MjvPerturb(), self._camera, everything, self._scene)
        self._scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = True
        picture = np.empty((SIZE, SIZE, 3), dtype=np.uint8)
        mujoco.mjr_render(whole, self._scene, self._context)
        mujoco.mjr_readPixels(picture, None, whole, self._context)
        return picture[::-1]  # OpenGL's first row is the lowest
