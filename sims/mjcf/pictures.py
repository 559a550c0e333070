"""Pictures of worlds, with shadows and soft edges, by MuJoCo's own renderer.

It needs OpenGL: EGL, which also works without a graphics card, or the library that the environment variable MUJOCO_GL
names.
"""

from __future__ import annotations

import mujoco
import numpy as np
from numpy.typing import NDArray

from embodied.errors import UserError
from embodied.evaluation.video import Frames, averaged
from sims.mjcf.environment import MjcfEnvironment
from sims.opengl import opengl

SIZE = 256
SCALE = 3
"""Pixels along an edge, each the average of SCALE by SCALE drawn pixels."""
ZENITH = (82, 107, 140)
HORIZON = (205, 217, 232)
"""Colours of a sky."""
DISTANCE = 4.0
"""Distance of a camera that follows a body, in reaches of the body."""


class Studio:
    """Films the worlds of `env` with the task's camera.

    A model without that camera, lights or a sky is filmed with a following camera, a sun, and a sky.

    Raises:
        UserError: if OpenGL does not work.
    """

    def __init__(self, env: MjcfEnvironment) -> None:
        if opengl() is None:
            raise UserError("films need OpenGL, which does not work here; install libegl1, or use video=false")
        self._env = env
        self._data = mujoco.MjData(env.model)
        model = env.model
        self._scene = mujoco.MjvScene(model, maxgeom=model.ngeom + 64)
        model.vis.global_.offwidth = model.vis.global_.offheight = SIZE * SCALE
        model.vis.quality.offsamples = 0
        model.vis.quality.shadowsize = 4096
        self._context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100)
        self._camera = camera(model, env.mdp.CAMERA)
        self._option = mujoco.MjvOption()
        self._option.sitegroup[:] = 0
        self._has_sky = bool((model.tex_type == mujoco.mjtTexture.mjTEXTURE_SKYBOX).any())

    def render(self, ids: NDArray[np.int64]) -> Frames:
        """Pictures [n, height, width, 3] of environments `ids` [n] as they are now."""
        # The buffer of another context may be bound.
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
        return np.stack([self._draw(row) for row in ids.tolist()])

    def _draw(self, row: int) -> Frames:
        model = self._env.model
        data = self._data
        for name, values in self._env.worlds.pose_fields(row).items():
            getattr(data, name)[:] = values
        mujoco.mj_kinematics(model, data)
        mujoco.mj_comPos(model, data)
        mujoco.mj_camlight(model, data)
        everything = mujoco.mjtCatBit.mjCAT_ALL
        edge = SIZE * SCALE
        mujoco.mjv_updateScene(model, data, self._option, mujoco.MjvPerturb(), self._camera, everything, self._scene)
        self._scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = True
        if not model.nlight:
            _add_sun(self._scene, data.subtree_com[0], float(model.stat.extent))
        picture = np.empty((edge, edge, 3), dtype=np.uint8)
        depth = np.empty((edge, edge), dtype=np.float32)
        whole = mujoco.MjrRect(0, 0, edge, edge)
        mujoco.mjr_render(whole, self._scene, self._context)
        mujoco.mjr_readPixels(picture, depth, whole, self._context)
        if not self._has_sky:
            background = depth == 1.0
            picture[background] = _sky(edge)[np.nonzero(background)[0]]
        return averaged(picture[::-1], SCALE)  # OpenGL's first row is the lowest


def camera(model: mujoco.MjModel, name: str) -> mujoco.MjvCamera:
    """The model's camera `name`; without it, a camera that shows the whole model and follows its first free body."""
    view = mujoco.MjvCamera()
    number = mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_CAMERA, name)
    if number >= 0:
        view.type = mujoco.mjtCamera.mjCAMERA_FIXED
        view.fixedcamid = number
        return view
    mujoco.mjv_defaultFreeCamera(model, view)
    view.elevation = -20.0
    free = np.flatnonzero(model.jnt_type == mujoco.mjtJoint.mjJNT_FREE)
    if len(free):
        view.type = mujoco.mjtCamera.mjCAMERA_TRACKING
        view.trackbodyid = model.jnt_bodyid[free[0]]
        view.distance = DISTANCE * _reach(model, view.trackbodyid)
    return view


def _reach(model: mujoco.MjModel, body: int) -> float:
    """Largest distance from `body` of the geoms in its kinematic tree, m."""
    data = mujoco.MjData(model)
    mujoco.mj_kinematics(model, data)
    geoms = model.body_rootid[model.geom_bodyid] == body
    return float(
        (np.linalg.norm(data.geom_xpos[geoms] - data.xpos[body], axis=1) + model.geom_rbound[geoms]).max(initial=0.1)
    )


def _add_sun(scene: mujoco.MjvScene, middle: NDArray[np.float64], extent: float) -> None:
    sun = scene.lights[scene.nlight]
    direction = np.array([0.35, 0.45, -1.0]) / np.linalg.norm([0.35, 0.45, -1.0])
    sun.type = mujoco.mjtLightType.mjLIGHT_DIRECTIONAL
    sun.castshadow = True
    sun.headlight = False
    sun.texid = -1
    sun.pos = middle - 2.0 * extent * direction
    sun.dir = direction
    sun.attenuation = (1.0, 0.0, 0.0)
    sun.ambient = (0.0,) * 3
    sun.diffuse = (0.6, 0.58, 0.56)
    sun.specular = (0.1,) * 3
    scene.nlight += 1


def _sky(height: int) -> NDArray[np.uint8]:
    """Colours [height, 3] of the rows of a sky, the lowest first."""
    return np.linspace(HORIZON, ZENITH, height).astype(np.uint8)
