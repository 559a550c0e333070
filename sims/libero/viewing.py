"""View of LIBERO's simulations for the viewer: all but walls and floor; everything that moves can be pushed."""

from __future__ import annotations

import copy

import mujoco
import numpy as np
from numpy.typing import NDArray

from embodied.scene.viewable import Scene as Shown
from embodied.scene.viewable import View
from sims import mujoco_scene
from sims.libero.physics.backend import Physics
from sims.libero.rendering.poses import VISUAL_GROUP
from sims.libero.scene.scene import Scene, build_scene

Array = NDArray[np.floating]
CAMERA = "agentview"
AHEAD_M = 1.15
"""LIBERO's camera, and the distance of its target."""
BACK = 1.45
ASIDE_RAD = 0.6
"""Factor of the viewer's distance from the target, and angle to the side."""
UP_M = 0.12
"""Height of the viewer's target above the camera's, to show the arm."""
WALL_M = 1.0
"""Half the size from which on a geom is a wall or a floor."""


class LiberoView(View):
    """N simulations, each of its scene."""

    def __init__(self, simulation: Physics) -> None:
        self._simulation = simulation
        self._kinematics: dict[Scene, _Kinematics] = {}

    def scene(self, row: int) -> Shown:
        """Bodies of the scene of environment `row`."""
        return self._of(row).scenery

    def poses(self, row: int) -> Array:
        """Poses of the bodies of environment `row`; see `View.poses`."""
        ids = np.array([row])
        kinematics = self._of(row)
        placed = self._simulation.placed(ids, range(kinematics.model.nbody))[0]
        return kinematics.poses(self._simulation.qpos(ids)[0], placed)

    def push(self, row: int, body: str, change_m_s: Array) -> None:
        """Change the velocity of a body of environment `row`; see `View.push`."""
        self.poses(row)  # sets the poses of this episode's fixtures
        kinematics = self._of(row)
        qpos = self._simulation.qpos(np.array([row]))[0]
        self._simulation.kick(row, mujoco_scene.pushed(kinematics.model, qpos, body, change_m_s))

    def _of(self, row: int) -> _Kinematics:
        scene = self._simulation.scenes[row]
        if scene not in self._kinematics:
            self._kinematics[scene] = _Kinematics(scene)
        return self._kinematics[scene]


class _Kinematics:
    """Bodies of a scene, with their own kinematics: the physics skips bodies at rest, and its poses are a step old."""

    def __init__(self, scene: Scene) -> None:
        self.model = copy.copy(scene.model)
        self._data = mujoco.MjData(self.model)
        visual = build_scene(scene.task, scene.assets, visuals=True).model
        geoms = mujoco_scene.visible(visual, [VISUAL_GROUP])
        bodies = mujoco_scene.bodies(visual, [geom for geom in geoms if visual.geom_size[geom].max() < WALL_M])
        self._numbers = list(bodies)
        mujoco.mj_forward(self.model, self._data)
        camera = self._data.camera(CAMERA)
        ahead = -AHEAD_M * camera.xmat.reshape(3, 3)[:, 2]
        cos = np.cos(ASIDE_RAD)
        sin = np.sin(ASIDE_RAD)
        turn = np.array([[cos, -sin, 0.0], [sin, cos, 0.0], [0.0, 0.0, 1.0]])
        target = camera.xpos + ahead + np.array([0.0, 0.0, UP_M])
        eye = target - BACK * turn @ ahead
        self.scenery = Shown(
            tuple(bodies.values()),
            tuple(eye.tolist()),
            tuple(target.tolist()),
            reach_m=3.0,
            pushable=mujoco_scene.movable(visual, bodies),
        )

    def poses(self, qpos: Array, placed: Array) -> Array:
        """Poses [B, 7] at `qpos` [nq] with bodies attached at `placed` [nbody, 7]."""
        self.model.body_pos[:] = placed[:, :3]
        self.model.body_quat[:] = placed[:, 3:]
        self._data.qpos[:] = qpos
        mujoco.mj_kinematics(self.model, self._data)
        return mujoco_scene.poses(self._data, self._numbers)
