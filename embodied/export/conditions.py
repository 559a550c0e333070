"""What a task prepares its policies for, as an exported controller must say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Conditions:
    """What training varied.

    Attributes:
        trained_for: in words, a line each.
        missing: what a real robot has and training had not, such as "latency".
        first_action: every element of past actions when a controller begins.
        measurable: whether `evaluate.py margins=true` measures how far the policy goes.
    """

    trained_for: tuple[str, ...]
    missing: tuple[str, ...]
    first_action: float
    measurable: bool = False

    @property
    def caution(self) -> str | None:
        """One line for those who export a policy that lacks something; None if it lacks nothing."""
        if not self.missing:
            return None
        return f"trained without {' and without '.join(self.missing)}: expect it to fail on hardware"


class PreparedTask(Protocol):
    """A task that says what it prepares for."""

    @property
    def conditions(self) -> Conditions:
        """Of the policies that it trains."""
        ...
