"""Evaluation of the weights that a run starts from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Never

from embodied.training.stages.stage import Stage


class StartStage(Stage[Never]):
    """Stage without steps: it is only evaluated."""

    name = "start"
    trains = False

    @property
    def total(self) -> int:
        """No steps."""
        return 0

    @property
    def done(self) -> int:
        """No steps."""
        return 0

    def build(self, resumed: bool) -> dict[str, Any]:
        """No parts."""
        return {}

    def steps(self) -> Iterator[Never]:
        """No steps."""
        return iter(())

    def record(self, step: Never) -> str:
        """Not called."""
        raise AssertionError
