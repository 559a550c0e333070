"""Vocabulary of the Markov decision processes (MDPs) of quadrotors, swarms, vehicles and MJCF models.

Each simulator has an `Mdp` of its own, which adds the initial states of episodes and the constants of its model, and a
`Moment`: the state of environments at one time, with `steps`, the control steps so far, and `memory`, the task's state
of the episode. `Moment.before` is the state one control step earlier. Where compiled code keeps only a `Record` of
episodes, `success`, `failures` and `metrics` take that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from embodied.contract import TensorSpec


class Mdp:
    """A task; subclasses are frozen dataclasses whose numbers are options of the task.

    All functions take the `Moment` `now` of N environments, return new values and modify none. After a control step
    `update` comes first; the others see the memory that it returns.
    """

    INSTRUCTION: ClassVar[str]
    OBSERVED: ClassVar[Mapping[str, TensorSpec]]
    """Specs of the task's observations, by name."""
    STEP_LIMIT: ClassVar[int]
    """Control steps after which an episode is truncated, by default."""

    def observe(self, now: Any) -> Any:  # noqa: ANN401 - each simulator's `Moment` and values
        """Observations with the names in `OBSERVED`, or their rows in that order."""
        raise NotImplementedError

    def update(self, now: Any) -> Any:  # noqa: ANN401
        """Memory after a control step."""
        return now.memory

    def reward(self, now: Any) -> Any:  # noqa: ANN401
        """Reward of the last control step."""
        raise NotImplementedError

    def terminated(self, now: Any) -> Any:  # noqa: ANN401
        """Whether the episode terminates, because the task failed or cannot continue."""
        return torch.zeros_like(now.steps, dtype=torch.bool)

    def finished(self, now: Any) -> Any:  # noqa: ANN401
        """Whether the task is finished, which truncates the episode; None: never."""
        return None

    def success(self, now: Any) -> Any:  # noqa: ANN401
        """Whether an episode that ends now has succeeded."""
        raise NotImplementedError

    def failures(self, now: Any) -> Any:  # noqa: ANN401
        """Causes of failure by name, flags; a failed episode has the first one that is True at its end."""
        return {}

    def metrics(self, now: Any) -> Any:  # noqa: ANN401
        """Quantities of the episodes so far, by names with their unit; NaN where undefined."""
        return {}
