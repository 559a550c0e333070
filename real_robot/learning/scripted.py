"""A scripted person with a limited budget, who helps a policy where an expert is known, as in a simulator."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from embodied.configuration import Configuration, NonNegativeFloat, NonNegativeInt, PositiveInt
from embodied.task import Expert
from real_robot.robots.robot import Array


@dataclass
class HelpConfig(Configuration):
    """When a scripted person helps.

    They take over after `patience` control steps without progress, which is a rise of the expert's measure by
    `progress`, and hand back after `lasting` steps. There are `budget` take-overs in all, also of a run that is resumed
    or goes on with another actor.py; in each episode at most `per_episode`, which falls in proportion to what is left
    of the budget.
    """

    patience: PositiveInt = 15
    lasting: PositiveInt = 10
    progress: NonNegativeFloat = 1e-3
    budget: NonNegativeInt = 100
    per_episode: PositiveInt = 5


class ScriptedPerson:
    """A `Person` who acts as `expert` does while they help, see `HelpConfig`; they press no buttons."""

    pressed: frozenset[str] = frozenset()

    def __init__(self, expert: Expert, config: HelpConfig) -> None:
        self.expert = expert
        self.config = config
        self.takeovers = 0
        """Number of take-overs so far."""
        self.begin(training=True)

    def begin(self, training: bool) -> None:
        """Begin an episode; the person helps only in `training`."""
        self.expert.reset()
        left = max(0, self.config.budget - self.takeovers)  # an actor that goes on may have a smaller one
        share = left / max(1, self.config.budget)
        self._allowed = min(left, math.ceil(self.config.per_episode * share)) if training else 0
        self._best = -math.inf
        self._waited = 0  # steps without progress
        self._helping = 0  # remaining steps of this take-over

    def state_dict(self) -> dict[str, int]:
        """Number of take-overs so far."""
        return {"takeovers": self.takeovers}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from `state_dict`, with the next episode."""
        self.takeovers = state["takeovers"]
        self.begin(training=False)

    def action(self, proposed: Array | None) -> Array | None:
        """See `Person.action`; call it once per control step."""
        command = self.expert.action()
        progress = self.expert.progress()
        if progress > self._best + self.config.progress:
            self._best = progress
            self._waited = 0
        if not self._helping and self._waited >= self.config.patience and self._allowed:
            self._helping = self.config.lasting
            self._allowed -= 1
            self.takeovers += 1
        self._waited += 1
        if not self._helping:
            return None
        self._helping -= 1
        if not self._helping:  # the policy gets its own time again
            self._waited = 0
            self._best = progress
        return command

    def wait_for(self, *buttons: str, sleep: Callable[[float], None] = time.sleep) -> str:
        """See `Person.wait_for`: they press at once."""
        return buttons[0]

    def close(self) -> None:
        """No-op."""
