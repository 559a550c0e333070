"""Pictures of the ray tracer, drawn on a CPU many times faster: raster.c, compiled at first use, and its structs.

Same rays, light and textures as mujoco_warp's renderer without shadows; for observations, not for films.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import warnings
import weakref
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_float, c_int, c_void_p
from functools import cache
from pathlib import Path

import mujoco
import numpy as np
from numpy.typing import NDArray

from embodied.errors import UserError
from embodied.native import load
from sims.libero.rendering.lights import dim
from sims.libero.rendering.poses import COLOURS, EXTENT, GEOM_TYPES, VISUAL_GROUP, Poses, check_size
from sims.libero.rendering.textures import textures

FOLDER = Path(__file__).parent
FLAGS = ("-std=gnu11", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
"""Without contraction of a*b+c, triangles leave no gaps between them, and pictures are the same on every machine."""
SHININESS = 128.0  # the exponent of MuJoCo's shininess 1
NO_LIGHT_AMBIENT = 0.3  # mujoco_warp's, where a model has neither lights nor a headlight
SAME_NORMAL = 0.8  # cosine; a corner's normal further from the face's is not used, as in MuJoCo's renderer
OFF = -1  # type of an inactive light

_TEXTURE = [("pixels", "u8"), ("width", "i4"), ("height", "i4")]
GEOM = np.dtype(
    [
        *((name, "u8") for name in ("tree", "normals", "texcoords")),
        ("texture", np.dtype(_TEXTURE, align=True)),
        *((name, "i4") for name in ("type", "id")),
        *((name, "f4", 3) for name in ("size", "centre", "half", "colour")),
        ("repeat", "f4", 2),
        ("uniform", "i4"),
        *((name, "f4") for name in ("specular", "shininess", "emission")),
    ],
    align=True,
)
"""raster_types.h's Geom."""
LIGHT = np.dtype([("type", "i4"), ("attenuation", "f4", 3), ("cutoff", "f4"), ("exponent", "f4")], align=True)
"""raster_types.h's Light."""


class NativeScene(Structure):
    """raster_types.h's Scene."""

    _fields_ = (
        *((name, c_void_p) for name in ("geoms", "lights", "cameras", "focals", "sky_pixels")),
        *((name, c_int) for name in ("sky_width", "sky_height", "num_geoms", "num_lights", "num_cameras")),
        *((name, c_int) for name in ("width", "height", "pose_geoms", "pose_cameras")),
        ("far", c_float),
        *((name, c_float * 3) for name in ("ambient", "head_diffuse", "head_specular")),
    )


@cache
def library() -> ctypes.CDLL | None:
    """The compiled library; None, with one warning, if there is no compiler or it fails."""
    try:
        loaded = load((FOLDER / "raster.c").read_text(encoding="utf-8"), FLAGS, (FOLDER,))
    except UserError as error:
        warnings.warn(f"LIBERO's pictures are traced, several times slower: {error}", RuntimeWarning, stacklevel=2)
        return None
    if loaded is None:
        return None
    sizes = [loaded.raster_scene_bytes(), loaded.raster_geom_bytes(), loaded.raster_light_bytes()]
    assert sizes == [ctypes.sizeof(NativeScene), GEOM.itemsize, LIGHT.itemsize], (
        "the structs differ from raster_types.h"
    )
    loaded.raster_build_tree.restype = c_void_p
    loaded.raster_build_tree.argtypes = [c_void_p, c_void_p, c_int]
    loaded.raster_free_tree.restype = None
    loaded.raster_free_tree.argtypes = [c_void_p]
    loaded.raster_draw.restype = c_int
    loaded.raster_draw.argtypes = [POINTER(NativeScene), c_int, c_void_p, c_void_p]
    return loaded


class Rasteriser:
    """Renders states of one scene; `model` is compiled with visuals and not kept.

    Raises:
        UserError: for films, for too many pixels, and where the library can't be compiled.
    """

    def __init__(self, model: mujoco.MjModel, cameras: Sequence[str], width: int, height: int, film: bool) -> None:
        if film:
            raise UserError('backend="raster" has no shadows for films; use "rays" or "gl"')
        loaded = library()
        if loaded is None:
            raise UserError('backend="raster" needs a C compiler; install one, or use backend="rays"')
        check_size(1, len(cameras), width, height)
        self._library = loaded
        self.threads = len(os.sched_getaffinity(0))
        self._shape = (len(cameras), height, width, 3)
        self._dimming = dim(model)
        ids = np.array([model.camera(name).id for name in cameras], dtype=np.int32)
        focals = (height / 2 / np.tan(np.deg2rad(model.cam_fovy[ids]) / 2)).astype(np.float32)
        self._textures = [_shared_texture(pixels) for pixels in textures(model, max(width, height))]
        self._meshes: dict[int, _Mesh] = {}
        geoms = self._geoms(model)
        lights = _lights(model)
        self._keep = (ids, focals, geoms, lights)
        skies = np.flatnonzero(model.tex_type == mujoco.mjtTexture.mjTEXTURE_SKYBOX)
        sky = _texture(self._textures[skies[0]]) if len(skies) else (None, 0, 0)
        addresses = (array.ctypes.data for array in (geoms, lights, ids, focals))
        counts = (len(geoms), len(lights), len(ids), width, height, model.ngeom, model.ncam)
        self._scene = NativeScene(*addresses, *sky, *counts, model.vis.map.zfar * EXTENT, *_everywhere(model))

    def draw(self, poses: Sequence[Poses]) -> NDArray[np.uint8]:
        """Images [n, cameras, height, width, 3] of n states of the scene."""
        pictures = np.empty((len(poses), *self._shape), dtype=np.uint8)
        fields = []
        for name, values in zip(Poses._fields, map(np.stack, zip(*poses, strict=True)), strict=True):
            colour = name in COLOURS
            fields.append(np.ascontiguousarray(values * self._dimming if colour else values, "f4" if colour else "f8"))
        pointers = (c_void_p * len(fields))(*(field.ctypes.data for field in fields))
        if not self._library.raster_draw(ctypes.byref(self._scene), len(poses), pointers, pictures.ctypes.data):
            raise MemoryError("out of memory for pictures")
        return pictures

    def _geoms(self, model: mujoco.MjModel) -> NDArray[np.void]:
        """Visible geoms, as an array of `GEOM`."""
        visible = np.isin(model.geom_type, GEOM_TYPES) & (model.geom_group == VISUAL_GROUP)
        rows = [self._geom(model, i) for i in np.flatnonzero(visible).tolist()]
        geoms = np.array([row for row in rows if row is not None], dtype=GEOM)
        return geoms

    def _geom(self, model: mujoco.MjModel, geom: int) -> tuple | None:
        material = model.geom_matid[geom]
        rgba = model.geom_rgba[geom]
        if material >= 0 and (rgba == (0.5, 0.5, 0.5, 1.0)).all():  # MuJoCo's default: the material's colour counts
            rgba = model.mat_rgba[material]
        if rgba[3] == 0.0:
            return None
        texture = -1
        repeat = (1.0, 1.0)
        uniform = False
        specular = 0.5
        shininess = 0.5
        emission = 0.0
        if material >= 0:
            texture = model.mat_texid[material, mujoco.mjtTextureRole.mjTEXROLE_RGB]
            repeat = model.mat_texrepeat[material]
            uniform = model.mat_texuniform[material]
            specular = model.mat_specular[material]
            shininess = model.mat_shininess[material]
            emission = model.mat_emission[material]
        size = model.geom_size[geom]
        kind = model.geom_type[geom]
        pointers = (0, 0, 0)
        centre = (0.0, 0.0, 0.0)
        half = _half(kind, size)
        if kind == mujoco.mjtGeom.mjGEOM_MESH:
            mesh = self._mesh(model, model.geom_dataid[geom])
            pointers = mesh.pointers
            centre = mesh.centre
            half = mesh.half
        pixels = _texture(self._textures[texture]) if texture >= 0 else (0, 0, 0)
        surface = (rgba[:3], repeat, uniform, specular, shininess * SHININESS, emission)
        return (*pointers, pixels, kind, geom, size, centre, half, *surface)

    def _mesh(self, model: mujoco.MjModel, index: int) -> _Mesh:
        if index not in self._meshes:
            self._meshes[index] = _shared_mesh(self._library, model, index)
        return self._meshes[index]


class _Mesh:
    """Search tree of a mesh, and normals and texture coordinates of its faces' corners.

    Args:
        loaded: the library.
        vertices: [V, 3], m.
        faces: [F, 3] indices of vertices.
        normals: [F, 3, 3] normals of the corners.
        texcoords: [F, 3, 2] texture coordinates of the corners, NaN for faces without them; None if no face has them.
    """

    def __init__(
        self,
        loaded: ctypes.CDLL,
        vertices: NDArray[np.float32],
        faces: NDArray[np.int32],
        normals: NDArray[np.float32],
        texcoords: NDArray[np.float32] | None,
    ) -> None:
        low = vertices[faces].min((0, 1))
        high = vertices[faces].max((0, 1))
        self.centre = (high + low) / 2
        self.half = (high - low) / 2
        self._keep = (normals, texcoords)
        self._library = loaded
        self._tree = loaded.raster_build_tree(vertices.ctypes.data, faces.ctypes.data, len(faces))
        if not self._tree:
            raise MemoryError("out of memory for a mesh")
        self.pointers = (self._tree, normals.ctypes.data, 0 if texcoords is None else texcoords.ctypes.data)

    def __del__(self) -> None:
        if getattr(self, "_tree", None):
            self._library.raster_free_tree(self._tree)


_MESHES: weakref.WeakValueDictionary[bytes, _Mesh] = weakref.WeakValueDictionary()
_TEXTURES: weakref.WeakValueDictionary[bytes, NDArray[np.float32]] = weakref.WeakValueDictionary()
"""Meshes and textures in use, by content: scenes share the robot and the sky."""


def _shared_mesh(loaded: ctypes.CDLL, model: mujoco.MjModel, mesh: int) -> _Mesh:
    rows = slice(model.mesh_faceadr[mesh], model.mesh_faceadr[mesh] + model.mesh_facenum[mesh])
    first = model.mesh_vertadr[mesh]
    num = model.mesh_vertnum[mesh]
    vertices = model.mesh_vert[first : first + num].copy()
    faces = model.mesh_face[rows].copy()
    normals = model.mesh_normal[model.mesh_normaladr[mesh] + model.mesh_facenormal[rows]]
    texcoords = None
    start = model.mesh_texcoordadr[mesh]
    if start >= 0:
        indices = model.mesh_facetexcoord[rows]
        without_texcoords = (indices < 0).any(1)
        texcoords = model.mesh_texcoord[start + np.where(without_texcoords[:, None], 0, indices)]
        texcoords[without_texcoords] = np.nan
    parts = (vertices, faces, normals) if texcoords is None else (vertices, faces, normals, texcoords)
    key = hashlib.sha256(b"".join(part.tobytes() for part in parts)).digest()
    if (shared := _MESHES.get(key)) is not None:
        return shared
    corners = vertices[faces].astype(np.float64)
    face_normals = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
    face_normals /= np.maximum(np.linalg.norm(face_normals, axis=1, keepdims=True), 1e-30)
    too_different = (normals * face_normals[:, None]).sum(-1) < SAME_NORMAL
    normals = np.where(too_different[..., None], face_normals[:, None], normals).astype(np.float32)
    return _MESHES.setdefault(key, _Mesh(loaded, vertices, faces, normals, texcoords))


def _shared_texture(pixels: NDArray[np.float32]) -> NDArray[np.float32]:
    return _TEXTURES.setdefault(hashlib.sha256(repr(pixels.shape).encode() + pixels.tobytes()).digest(), pixels)


def _texture(pixels: NDArray[np.float32]) -> tuple[int, int, int]:
    return pixels.ctypes.data, pixels.shape[1], pixels.shape[0]


def _half(kind: int, size: NDArray[np.float64]) -> tuple[float, float, float]:
    """Half the sides (m) of a box around a geom that is not a mesh."""
    radius, length, _ = size
    if kind == mujoco.mjtGeom.mjGEOM_PLANE:  # 0: endless
        return (radius or 2 * 1000.0, length or 2 * 1000.0, 0.0)
    if kind == mujoco.mjtGeom.mjGEOM_SPHERE:
        return (radius, radius, radius)
    if kind == mujoco.mjtGeom.mjGEOM_CAPSULE:
        return (radius, radius, length + radius)
    return (radius, radius, length) if kind == mujoco.mjtGeom.mjGEOM_CYLINDER else tuple(size)


def _lights(model: mujoco.MjModel) -> NDArray[np.void]:
    lights = np.zeros(model.nlight, dtype=LIGHT)
    lights["type"] = np.where(model.light_active, model.light_type, OFF)
    lights["attenuation"] = model.light_attenuation
    lights["cutoff"] = np.cos(np.deg2rad(model.light_cutoff))
    lights["exponent"] = model.light_exponent
    return lights


def _everywhere(model: mujoco.MjModel) -> tuple[ctypes.Array[c_float], ...]:
    """Ambient light, and the headlight's diffuse and specular light."""
    head = model.vis.headlight
    nothing = np.zeros(3)
    ambient = model.light_ambient[model.light_active.astype(bool)].sum(0)
    ambient = ambient + (head.ambient if head.active else NO_LIGHT_AMBIENT * (model.nlight == 0))
    lit = (ambient, head.diffuse, head.specular) if head.active else (ambient, nothing, nothing)
    return tuple((c_float * 3)(*light) for light in lit)
