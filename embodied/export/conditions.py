"""Conditions for which a task trains its policies, which an exported controller must state."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Conditions:
    """Conditions of training.

    Attributes:
        trained_for: in words, a line each.
        missing: properties of a real robot that training lacked, such as "latency".
        first_action: value of every element of past actions when a controller begins.
        measurable: whether `evaluate.py margins=true` measures the policy's margins.
    """

    trained_for: tuple[str, ...]
    missing: tuple[str, ...]
    first_action: float
    measurable: bool = False

    @property
    def caution(self) -> str | None:
        """Warning in one line for the export of a policy whose training lacked conditions; None if it lacked none."""
        if not self.missing:
            return None
        return f"trained without {' and without '.join(self.missing)}: expect it to fail on hardware"
