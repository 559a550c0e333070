"""The processes that train together, as learners see them: their rank, and sums over all of them.

What is averaged over decisions (advantages, the reward's scale, the divergence at which an iteration stops) is averaged
over those of every process, so that many learn what one with all decisions would. Gradients are not a learner's
business: whatever wraps the policy's modules averages them in the backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class World(Protocol):
    """All processes of a run; every one calls the same methods in the same order."""

    @property
    def rank(self) -> int:
        """0 to size - 1; 0 writes files and reports."""
        ...

    @property
    def size(self) -> int:
        """Processes."""
        ...

    def sum(self, values: Tensor) -> Tensor:
        """The sum of `values` over all processes, the same shape everywhere."""
        ...


@dataclass(frozen=True)
class OneProcess:
    """The world of a run in one process."""

    rank: int = 0
    size: int = 1

    def sum(self, values: Tensor) -> Tensor:
        """They themselves."""
        return values


ALONE = OneProcess()
