"""The surroundings drawn with a drone: viewpoint, reference or gates, and goal."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from sims.quadrotor.dynamics import DT_S
from sims.quadrotor.environment import QuadrotorEnvironment
from sims.quadrotor.tasks import race, track
from sims.quadrotor.tasks.race import Race
from sims.quadrotor.tasks.recover import Recover
from sims.quadrotor.tasks.track import Track
from sims.quadrotor.video.pictures import Array, Camera
from sims.quadrotor.viewing import opening


@dataclass(frozen=True, eq=False)
class Scenery:
    """Surroundings of one episode.

    Attributes:
        camera: shows all of it.
        paths: lines, [P, 3] m.
        goal: desired position after each control step, [T + 1, 3] m; None if it does not matter.
    """

    camera: Camera
    paths: tuple[Array, ...] = ()
    goal: Array | None = None


def scenery(env: QuadrotorEnvironment, row: int) -> Scenery:
    """Surroundings of the running episode of environment `row`."""
    if isinstance(env.mdp, Track):
        goal = reference(env, row)
        low, high = goal.min(0), goal.max(0)
        return Scenery(Camera((low + high) / 2.0, 0.6 * float((high - low).max()) + 0.2), (goal,), goal)
    if isinstance(env.mdp, Race):
        return Scenery(Camera(np.array([0.0, 0.5, race.CENTRE_Z_M]), 6.0), tuple(map(opening, race.TRACK)))
    if isinstance(env.mdp, Recover):
        return Scenery(Camera(np.array([0.0, 0.0, -1.0]), 2.5))
    return Scenery(Camera(np.zeros(3), 0.6), goal=np.zeros((env.step_limit + 1, 3)))


def reference(env: QuadrotorEnvironment, row: int) -> Array:
    """The reference of a tracking episode after each control step, [T + 1, 3] m."""
    t = DT_S * torch.arange(env.step_limit + 1)
    plan = list(env.plan[:, row : row + 1].cpu())
    return torch.stack(track.position(plan, t), 1).numpy()
