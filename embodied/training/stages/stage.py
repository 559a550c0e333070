"""Stage of a run: built, stepped, evaluated, saved and resumed alike, whatever it trains."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Generic, TypeVar

from embodied.policy import TrainablePolicy
from embodied.report.report import title
from embodied.training.built_run import BuiltRun

Step = TypeVar("Step")


class Stage(ABC, Generic[Step]):
    """One stage of `run`, whose `name` stands in checkpoints, metrics and the report.

    A run calls `build`, restores the parts if it was interrupted in this stage, takes `steps` until `done` reaches
    `total`, calls `finish` and evaluates the `policy`. It can save after every step.
    """

    name: ClassVar[str]
    trains: ClassVar[bool] = True
    """Whether the stage changes the run's policy."""
    offline: ClassVar[bool] = False
    """Whether the stage learns from demonstrations alone."""
    baselines: ClassVar[bool] = False
    """Whether the task's planners are evaluated after the stage."""

    def __init__(self, run: BuiltRun) -> None:
        self.run = run

    @property
    def title(self) -> str:
        """Title in the report."""
        return title(self.name)

    @property
    def patience_s(self) -> float:
        """Longest step, s, that a stop waits for; longer ones are abandoned, which needs a copy of the state before."""
        return math.inf

    @property
    def policy(self) -> TrainablePolicy:
        """Policy to evaluate."""
        return self.run.policy

    @property
    @abstractmethod
    def total(self) -> int:
        """Size of the stage, in gradient steps or environment steps."""

    @property
    @abstractmethod
    def done(self) -> int:
        """Part of `total` that is done."""

    @property
    def due(self) -> bool:
        """Whether a checkpoint is due after the last step."""
        return False

    @abstractmethod
    def build(self, resumed: bool) -> dict[str, Any]:
        """Build the stage's parts, with state, by name; `resumed` if their state is restored next."""

    def running(self) -> AbstractContextManager[object]:
        """Context in which the parts are restored and the steps are taken."""
        return nullcontext()

    @abstractmethod
    def steps(self) -> Iterator[Step]:
        """Iterator of which each item is one step: the work that a run repeats as a whole if it was interrupted."""

    @abstractmethod
    def record(self, step: Step) -> str:
        """Log and count a `step`; returns a note for the progress bar."""

    def finish(self) -> None:
        """Keep what later stages need, before the evaluation; called again if that is interrupted."""
