"""Evaluations during reinforcement learning, for a run's report: a curve, and the best of its points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from embodied.environment import ODD_EVENTS

Point = dict[str, Any]
"""Evaluation: `env_steps`, `success` or `return`, `low`, `high` (None: unknown) and `episodes`."""


@dataclass
class InTraining:
    """Evaluations of the policy in training on `distribution`, of each task from initial state `first_start` on."""

    distribution: str = ""
    first_start: int = 0
    points: list[Point] = field(default_factory=list)

    def chosen(self) -> Point | None:
        """Last point, with its distribution and starts, if it is the best so far; else None."""
        last = self.points[-1]
        details = {"distribution": self.distribution, "first_start": self.first_start, "best_of": len(self.points)}
        return last | details if best(self.points) is last else None

    def record(self) -> dict[str, Any] | None:
        """Record for report.json; None if nothing was evaluated."""
        return {**vars(self), "best": best(self.points)} if self.points else None


def best(points: Sequence[Point]) -> Point:
    """Point of the highest success or return, the last of equal ones."""
    return max(points, key=lambda point: (point[measure(point)], point["env_steps"]))


def measure(row: Mapping[str, Any]) -> str:
    """Measure of a point, or of another evaluation of a report: success or return."""
    return "success" if "success" in row else "return"


def odd_episodes(row: Mapping[str, Any]) -> list[str]:
    """Numbers of odd episodes, where there are any: those with `ODD_EVENTS`, and those successful at once."""
    notes = dict.fromkeys((*ODD_EVENTS, "immediate"), "")
    notes["diverged"] = "" if "success" in row else ", counted with the worst return"
    return [f"{row[name]} {name}{note}" for name, note in notes.items() if name in row]
