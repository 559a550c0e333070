"""The scripted expert as a helper of a policy: it knows what to do at any time, and how far the episode is."""

from __future__ import annotations

import numpy as np

from sims.libero.environment import LiberoEnvironment
from sims.libero.expert.expert import Expert, Phase
from sims.libero.scene.geometry import Array

REACH_M = 1.0
"""Distances are counted up to this one, m, so that each phase counts more than any distance."""
HELD_M = 0.03
"""Largest distance, m, of a closed hand from the planned grasp at which the body counts as held."""
TURNED_RAD = 0.4
"""Rotation that remains to the planned grasp, rad, from which on another one may suit the present hand better."""


class Helper:
    """An `embodied.task.Expert` for the only environment of `env`; it follows the state, whoever acts.

    It goes on with what the policy has begun: it carries a body that the policy holds, and plans a new grasp where the
    policy has turned the hand away from the planned one.
    """

    def __init__(self, env: LiberoEnvironment) -> None:
        self._env = env
        self._expert = Expert(env.simulation)

    def reset(self) -> None:
        """Begin an episode."""
        self._expert.reset()

    def action(self) -> Array:
        """The expert's action [7], within the limits of the contract."""
        self._follow()
        return np.clip(self._expert.act()[0], -1.0, 1.0)

    def _follow(self) -> None:
        """Change the phase where the policy has grasped, or has turned the hand."""
        expert = self._expert
        distance, turn = expert.distance(0), expert.turn(0)
        if expert.phase[0] != Phase.REACH:
            return
        closed = self._env.simulation.gripper()[0, 1] > 0.0
        if closed and distance < HELD_M:
            expert.hold(0)
        elif not closed and turn > TURNED_RAD:
            expert.replan(0)

    def progress(self) -> float:
        """Parts of the goal that are achieved, then the phase of the next part, then the nearness of the hand, m."""
        parts = sum(self._env.simulation.achieved(0))
        distance = min(self._expert.distance(0), REACH_M)
        return (parts * len(Phase) + int(self._expert.phase[0])) * REACH_M - distance
