"""Success of an episode on a robot by its measurements, such as by a classifier of pictures."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

from real_robot.robots.robot import Array, Reading

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Judge:
    """Judge of success: `frames` measurements in a row have a `probability` of at least `threshold`.

    `probability` is that of a solved task, 0 to 1, given observations (arrays by key). HIL-SERL (arXiv 2410.21845) has
    the threshold 0.85.
    """

    probability: Callable[[dict[str, Array]], float]
    threshold: float = 0.85
    frames: int = 1


class Judging:
    """Measurements of an episode, judged one after another by `judge`; None: no measurement looks solved."""

    def __init__(self, judge: Judge | None) -> None:
        self.judge = judge
        self._is_blind = False  # whether the judge has once given no number
        self.begin()

    def begin(self) -> None:
        """Begin an episode."""
        self._frames = 0  # measurements in a row that look solved
        self._sequence = -1  # of the last of them

    def solved(self, reading: Reading) -> bool:
        """Whether the measurements up to `reading` look solved; one that was lost or is late is judged once."""
        judge = self.judge
        if judge is None or reading.sequence == self._sequence:
            return False
        self._sequence = reading.sequence
        probability = judge.probability(reading.observation)
        if math.isnan(probability) and not self._is_blind:
            self._is_blind = True
            log.warning("the success classifier's probability is not a number, which is no success: train it again")
        reached = probability >= judge.threshold  # not by NaN
        self._frames = self._frames + 1 if reached else 0
        return self._frames >= judge.frames
