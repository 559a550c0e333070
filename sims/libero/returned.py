"""Condition that the scene of a task is back at its start, for robots that reset themselves."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sims.libero.environment import LiberoEnvironment

NEAR_M = 0.05
LEVEL_M = 0.02
"""Largest horizontal and vertical distance of an object from its initial place, m."""


def start_condition(env: LiberoEnvironment) -> Callable[[], bool] | None:
    """Whether the objects of the goal of `env` (N = 1) are near their initial places; None if none can be moved."""
    scene = env.scenes[0]
    bodies = {part.a for part in scene.goal}
    addresses = [
        int(address)
        for body, address in zip(scene.object_body, scene.object_qposadr, strict=True)
        if int(body) in bodies
    ]
    if not addresses:
        return None
    # position [x, y, z] of each object in qpos [nq]
    columns = np.array([[address, address + 1, address + 2] for address in addresses])

    def is_back() -> bool:
        initial = env.initial_state(0, int(env.start[0])).qpos[columns]
        offset = env.simulation.qpos(np.zeros(1, np.int64))[0][columns] - initial
        near = np.hypot(offset[:, 0], offset[:, 1]) <= NEAR_M
        return bool((near & (np.abs(offset[:, 2]) <= LEVEL_M)).all())

    return is_back
