"""View of swarms for the viewer: a world of drones, their goals and obstacles; every drone can be pushed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from embodied.scene import shapes
from embodied.scene.viewable import Array, Body, Scene, View
from sims.quadrotor.physics.airframes import Airframe
from sims.quadrotor.viewing import ORIGIN_POSE, cross, drone
from sims.swarm.mdp import AWAY_M, HALF_ROOM_M, OBSTACLE_RADIUS_M
from sims.swarm.worlds import Worlds

COLOURS = (
    *((90, 160, 250), (250, 170, 60), (90, 210, 120), (230, 110, 220), (240, 230, 90), (110, 220, 230)),
    *((190, 150, 110), (180, 180, 250)),
)
"""Colours of drones, their paths and goals, repeated if there are more."""
TALL_M = 2.0
"""Half the height of drawn obstacles, which reach the ceiling in reality."""
PILLAR = (0.62, 0.65, 0.7)
RING = (0.95, 0.75, 0.1, 0.35)
ARM_M = 0.16
MARK_M = 0.12
"""Sizes of drawn drones, larger than in reality, and of marks of goals."""


class SwarmView(View):
    """View of drones in `worlds`, `group` in each; an environment's own drone has a ball around it.

    `kick` changes the velocity of a drone by its index.
    """

    def __init__(
        self, group: int, airframe: Airframe, worlds: Callable[[], Worlds], kick: Callable[[int, torch.Tensor], None]
    ) -> None:
        self._group = group
        self._airframe = airframe
        self._worlds = worlds
        self._kick = kick

    def scene(self, row: int) -> Scene:
        """Scene of the world of drone `row`; every episode has another world."""
        cylinders = self._worlds().cylinders[row // self._group].numpy()
        pillars = [shapes.cylinder(OBSTACLE_RADIUS_M, TALL_M).moved((x, y, TALL_M)) for x, y in cylinders if x < AWAY_M]
        room = shapes.path([[x, y, 0.0] for x, y in HALF_ROOM_M * CORNERS], 0.02)
        colours = [np.array(COLOURS[number % len(COLOURS)]) / 255.0 for number in range(self._group)]
        drones = [Body(_name(i), drone(self._airframe, ARM_M, colour)) for i, colour in enumerate(colours)]
        mark = shapes.joined([shapes.path(line, 0.02) for line in cross(MARK_M)])
        goals = [Body(f"goal {i}", mark.coloured(colour)) for i, colour in enumerate(colours)]
        ball = Body("own", shapes.sphere(2.2 * ARM_M).coloured(RING))
        around = Body("obstacles", shapes.joined([room, *pillars]).coloured(PILLAR))
        pushable = tuple(_name(i) for i in range(self._group))
        return Scene((*drones, *goals, ball, around), (5.5, -7.5, 7.5), (0.0, 0.0, 1.0), 0.0, 8.0, pushable)

    def poses(self, row: int) -> Array:
        """Poses of drones, goals, the ball around drone `row`, and obstacles."""
        world, own = divmod(row, self._group)
        worlds = self._worlds()
        drones = worlds.state[world, :, :7].detach().numpy().astype(float)
        goals = np.tile(ORIGIN_POSE, (self._group, 1))
        goals[:, :3] = worlds.goal()[world].numpy()
        return np.concatenate((drones, goals, drones[own : own + 1], ORIGIN_POSE[None]))

    def push(self, row: int, body: str, change_m_s: Array) -> None:
        """Change the velocity of a drone in the world of drone `row`; see `View.push`."""
        number = next(i for i in range(self._group) if _name(i) == body)
        self._kick(row // self._group * self._group + number, torch.as_tensor(change_m_s))


CORNERS = np.array([[1.0, 1.0], [1.0, -1.0], [-1.0, -1.0], [-1.0, 1.0], [1.0, 1.0]])


def _name(number: int) -> str:
    return f"drone {number}"
