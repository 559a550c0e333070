"""Pictures of a model's own cameras, as observations: by the rasteriser on the CPU, else by MuJoCo's renderer.

Both draw the geoms in the groups 0 to 2, which MuJoCo's own viewer shows, without sites and shadows.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Mapping, Sequence

import mujoco
import numpy as np
from numpy.typing import NDArray

from embodied.contract import TensorSpec
from embodied.errors import UserError
from sims.libero.rendering import rasteriser
from sims.libero.rendering.poses import COLOURS, GEOM_TYPES, VISUAL_GROUP, Poses, check_names
from sims.mjcf.viewing import GROUPS
from sims.opengl import opengl

log = logging.getLogger(__name__)
HIDDEN_GROUP = VISUAL_GROUP + 1
FIXED_LOOKS = ("geom_size", "geom_rgba", "geom_matid", "mat_", "tex_", "mesh_", "hfield_", "cam_fovy")
"""Beginnings of the names of model fields that a renderer reads once, so that they cannot differ between worlds."""


class Cameras:
    """The cameras `names` of `model`, with pictures of `size` pixels a side.

    Raises:
        UserError: for cameras that the model lacks, and models that cannot be drawn here.
    """

    def __init__(self, model: mujoco.MjModel, names: Sequence[str], size: int) -> None:
        check_names(model, names)
        if model.nflex or model.nskin:
            raise UserError(
                "pictures show rigid bodies only, and this model has flexes or skins; leave out task.images"
            )
        self._model = copy.copy(model)
        self._data = mujoco.MjData(model)
        visible = copy.copy(model)
        visible.geom_group[:] = np.where(np.isin(model.geom_group, GROUPS), VISUAL_GROUP, HIDDEN_GROUP)
        visible.light_castshadow[:] = False
        visible.vis.quality.offsamples = 0
        self._renderer = _renderer(visible)(visible, names, size, size, film=False)

    def draw(self, poses: Sequence[Poses]) -> NDArray[np.uint8]:
        """Pictures [n, cameras, size, size, 3] of n states, the first row is the top."""
        return self._renderer.draw(poses)

    def poses(self, state: Mapping[str, NDArray], fields: Mapping[str, NDArray]) -> Poses:
        """Poses of what is visible, from the `state` of a world (`Worlds.pose_fields`) and its own model's `fields`."""
        model = self._model
        data = self._data
        for name, values in state.items():
            getattr(data, name)[:] = values
        for name, values in fields.items():
            getattr(model, name)[:] = values
        mujoco.mj_kinematics(model, data)
        mujoco.mj_comPos(model, data)  # cameras may follow a centre of mass
        mujoco.mj_camlight(model, data)
        return Poses(
            geom_xpos=data.geom_xpos.copy(),
            geom_xmat=data.geom_xmat.reshape(-1, 3, 3).copy(),
            cam_xpos=data.cam_xpos.copy(),
            cam_xmat=data.cam_xmat.reshape(-1, 3, 3).copy(),
            light_xpos=data.light_xpos.copy(),
            light_xdir=data.light_xdir.copy(),
            **{name: getattr(model, name).copy() for name in COLOURS},
        )


def check_fields(names: Collection[str]) -> None:
    """Check that pictures can show model fields `names` that differ between worlds.

    Raises:
        UserError: for fields that renderers read once.
    """
    if fixed := [name for name in names if name.startswith(FIXED_LOOKS)]:
        raise UserError(f"pictures cannot show {', '.join(fixed)} of each world; leave out task.images, or vary others")


def picture_specs(model: mujoco.MjModel, names: Sequence[str], size: int) -> dict[str, TensorSpec]:
    """Specs of the pictures of cameras `names`, by observation, "NAME_image"."""
    check_names(model, names)
    bodies = {name: model.body(model.camera(name).bodyid[0]) for name in names}
    return {
        f"{name}_image": TensorSpec(
            (size, size, 3),
            "uint8",
            frame="world" if body.id == 0 else body.name,
            names=("red", "green", "blue"),
            camera=name,
        )
        for name, body in bodies.items()
    }


def _renderer(model: mujoco.MjModel) -> type:
    """Renderer that can draw `model` here.

    Raises:
        UserError: with what is missing, if there is none.
    """
    shown = (model.geom_group == VISUAL_GROUP) & (model.geom_rgba[:, 3] > 0.0)
    is_rigid = np.isin(model.geom_type[shown], GEOM_TYPES).all()
    is_opaque = (model.geom_rgba[shown, 3] == 1.0).all() and (model.mat_rgba[:, 3] == 1.0).all()
    if is_rigid and is_opaque and rasteriser.library() is not None:
        log.info("rendering with the rasteriser, on the CPU")
        return rasteriser.Rasteriser
    if (name := opengl()) is not None:
        from sims.libero.rendering.gl_renderer import GLRenderer

        log.info(f"rendering with MuJoCo's OpenGL renderer on {name}")
        return GLRenderer
    if is_rigid and is_opaque:
        raise UserError("pictures need a C compiler, or OpenGL; install gcc or libegl1")
    raise UserError("pictures of height fields and of transparent geoms need OpenGL; install libegl1")
