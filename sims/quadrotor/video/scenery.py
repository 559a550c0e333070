"""The surroundings drawn with a drone: floor, reference, goal, and how a camera follows."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch

from sims.quadrotor.environment import QuadrotorEnvironment
from sims.quadrotor.physics.dynamics import DT_S
from sims.quadrotor.tasks import track
from sims.quadrotor.tasks.race import RADIUS_M, Race
from sims.quadrotor.tasks.recover import Recover
from sims.quadrotor.tasks.track import Track
from sims.quadrotor.video.camera import Array, Follow


@dataclass(frozen=True, eq=False)
class Scenery:
    """Surroundings of one episode.

    Attributes:
        floor_m: height of the floor.
        cell_m: width of its cells.
        distance_m: distance of the camera from the drone.
        arm_m: arm of the drone as it is drawn, large enough to be visible.
        speed_full_m_s: end of the speed's scale.
        raced: whether there are gates; the camera then looks where the drone flies.
        goal: desired position after each control step, [T + 1, 3] m; None if it does not matter.
        goal_name: name of the goal.
        rotors: number of rotors of the drone.
    """

    floor_m: float
    cell_m: float
    distance_m: float
    arm_m: float
    speed_full_m_s: float
    raced: bool = False
    goal: Array | None = None
    goal_name: str = ""
    rotors: int = 4

    def follow(self) -> Follow:
        """A camera that follows the drone."""
        height, above = (0.32, 0.12) if self.raced else (0.36, -0.04)
        return Follow(self.distance_m, height * self.distance_m, self.floor_m, above)

    @functools.cached_property
    def grid(self) -> Array:
        """The floor's lines, in pieces that fade one by one, [S, 2, 3] m."""
        cells = 14
        piece = 4
        along = np.arange(-cells, cells, piece, dtype=float)
        across = np.arange(-cells, cells + 1, dtype=float)
        first = np.stack(np.meshgrid(along, across, indexing="ij"), -1).reshape(-1, 2)
        lines = np.stack([first, first + np.array([piece, 0.0])], 1)
        flat = self.cell_m * np.concatenate([lines, lines[..., ::-1]])
        return np.concatenate([flat, np.full((*flat.shape[:2], 1), self.floor_m)], -1)


def scenery(env: QuadrotorEnvironment, row: int, arm_m: float) -> Scenery:
    """Surroundings of the running episode of environment `row`, whose drone has arms of `arm_m`."""
    if isinstance(env.mdp, Track):
        goal = reference(env, row)
        floor_m = float(goal[:, 2].min()) - 0.6
        return Scenery(floor_m, 0.5, 1.9, max(0.12, arm_m), 4.0, goal=goal, goal_name="from the reference")
    if isinstance(env.mdp, Race):
        return Scenery(0.0, 1.0, 1.7, max(1.2 * RADIUS_M, arm_m), 16.0, raced=True)
    if isinstance(env.mdp, Recover):
        return Scenery(-float(env.mdp.position_limit_m), 1.0, 2.0, max(0.16, arm_m), 6.0)
    still = np.zeros((env.step_limit + 1, 3))
    return Scenery(
        env.options.ground_z_m,
        0.25,
        1.0,
        max(0.07, arm_m),
        2.0,
        goal=still,
        goal_name="from the goal",
        rotors=int(env.airframe.rotors) if env.airframe else 4,
    )


def reference(env: QuadrotorEnvironment, row: int) -> Array:
    """The reference of a tracking episode after each control step, [T + 1, 3] m."""
    t = DT_S * torch.arange(env.step_limit + 1)
    plan = list(env.plan[:, row : row + 1].cpu())
    return torch.stack(track.position(plan, t), 1).numpy()
