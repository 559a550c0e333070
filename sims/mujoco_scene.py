"""Bodies of a MuJoCo model for the viewer, and pushes. V vertices, F faces, lengths in m."""

from __future__ import annotations

from collections.abc import Iterable

import mujoco
import numpy as np
from numpy.typing import ArrayLike, NDArray

from embodied.scene import shapes
from embodied.scene.shapes import Mesh
from embodied.scene.viewable import Body

Array = NDArray[np.floating]
PLANE, FIELD, SPHERE, CAPSULE, ELLIPSOID, CYLINDER, BOX, MESH = (
    int(getattr(mujoco.mjtGeom, f"mjGEOM_{name}"))
    for name in ("PLANE", "HFIELD", "SPHERE", "CAPSULE", "ELLIPSOID", "CYLINDER", "BOX", "MESH")
)
SMOOTH = 0.8
"""Cosine of the angle between a corner's and the face's normal below which the face's is used, as in MuJoCo."""
PLANE_M = 0.002
"""Half the thickness of a plane with ends."""
MOST_FACES = 20_000
"""Largest number of faces of a height field; with more, cells are joined."""


def visible(model: mujoco.MjModel, groups: Iterable[int]) -> list[int]:
    """Geoms in `groups` that are not wholly transparent; the viewer's floor stands for infinite planes."""
    kinds = (PLANE, FIELD, SPHERE, CAPSULE, ELLIPSOID, CYLINDER, BOX, MESH)
    is_visible = np.isin(model.geom_group, list(groups)) & np.isin(model.geom_type, kinds)
    is_visible &= np.array([_colour(model, i)[3] for i in range(model.ngeom)]) > 0.0
    endless = (model.geom_type == PLANE) & (model.geom_size[:, :2] == 0.0).any(1)
    return np.flatnonzero(is_visible & ~endless).tolist()


def bodies(model: mujoco.MjModel, geoms: Iterable[int]) -> dict[int, Body]:
    """Bodies that have `geoms`, by number, in the frames of the model's bodies."""
    parts: dict[int, list[Mesh]] = {}
    for geom in geoms:
        rotation = np.empty(9)
        mujoco.mju_quat2Mat(rotation, model.geom_quat[geom])
        mesh = _solid(model, geom).moved(model.geom_pos[geom], rotation.reshape(3, 3))
        parts.setdefault(int(model.geom_bodyid[geom]), []).append(mesh)
    return {body: Body(model.body(body).name or f"body {body}", shapes.joined(of)) for body, of in parts.items()}


def poses(data: mujoco.MjData, numbers: Iterable[int]) -> Array:
    """Poses [B, 7] of bodies in the world: position, quaternion (w, x, y, z)."""
    indices = list(numbers)
    return np.concatenate((data.xpos[indices], data.xquat[indices]), 1)


def movable(model: mujoco.MjModel, numbers: Iterable[int]) -> tuple[str, ...]:
    """Names of the bodies that a joint moves; free bodies come first."""
    moving = [body for body in numbers if model.body_weldid[body] != 0]
    free = set(model.jnt_bodyid[model.jnt_type == mujoco.mjtJoint.mjJNT_FREE].tolist())
    return tuple(model.body(body).name for body in sorted(moving, key=lambda body: body not in free))


def pushed(model: mujoco.MjModel, qpos: ArrayLike, body: str, change_m_s: ArrayLike) -> Array:
    """Change of qvel [nv] by an impulse at the centre of mass of `body`, of its mass times `change_m_s` [3]."""
    data = mujoco.MjData(model)
    number = model.body(body).id
    data.qpos[:] = qpos
    mujoco.mj_fwdPosition(model, data)
    jacobian = np.zeros((3, model.nv))
    change = np.zeros((1, model.nv))
    mujoco.mj_jacBodyCom(model, data, jacobian, None, number)
    impulse = model.body_mass[number] * np.asarray(change_m_s, dtype=float)
    # Change of velocities: M^-1 J' p for the impulse p = m dv at the centre of mass with Jacobian J.
    mujoco.mj_solveM(model, data, change, (impulse @ jacobian)[None])
    return change[0]


def _colour(model: mujoco.MjModel, geom: int) -> Array:
    """Red, green, blue and alpha, from 0 to 1; the middle colour of a texture."""
    material = model.geom_matid[geom]
    colour = model.geom_rgba[geom].astype(float)
    if material < 0:
        return colour
    if (colour == (0.5, 0.5, 0.5, 1.0)).all():  # MuJoCo's default: the material's colour counts
        colour = model.mat_rgba[material].astype(float)
    texture = model.mat_texid[material, mujoco.mjtTextureRole.mjTEXROLE_RGB]
    if texture >= 0:
        colour[:3] = colour[:3] * _pixels(model, texture).reshape(-1, 3).mean(0)
    return colour


def _pixels(model: mujoco.MjModel, texture: int) -> Array:
    """A texture [H, W, 3] from 0 to 1."""
    shape = model.tex_height[texture], model.tex_width[texture], model.tex_nchannel[texture]
    first = model.tex_adr[texture]
    pixels = model.tex_data[first : first + np.prod(shape)].reshape(shape)[..., :3] / np.float32(255.0)
    return np.broadcast_to(pixels, (*shape[:2], 3))


def _solid(model: mujoco.MjModel, geom: int) -> Mesh:
    """Mesh of a geom in its own frame."""
    kind = int(model.geom_type[geom])
    size = model.geom_size[geom]
    colour = _colour(model, geom)
    if kind == MESH:
        return _mesh(model, geom, colour)
    if kind == FIELD:
        return _ground(model, int(model.geom_dataid[geom])).coloured(colour)
    solids = {
        PLANE: lambda: shapes.box((size[0], size[1], PLANE_M)).moved((0.0, 0.0, -PLANE_M)),
        SPHERE: lambda: shapes.sphere(size[0]),
        CAPSULE: lambda: shapes.capsule(size[0], size[1]),
        ELLIPSOID: lambda: shapes.scaled(shapes.sphere(1.0), size),
        CYLINDER: lambda: shapes.cylinder(size[0], size[1]),
        BOX: lambda: shapes.box(size),
    }
    return solids[kind]().coloured(colour)


def _mesh(model: mujoco.MjModel, geom: int, colour: Array) -> Mesh:
    """Mesh of a mesh geom; with a texture, each vertex has its colour."""
    mesh = model.geom_dataid[geom]
    material = model.geom_matid[geom]
    rows = slice(model.mesh_faceadr[mesh], model.mesh_faceadr[mesh] + model.mesh_facenum[mesh])
    first = model.mesh_vertadr[mesh]
    corners = model.mesh_vert[first : first + model.mesh_vertnum[mesh]][model.mesh_face[rows]]  # [F, 3, 3]
    normals = model.mesh_normal[model.mesh_normaladr[mesh] + model.mesh_facenormal[rows]]
    flat = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0]).astype(float)
    flat /= np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), 1e-30)
    sharp = (normals * flat[:, None]).sum(-1, keepdims=True) < SMOOTH
    normals = np.where(sharp, flat[:, None], normals)
    colours = np.broadcast_to(colour, (*corners.shape[:2], 4)).copy()
    texture = model.mat_texid[material, mujoco.mjtTextureRole.mjTEXROLE_RGB] if material >= 0 else -1
    if texture >= 0 and model.mesh_texcoordadr[mesh] >= 0:
        indices = model.mesh_facetexcoord[rows]
        u, v = np.moveaxis(model.mesh_texcoord[model.mesh_texcoordadr[mesh] + np.maximum(indices, 0)], -1, 0)
        pixels = _pixels(model, texture)
        x, y = (((each % 1.0) * count).astype(int) for each, count in ((u, pixels.shape[1]), (v, pixels.shape[0])))
        tint = model.mat_rgba[material, :3] * pixels[np.minimum(y, pixels.shape[0] - 1), x % pixels.shape[1]]
        colours[..., :3] = np.where((indices >= 0)[..., None], tint, colours[..., :3])
    faces = np.arange(3 * len(corners)).reshape(-1, 3)
    return Mesh(corners.reshape(-1, 3), normals.reshape(-1, 3), colours.reshape(-1, 4), faces)


def _ground(model: mujoco.MjModel, field: int) -> Mesh:
    """Mesh of a height field."""
    rows = model.hfield_nrow[field]
    columns = model.hfield_ncol[field]
    first = model.hfield_adr[field]
    step = max(1, int(np.ceil(np.sqrt(2.0 * rows * columns / MOST_FACES))))
    x_m, y_m, z_m, _ = model.hfield_size[field]
    heights = model.hfield_data[first : first + rows * columns].reshape(rows, columns)[::step, ::step] * z_m
    x = np.linspace(-x_m, x_m, columns)[::step]
    y = np.linspace(-y_m, y_m, rows)[::step]
    vertices = np.stack((*np.broadcast_arrays(x, y[:, None]), heights), -1)
    slope_y, slope_x = np.gradient(heights, y, x)
    normals = np.stack((-slope_x, -slope_y, np.ones_like(heights)), -1)
    normals /= np.linalg.norm(normals, axis=-1, keepdims=True)
    row = np.arange(len(y) - 1)[:, None] * len(x) + np.arange(len(x) - 1)
    above = row + len(x)
    faces = np.stack((np.stack((row, row + 1, above + 1), -1), np.stack((row, above + 1, above), -1)), 2)
    return shapes.triangles(vertices.reshape(-1, 3), normals.reshape(-1, 3), faces.reshape(-1, 3))
