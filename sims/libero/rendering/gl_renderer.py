"""Images from MuJoCo's renderer, as in stock LIBERO; needs OpenGL (EGL, or the library named by MUJOCO_GL).

LIBERO's lights cast no shadows; in films, which are drawn larger and averaged, one of them does.
"""

from __future__ import annotations

from collections.abc import Sequence

import mujoco
import numpy as np
from numpy.typing import NDArray

from embodied.evaluation.video import averaged
from sims.libero.rendering.lights import cast_shadows
from sims.libero.rendering.poses import COLOURS, VISUAL_GROUP, Poses
from sims.opengl import make_current

FILM_SCALE = 3
SHADOW_SIZE = 2048
"""Factor of supersampling of films, along each edge; pixels along an edge of their shadow map."""


class GLRenderer:
    """Renders one scene; `model` is compiled with visuals."""

    threads = 1  # the context is current only in the thread that opened it

    def __init__(self, model: mujoco.MjModel, cameras: Sequence[str], width: int, height: int, film: bool) -> None:
        make_current()
        self._scale = FILM_SCALE if film else 1
        width = width * self._scale
        height = height * self._scale
        if film:
            cast_shadows(model)
            model.vis.quality.offsamples = 0
            model.vis.quality.shadowsize = SHADOW_SIZE
        # Texture bytes are used without colour conversion, as in the MuJoCo that recorded LIBERO's demonstrations.
        model.tex_colorspace[:] = mujoco.mjtColorSpace.mjCOLORSPACE_LINEAR
        model.vis.global_.offwidth = width
        model.vis.global_.offheight = height
        self._model = model
        self._data = mujoco.MjData(model)
        self._rectangle = mujoco.MjrRect(0, 0, width, height)
        self._renderer = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100)
        self._scene = mujoco.MjvScene(model, maxgeom=model.ngeom + 16)
        self._option = mujoco.MjvOption()
        self._option.geomgroup[:] = np.arange(mujoco.mjNGROUP) == VISUAL_GROUP
        self._option.sitegroup[:] = 0
        self._cameras = [_camera(model, name) for name in cameras]

    def draw(self, poses: Sequence[Poses]) -> NDArray[np.uint8]:
        """Images [n, cameras, height, width, 3] of n states of the scene."""
        make_current()
        # Another scene's buffer may be bound.
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._renderer)
        return np.stack([[self._draw(pose, camera) for camera in self._cameras] for pose in poses])

    def _draw(self, pose: Poses, camera: mujoco.MjvCamera) -> NDArray[np.uint8]:
        for field, values in pose._asdict().items():
            target = getattr(self._model if field in COLOURS else self._data, field)
            target[:] = values.reshape(target.shape)
        everything = mujoco.mjtCatBit.mjCAT_ALL
        mujoco.mjv_updateScene(
            self._model, self._data, self._option, mujoco.MjvPerturb(), camera, everything, self._scene
        )
        picture = np.empty((self._rectangle.height, self._rectangle.width, 3), dtype=np.uint8)
        mujoco.mjr_render(self._rectangle, self._scene, self._renderer)
        mujoco.mjr_readPixels(picture, None, self._rectangle, self._renderer)
        return averaged(picture[::-1], self._scale)  # OpenGL's first row is the lowest


def _camera(model: mujoco.MjModel, name: str) -> mujoco.MjvCamera:
    camera = mujoco.MjvCamera()
    camera.type, camera.fixedcamid = mujoco.mjtCamera.mjCAMERA_FIXED, model.camera(name).id
    return camera
