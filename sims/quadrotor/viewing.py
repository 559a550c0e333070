"""View of quadrotors for the viewer: the drone, its goal, gates or reference; a drone can be pushed."""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from embodied.scene import shapes
from embodied.scene.shapes import Mesh
from embodied.scene.viewable import Array, Body, Point, Scene
from sims.quadrotor.airframes import CRAZYFLIE, Airframe
from sims.quadrotor.dynamics import DT_S, Options
from sims.quadrotor.rotors import place
from sims.quadrotor.tasks import race, track
from sims.quadrotor.tasks.race import Gate, Race
from sims.quadrotor.tasks.recover import Recover
from sims.quadrotor.tasks.track import Track

DRONE = "drone"
DARK, FRONT, BACK, GOAL = (0.16, 0.17, 0.2), (0.9, 0.28, 0.24), (0.55, 0.58, 0.63), (0.25, 0.7, 0.35)
LEAST = 0.025
"""Smallest arm of a drawn drone, as a share of the scene's reach: smaller drones are drawn larger."""
LINE = 0.004
"""Radius of lines, as a share of the scene's reach."""
FROM = np.array([0.95, -1.15, 0.6])
"""Position of the viewer relative to the middle, in reaches."""
POINTS = 60
"""Number of drawn points of a reference."""


class Flown(Protocol):
    """Attributes and methods of `QuadrotorEnvironment` that a view uses."""

    mdp: Any
    airframe: Airframe | None
    options: Options
    step_limit: int

    @property
    def plan(self) -> Tensor: ...  # noqa: D102 - see the environment
    def where(self, row: int) -> Tensor: ...  # noqa: D102
    def kick(self, row: int, change_m_s: Tensor) -> None: ...  # noqa: D102


class QuadrotorView:
    """N quadrotors; implements `embodied.scene.viewable.View`."""

    def __init__(self, env: Flown) -> None:
        self._env = env
        self._made = None if isinstance(env.mdp, Track) else self._scene(0)

    def scene(self, row: int) -> Scene:
        """Scene of the drone and its surroundings; every episode has another reference."""
        return self._made or self._scene(row)

    def poses(self, row: int) -> Array:
        """Poses of the drone and of its surroundings, which do not move, [2, 7]."""
        return np.stack((self._env.where(row).cpu().numpy(), HERE))

    def push(self, row: int, body: str, change_m_s: Array) -> None:
        """Change the velocity of the drone of environment `row`; see `View.push`."""
        self._env.kick(row, torch.as_tensor(change_m_s))

    def _scene(self, row: int) -> Scene:
        env, floor_m = self._env, self._env.options.ground_z_m
        middle, reach, around = np.zeros(3), 0.8, [shapes.path(line, 0.003) for line in cross(0.06)]
        if isinstance(env.mdp, Track):
            t = DT_S * torch.linspace(0.0, env.step_limit, POINTS)
            way = torch.stack(track.position(list(env.plan[:, row : row + 1].cpu()), t), 1).numpy()
            middle, reach = 0.5 * (way.min(0) + way.max(0)), float(np.ptp(way, axis=0).max()) + 0.2
            around = [shapes.path(way, LINE * reach)]
        elif isinstance(env.mdp, Race):
            middle, reach, floor_m = np.array([0.0, 0.5, race.CENTRE_Z_M]), 8.0, 0.0
            around = [shapes.path(opening(gate), 0.05) for gate in race.TRACK]
        elif isinstance(env.mdp, Recover):
            middle, reach, floor_m = np.array([0.0, 0.0, -1.0]), 3.0, -3.5
        scenery = shapes.joined(around).coloured(GOAL)
        bodies = (Body(DRONE, drone(env.airframe or CRAZYFLIE, LEAST * reach)), Body("surroundings", scenery))
        return Scene(bodies, point(middle + reach * FROM), point(middle), floor_m, 2.0 * reach, (DRONE,))


HERE = np.array([0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0])
"""Pose of objects that do not move."""


def drone(airframe: Airframe, least_m: float = 0.0, colour: Array | Point = BACK) -> Mesh:
    """A drone with arms of at least `least_m`; its rotors have `colour`, those in front are red."""
    arm = math.hypot(airframe.arm_x_m, airframe.arm_y_m)
    grown = max(1.0, least_m / arm)
    x, y, arm = grown * airframe.arm_x_m, grown * airframe.arm_y_m, grown * arm
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
