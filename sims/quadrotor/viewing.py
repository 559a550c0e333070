"""View of quadrotors for the viewer: the drone, its goal, gates or reference; a drone can be pushed."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from embodied.scene import shapes
from embodied.scene.shapes import Mesh
from embodied.scene.viewable import Array, Body, Point, Scene, View
from sims.quadrotor.episode import Mdp
from sims.quadrotor.physics.airframes import Airframe
from sims.quadrotor.physics.dynamics import DT_S
from sims.quadrotor.physics.rotors import place
from sims.quadrotor.tasks import race, track
from sims.quadrotor.tasks.race import Gate, Race
from sims.quadrotor.tasks.recover import Recover
from sims.quadrotor.tasks.track import Track

DRONE = "drone"
DARK = (0.16, 0.17, 0.2)
FRONT = (0.9, 0.28, 0.24)
BACK = (0.55, 0.58, 0.63)
GOAL = (0.25, 0.7, 0.35)
LEAST = 0.025
"""Smallest arm of a drawn drone, as a share of the scene's reach: smaller drones are drawn larger."""
LINE = 0.004
"""Radius of lines, as a share of the scene's reach."""
FROM = np.array([0.95, -1.15, 0.6])
"""Position of the viewer relative to the middle, in reaches."""
POINTS = 60
"""Number of drawn points of a reference."""


class QuadrotorView(View):
    """View of N quadrotors of the task `mdp`; episodes take at most `steps` control steps.

    `plan` returns the running episodes' plans [P, N], `pose` the pose [7] of a quadrotor by its index, and `kick`
    changes the velocity of one.
    """

    def __init__(
        self,
        mdp: Mdp,
        airframe: Airframe,
        floor_m: float,
        steps: int,
        plan: Callable[[], Tensor],
        pose: Callable[[int], Tensor],
        kick: Callable[[int, Tensor], None],
    ) -> None:
        self._mdp = mdp
        self._airframe = airframe
        self._floor_m = floor_m
        self._steps = steps
        self._plan = plan
        self._pose = pose
        self._kick = kick
        self._fixed_scene = None if isinstance(mdp, Track) else self._scene(0)

    def scene(self, row: int) -> Scene:
        """Scene of the drone and its surroundings; every episode has another reference."""
        return self._fixed_scene or self._scene(row)

    def poses(self, row: int) -> Array:
        """Poses of the drone and of its surroundings, which do not move, [2, 7]."""
        return np.stack((self._pose(row).cpu().numpy(), ORIGIN_POSE))

    def push(self, row: int, body: str, change_m_s: Array) -> None:
        """Change the velocity of the drone of environment `row`; see `View.push`."""
        self._kick(row, torch.as_tensor(change_m_s))

    def _scene(self, row: int) -> Scene:
        floor_m = self._floor_m
        middle = np.zeros(3)
        reach = 0.8
        around = [shapes.path(line, 0.003) for line in cross(0.06)]
        if isinstance(self._mdp, Track):
            t = DT_S * torch.linspace(0.0, self._steps, POINTS)
            way = torch.stack(track.position(list(self._plan()[:, row : row + 1].cpu()), t), 1).numpy()
            middle = 0.5 * (way.min(0) + way.max(0))
            reach = float(np.ptp(way, axis=0).max()) + 0.2
            around = [shapes.path(way, LINE * reach)]
        elif isinstance(self._mdp, Race):
            middle = np.array([0.0, 0.5, race.CENTRE_Z_M])
            reach = 8.0
            floor_m = 0.0
            around = [shapes.path(opening(gate), 0.05) for gate in race.TRACK]
        elif isinstance(self._mdp, Recover):
            middle = np.array([0.0, 0.0, -1.0])
            reach = 3.0
            floor_m = -3.5
        scenery = shapes.joined(around).coloured(GOAL)
        bodies = (Body(DRONE, drone(self._airframe, LEAST * reach)), Body("surroundings", scenery))
        return Scene(bodies, point(middle + reach * FROM), point(middle), floor_m, 2.0 * reach, (DRONE,))


ORIGIN_POSE = np.array([0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0])
"""Pose of objects that do not move."""


def drone(airframe: Airframe, least_m: float = 0.0, colour: Array | Point = BACK) -> Mesh:
    """A drone with arms of at least `least_m`; its rotors have `colour`, those in front are red."""
    arm = math.hypot(airframe.arm_x_m, airframe.arm_y_m)
    grown = max(1.0, least_m / arm)
    x = grown * airframe.arm_x_m
    y = grown * airframe.arm_y_m
    arm = grown * arm
    parts = [shapes.box((0.35 * arm, 0.22 * arm, 0.12 * arm)).coloured(DARK)]
    count = int(airframe.rotors)
    for ahead, aside, _ in (place(rotor, count) for rotor in range(count)):
        hub = np.array([ahead * x, aside * y, 0.0])
        rotor = shapes.cylinder((2.0 / count) * arm, 0.02 * arm).moved(hub + np.array([0.0, 0.0, 0.14 * arm]))
        parts += [shapes.rod(np.zeros(3), hub, 0.06 * arm).coloured(DARK)]
        parts += [rotor.coloured(FRONT if ahead > 0.1 else colour)]
    return shapes.joined(parts)


def opening(gate: Gate) -> Array:
    """Corners of a gate's opening as a closed line, [5, 3] m."""
    nx, ny = gate.normal
    half = race.HALF_OPENING_M + race.RADIUS_M
    corners = np.array([[1.0, 1.0], [1.0, -1.0], [-1.0, -1.0], [-1.0, 1.0], [1.0, 1.0]]) * half
    return np.array([gate.x, gate.y, gate.z]) + corners @ np.array([[-ny, nx, 0.0], [0.0, 0.0, 1.0]])


def cross(half: float) -> Array:
    """Three lines through the origin, [3, 2, 3] m."""
    return np.eye(3)[:, None, :] * np.array([-half, half])[None, :, None]


def point(values: Array) -> Point:
    """The three numbers of `values` as a tuple."""
    x, y, z = values.tolist()
    return x, y, z
