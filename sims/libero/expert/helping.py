"""The scripted expert as a helper of a policy: it knows what to do at any time, and how far the episode is."""

from __future__ import annotations

import numpy as np

from sims.libero.environment import LiberoEnvironment
from sims.libero.expert.expert import Expert, Phase
from sims.libero.scene.geometry import Array

REACH_M = 1.0
"""Distances are counted up to this one, m, so that each phase counts more than any distance."""


class Helper:
    """An `embodied.task.Expert` for the only environment of `env`; it follows the state, whoever acts."""

    def __init__(self, env: LiberoEnvironment) -> None:
        self._env = env
        self._expert = Expert(env.simulation)

    def reset(self) -> None:
        """Begin an episode."""
        self._expert.reset()

    def action(self) -> Array:
        """The expert's action [7], within the limits of the contract."""
        return np.clip(self._expert.act()[0], -1.0, 1.0)

    def progress(self) -> float:
        """Parts of the goal that are achieved, then the phase of the next part, then the nearness of the hand, m."""
        parts = sum(self._env.simulation.achieved(0))
        distance = min(self._expert.distance(0), REACH_M)
        return (parts * len(Phase) + int(self._expert.phase[0])) * REACH_M - distance
