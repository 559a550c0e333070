"""Camera images of mujoco_warp's worlds, traced on the device of the simulation, without transfers to the host.

Letters in shape comments: M selected worlds, C cameras.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import warp
from torch import Tensor

from sims.libero.physics.warp_simulation import PLACES, WarpSimulation, Worlds
from sims.libero.rendering.poses import CARRIED, COLOURS, check_names
from sims.libero.rendering.ray_tracer import Traced
from sims.libero.scene.scene import build_scene
from sims.warp_order import in_order

import mujoco_warp  # isort: skip (after `warp_simulation`, which silences it)


class BatchedCameras:
    """The cameras `names` of every world of `simulation`, in one launch for all worlds of a scene.

    Pictures are the same as those of `Cameras` with backend "rays".

    Raises:
        UserError: for a camera that the scenes lack.
    """

    def __init__(self, simulation: WarpSimulation, names: Sequence[str], width: int, height: int) -> None:
        self._simulation = simulation
        self._shape = (len(names), height, width, 3)
        with in_order(simulation.device):
            self._views = [_View(worlds, names, width, height, simulation.device) for worlds in simulation.groups]

    def pictures(self, ids: Tensor | None = None) -> Tensor:
        """Images [M, C, height, width, 3] uint8 of worlds `ids` [M] (all if None), on the simulation's device."""
        everyone = torch.arange(self._simulation.num, device=self._simulation.torch_device)
        ids = everyone if ids is None else ids
        images = torch.empty(len(ids), *self._shape, dtype=torch.uint8, device=ids.device)
        for view in self._views:
            row, world = (ids[:, None] == view.worlds.rows).nonzero(as_tuple=True)
            if len(row):
                images[row] = view.draw(world)
        return images


class _View:
    """Worlds of one scene in a model with visuals, whose kinematics is recomputed.

    The poses of the physics are from the step before, or from worlds that continued past the end of an episode.
    """

    def __init__(self, worlds: Worlds, names: Sequence[str], width: int, height: int, device: warp.Device) -> None:
        self.worlds = worlds
        self._device = device
        scene = worlds.scene
        visual = build_scene(scene.task, scene.assets, visuals=True).model
        check_names(visual, names)
        self._fields = (*PLACES, *(name for name in worlds.varied if name in CARRIED + COLOURS))
        self._traced = Traced(visual, names, width, height, film=False, worlds=worlds.count, batched=self._fields)
        model = self._traced.model
        data = self._traced.data
        self._targets = {name: warp.to_torch(getattr(model, name)) for name in self._fields}
        self._targets["qpos"] = warp.to_torch(data.qpos)

    def draw(self, rows: Tensor) -> Tensor:
        """Images [M, C, height, width, 3] of worlds `rows` [M]."""
        traced = self._traced
        count = len(rows)
        for name, target in self._targets.items():
            values = self.worlds.views[name][rows]
            target[:count] = values * traced.dimming if name in COLOURS else values
        traced.data.nworld = count
        with in_order(self._device):
            mujoco_warp.kinematics(traced.model, traced.data)
            mujoco_warp.camlight(traced.model, traced.data)
            pictures = traced.draw()
        packed = warp.to_torch(pictures)[:count]  # 0xAARRGGBB: bytes are blue, green, red, alpha
        return packed.view(torch.uint8).view(count, *traced.shape, 4)[..., :3].flip(-1)
