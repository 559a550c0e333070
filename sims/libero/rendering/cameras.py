"""Camera images of many LIBERO simulations: by a rasteriser, a ray tracer, or MuJoCo's renderer on a graphics card."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Literal, Protocol

import mujoco
import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from embodied.errors import UserError
from sims.libero.physics.backend import Physics
from sims.libero.physics.host import HostSimulation
from sims.libero.rendering import rasteriser
from sims.libero.rendering.poses import Poses, Posing, check_names
from sims.libero.scene.scene import Scene, build_scene
from sims.opengl import graphics_card, opengl

if TYPE_CHECKING:
    from sims.libero.rendering.batched import BatchedCameras

log = logging.getLogger(__name__)

AGENT_VIEW = "agentview"
WRIST = "robot0_eye_in_hand"
Backend = Literal["raster", "rays", "gl"]


class Renderer(Protocol):
    """Renders states of scenes that look alike; `model` has visuals. `threads` renderers may run concurrently."""

    threads: int

    def __init__(self, model: mujoco.MjModel, cameras: Sequence[str], width: int, height: int, film: bool) -> None: ...

    def draw(self, poses: Sequence[Poses]) -> NDArray[np.uint8]:
        """Images [n, cameras, height, width, 3] of n states."""
        ...


class Cameras:
    """The cameras `names` of every simulation in `simulation`.

    The first row of an image is its top; stock LIBERO's observations are upside down, so a policy trained on stock's
    images needs ours flipped. With stand-ins, or if visual files are missing, images differ from the benchmark's.

    `backend` "rays" traces rays (mujoco_warp: on CUDA if available, else on the CPU, without any graphics library).
    "raster" draws the same pictures except for a few pixels along edges, on the CPU, several times faster, but no
    films. "gl" is MuJoCo's own renderer: the same shapes at the same pixels, but edges, fine textures and highlights
    differ. Train and evaluate a policy on the same one, where "raster" and "rays" count as one. `choose_backend` is the
    default.

    With `film` the images have shadows and soft edges, for people.

    Raises:
        UserError: for a camera that the scenes lack, or a backend that does not work here.
    """

    def __init__(
        self,
        simulation: Physics,
        names: Sequence[str] = (AGENT_VIEW, WRIST),
        width: int = 128,
        height: int = 128,
        *,
        backend: Backend | None = None,
        film: bool = False,
    ) -> None:
        self.names = tuple(names)
        self.width = width
        self.height = height
        self.backend = backend or choose_backend(film)
        self._simulation = simulation
        renderer = _renderer(self.backend)
        scenes = list(dict.fromkeys(simulation.scenes))
        self._group = np.array([scenes.index(scene) for scene in simulation.scenes])
        self._posing: dict[int, Posing] = {}
        self._renderers: list[Renderer] = []
        self._renderer = np.zeros(len(scenes), dtype=np.int64)  # of each scene
        for alike in _alike(scenes):
            visual = build_scene(scenes[alike[0]].task, scenes[alike[0]].assets, visuals=True).model
            check_names(visual, self.names)
            before = len(self._renderers)
            for number, index in enumerate(alike):
                self._posing[index] = Posing(visual, scenes[index].model)
                if number and number >= self._renderers[before].threads:  # no more can draw at once
                    self._renderer[index] = before + number % self._renderers[before].threads
                    continue
                self._renderer[index] = len(self._renderers)
                own = copy.copy(visual)  # renderers change their model
                self._renderers.append(renderer(own, self.names, width, height, film))
                self.render([simulation.scenes.index(scenes[index])])  # loads kernels, which is not thread-safe

    def render(self, ids: ArrayLike | None = None) -> NDArray[np.uint8]:
        """Images [n, cameras, height, width, 3] of the present states of simulations `ids` [n] (all if None)."""
        ids = np.arange(self._simulation.num) if ids is None else np.asarray(ids, dtype=np.int64)
        pictures = np.empty((len(ids), len(self.names), self.height, self.width, 3), dtype=np.uint8)
        groups = self._group[ids]
        renderers = self._renderer[groups]

        def draw(renderer: int) -> None:
            for group in np.unique(groups[renderers == renderer]).tolist():
                rows = np.flatnonzero(groups == group)
                pictures[rows] = self._renderers[renderer].draw(self._poses(group, ids[rows]))

        present = np.unique(renderers).tolist()
        if self._renderers[0].threads == 1 or len(present) == 1:
            list(map(draw, present))
        else:
            with ThreadPoolExecutor(self._renderers[0].threads) as pool:
                list(pool.map(draw, present))
        return pictures

    def pictures(self, ids: Tensor | None = None) -> Tensor:
        """Images of `render` as a tensor on the simulation's device."""
        rendered = self.render(None if ids is None else ids.cpu().numpy())
        return torch.from_numpy(rendered).to(self._simulation.torch_device)

    def _poses(self, group: int, ids: NDArray[np.int64]) -> list[Poses]:
        simulation = self._simulation
        placed = simulation.placed(ids, range(simulation.scenes[ids[0]].model.nbody))
        fields = simulation.varied_fields(ids)
        of_each = ({name: values[row] for name, values in fields.items()} for row in range(len(ids)))
        return [self._posing[group](*each) for each in zip(placed, simulation.qpos(ids), of_each, strict=True)]


def _alike(scenes: Sequence[Scene]) -> list[list[int]]:
    """Indices of scenes with one look each, in the order of their first ones."""
    looks: dict[object, list[int]] = {}
    for index, scene in enumerate(scenes):
        looks.setdefault(scene.look, []).append(index)
    return list(looks.values())


def cameras_of(simulation: Physics, names: Sequence[str], size: int) -> Cameras | BatchedCameras:
    """Cameras `names` of `size` pixels a side, which render on the device of the simulation."""
    if isinstance(simulation, HostSimulation):
        return Cameras(simulation, names, size, size)
    from sims.libero.rendering.batched import BatchedCameras

    return BatchedCameras(simulation, names, size, size)


def choose_backend(film: bool = False) -> Backend:
    """The fastest available back end: the ray tracer on CUDA, else OpenGL on a graphics card, else the rasteriser.

    Without a compiler for the rasteriser, and for films, the CPU traces rays. OpenGL draws a `film` if it works, which
    takes a third of the time even in software. Raises UserError if none works.
    """
    try:
        import warp

        from sims.libero.rendering import ray_tracer  # noqa: F401 (tests whether it can be imported)
    except ImportError as error:
        cuda = False
        reason = error
    else:
        cuda = warp.is_cuda_available()
        reason = None
    if cuda:
        return "rays"
    if graphics_card() or (film and opengl() is not None):
        return "gl"
    if not film and rasteriser.library() is not None:
        return "raster"
    if reason is None:
        return "rays"
    if opengl() is None:
        raise UserError(f"no renderer works here ({reason}); pip install 'embodied-rl[libero]'") from reason
    return "gl"


def _renderer(backend: Backend) -> type[Renderer]:
    if backend == "raster":
        log.info("rendering with the rasteriser, on the CPU")
        return rasteriser.Rasteriser
    if backend == "rays":
        import warp

        from sims.libero.rendering.ray_tracer import RayTracer

        where = warp.get_device().name
        log.info(f"rendering with mujoco_warp's ray tracer on {where}; compiled once per machine, about 10 s")
        return RayTracer
    if opengl() is None:
        raise UserError('backend="gl" needs OpenGL, but it does not work here; install EGL or use backend="rays"')
    from sims.libero.rendering.gl_renderer import GLRenderer

    log.info(f"rendering with MuJoCo's OpenGL renderer on {opengl()}")
    return GLRenderer
