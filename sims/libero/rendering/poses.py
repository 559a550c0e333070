"""Poses of everything visible (geoms, cameras, lights), and the lights' colours, for a state of one simulation."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import mujoco
import numpy as np
from numpy.typing import NDArray

from embodied.errors import UserError

VISUAL_GROUP = 1  # visual geoms; group 0 has the collision geoms
EXTENT = 10.0  # m, unit of MuJoCo's far plane. One value for all scenes: the ray tracer compiles it into its kernel
GEOM_TYPES = tuple(
    int(getattr(mujoco.mjtGeom, f"mjGEOM_{name}"))
    for name in ("PLANE", "SPHERE", "CAPSULE", "ELLIPSOID", "CYLINDER", "BOX", "MESH")
)
"""Geom types of all scenes, which the ray tracer and the rasteriser draw."""
CARRIED = ("cam_pos", "cam_quat", "light_pos")
"""Fields of a model, drawn by domain randomisation, on which poses depend."""
MOST_PIXELS = 2**31
"""Largest number of pixels of all worlds and cameras in one rendering, because they are counted in 32 bits."""
COLOURS = ("light_diffuse", "light_specular")
"""Fields of a model on which only colours depend."""


class Poses(NamedTuple):
    """Positions (m) and orientation matrices in the world frame, fields named as in MjData."""

    geom_xpos: NDArray[np.float64]  # [ngeom, 3]
    geom_xmat: NDArray[np.float64]  # [ngeom, 3, 3]
    cam_xpos: NDArray[np.float64]  # [ncam, 3]
    cam_xmat: NDArray[np.float64]  # [ncam, 3, 3]
    light_xpos: NDArray[np.float64]  # [nlight, 3]
    light_xdir: NDArray[np.float64]  # [nlight, 3]
    light_diffuse: NDArray[np.float64]  # [nlight, 3] red, green, blue, as in MjModel
    light_specular: NDArray[np.float64]  # the same


class Posing:
    """Computes `Poses` of the model with visuals, `visual`, from states of simulations of one scene.

    Simulations run on a model without visuals, each with its own placement of fixtures. Bodies, cameras and lights are
    the same in both, so the kinematics of the scene's model is used, and only the geoms are added.
    """

    def __init__(self, visual: mujoco.MjModel, model: mujoco.MjModel) -> None:
        if (visual.nbody, visual.nq, visual.ncam, visual.nlight) != (model.nbody, model.nq, model.ncam, model.nlight):
            raise ValueError("expected a model with the same bodies, joints, cameras and lights, plus visual geoms")
        self._nominal = model
        self._model = copy.copy(model)
        self._data = mujoco.MjData(model)
        self._body = visual.geom_bodyid.copy()
        self._position = visual.geom_pos.copy()
        self._rotation = np.zeros((visual.ngeom, 9))
        for quaternion, matrix in zip(visual.geom_quat, self._rotation, strict=True):
            mujoco.mju_quat2Mat(matrix, quaternion)
        self._rotation = self._rotation.reshape(-1, 3, 3)

    def __call__(
        self, placed: NDArray[np.float64], qpos: NDArray[np.float64], fields: Mapping[str, NDArray[np.float64]]
    ) -> Poses:
        """Poses at `qpos` [nq] with bodies attached at `placed` [nbody, 7] and the `fields` of a simulation."""
        data = self._data
        data.qpos[:] = qpos
        # Not with a simulation's own model: with sleep on, its kinematics skips bodies at rest.
        self._model.body_pos[:] = placed[:, :3]
        self._model.body_quat[:] = placed[:, 3:]
        for name in CARRIED:
            getattr(self._model, name)[:] = fields.get(name, getattr(self._nominal, name))
        mujoco.mj_kinematics(self._model, data)
        mujoco.mj_camlight(self._model, data)
        body = data.xmat.reshape(-1, 3, 3)[self._body]
        return Poses(
            geom_xpos=data.xpos[self._body] + (body @ self._position[..., None])[..., 0],
            geom_xmat=body @ self._rotation,
            cam_xpos=data.cam_xpos.copy(),
            cam_xmat=data.cam_xmat.reshape(-1, 3, 3).copy(),
            light_xpos=data.light_xpos.copy(),
            light_xdir=data.light_xdir.copy(),
            **{name: fields.get(name, getattr(self._nominal, name)) for name in COLOURS},
        )


def check_names(model: mujoco.MjModel, names: Sequence[str]) -> None:
    """Raise UserError for cameras `names` that `model` lacks."""
    available = [model.camera(i).name for i in range(model.ncam)]
    unknown = [name for name in names if name not in available]
    if unknown:
        raise UserError(f"unknown cameras: {', '.join(unknown)}; expected some of {', '.join(available)}")


def check_size(worlds: int, cameras: int, width: int, height: int) -> None:
    """Raise UserError for more pixels than mujoco_warp and the rasteriser count."""
    if worlds * cameras * width * height >= MOST_PIXELS:
        request = f"{worlds} worlds with {cameras} cameras of {width}x{height} pixels"
        raise UserError(f"{request} are more than are rendered at once; use a smaller task.image_size, or num_envs")
