"""Images from mujoco_warp's ray tracer: no graphics library needed on a CPU, many worlds at once.

Observations have one ray per pixel: no anti-aliasing and, as specified by LIBERO's lights, no shadows. Films have more
rays, and rays from the hit points towards the light that casts shadows; a separate kernel is compiled for them.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Sequence

import mujoco
import numpy as np
import warp
from numpy.typing import NDArray

warp.config.log_level = warp.LOG_ERROR  # before importing mujoco_warp, which would log every kernel it loads

import mujoco_warp  # noqa: E402

from sims.libero.rendering.lights import cast_shadows, dim  # noqa: E402
from sims.libero.rendering.poses import COLOURS, EXTENT, GEOM_TYPES, VISUAL_GROUP, Poses, check_size  # noqa: E402
from sims.libero.rendering.textures import textures  # noqa: E402

SAMPLES = 2  # rays of a pixel in films, along each axis
SHADED = 0.3  # share of the light that reaches shadowed surfaces, which stands for reflected light
WORLDS_AT_ONCE = 64  # on CUDA; a CPU renders them one after the other


class Traced:
    """One scene in mujoco_warp, for up to `worlds` states at once; `model` is compiled with visuals and not kept.

    `batched` fields of its model have a value for each state. `dimming` is the share of its lights that is shown, see
    `lights.dim`. All scenes share one compiled kernel.
    """

    def __init__(
        self,
        model: mujoco.MjModel,
        cameras: Sequence[str],
        width: int,
        height: int,
        *,
        film: bool,
        worlds: int,
        batched: Sequence[str],
    ) -> None:
        """Raise UserError for more pixels than mujoco_warp counts."""
        self.shape = (len(cameras), height, width)
        model.stat.extent = EXTENT
        self.dimming = dim(model)
        if film:
            cast_shadows(model)
        samples = SAMPLES if film else 1
        check_size(worlds, len(cameras), width, height)
        self.model = mujoco_warp.put_model(model, batch_sizes=dict.fromkeys(batched, worlds))
        self.data = mujoco_warp.make_data(model, nworld=worlds, nconmax=1, njmax=1)
        self._context = mujoco_warp.create_render_context(
            model,
            nworld=worlds,
            cam_res=(width, height),
            cam_active=list(cameras),
            render_rgb=True,
            render_depth=False,
            render_seg=False,
            render_skybox=True,
            use_textures=False,  # the library would use them in full size
            use_shadows=film,
            shadow_light_fraction=SHADED,
            samples_per_pixel=samples,
            enabled_geom_groups=[VISUAL_GROUP],
        )
        self._context.textures_registry = _textures(model, limit=samples * max(width, height))
        self._context.textures = warp.array(self._context.textures_registry, dtype=warp.Texture2D)
        self._context.flex_dim_np = np.array(model.flex_dim)  # a copy: the view would keep the whole model in memory
        _share_meshes(self._context, model)
        self._context.use_textures = True
        self._context.geom_ray_types = GEOM_TYPES

    def draw(self) -> warp.array:
        """Pixels [worlds, cameras * height * width], 0xAARRGGBB, of the first `data.nworld` states' poses."""
        mujoco_warp.refit_bvh(self.model, self.data, self._context)
        mujoco_warp.render(self.model, self.data, self._context)
        return self._context.rgb_data


class RayTracer:
    """Renders states of one scene whose poses come from the host; `model` is compiled with visuals and not kept."""

    def __init__(self, model: mujoco.MjModel, cameras: Sequence[str], width: int, height: int, film: bool) -> None:
        cuda = warp.get_device().is_cuda
        self._worlds = WORLDS_AT_ONCE if cuda else 1
        self.threads = 1 if cuda else len(os.sched_getaffinity(0))
        self._traced = Traced(model, cameras, width, height, film=film, worlds=self._worlds, batched=COLOURS)

    def draw(self, poses: Sequence[Poses]) -> NDArray[np.uint8]:
        """Pictures [n, cameras, height, width, 3] of n states of the scene."""
        batches = [poses[first : first + self._worlds] for first in range(0, len(poses), self._worlds)]
        return np.concatenate([self._draw(batch) for batch in batches])

    def _draw(self, poses: Sequence[Poses]) -> NDArray[np.uint8]:
        traced = self._traced
        for field in Poses._fields:
            values = np.stack([getattr(pose, field) for pose in poses])
            colour = field in COLOURS
            target = getattr(traced.model if colour else traced.data, field)
            target[: len(poses)].assign((values * traced.dimming if colour else values).astype(np.float32))
        traced.data.nworld = len(poses)
        packed = traced.draw().numpy()[: len(poses)]
        channels = packed.astype("<u4").view(np.uint8).reshape(len(poses), *traced.shape, 4)
        return channels[..., 2::-1]


_MESHES: weakref.WeakValueDictionary[tuple[str, bytes], warp.Mesh] = weakref.WeakValueDictionary()
"""Search trees (BVH) of the meshes in use, by device and content."""


def _share_meshes(context: mujoco_warp.RenderContext, model: mujoco.MjModel) -> None:
    """Share one search tree per mesh between all scenes: the robot's take 80 MB."""
    device = warp.get_device().alias
    meshes = enumerate(context.mesh_registry.values())
    shared = [_MESHES.setdefault((device, _digest(model, i)), mesh) for i, mesh in meshes]
    context.mesh_registry = {mesh.id: mesh for mesh in shared}
    context.mesh_bvh_id = warp.array([mesh.id for mesh in shared], dtype=warp.uint64)


def _digest(model: mujoco.MjModel, mesh: int) -> bytes:
    vertex = model.mesh_vertadr[mesh]
    face = model.mesh_faceadr[mesh]
    vertices = model.mesh_vert[vertex : vertex + model.mesh_vertnum[mesh]]
    faces = model.mesh_face[face : face + model.mesh_facenum[mesh]]
    return hashlib.sha256(vertices.tobytes() + faces.tobytes()).digest()


def _textures(model: mujoco.MjModel, limit: int) -> list[warp.Texture2D]:
    """The model's textures, none larger than `limit` pixels a side except the sky."""
    result = []
    for pixels in textures(model, limit):
        rgba = np.ones((*pixels.shape[:2], 4), dtype=np.float32)
        rgba[..., :3] = pixels
        result.append(warp.Texture2D(warp.array(rgba, dtype=float), filter_mode=warp.TextureFilterMode.LINEAR))
    return result
