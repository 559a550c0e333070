"""The processes that train together: rank, size, and sums over all of them.

Averages over decisions (advantages, the reward scale, the KL divergence that stops an iteration) are over the decisions
of every process, so that several processes learn what one with all decisions would. Learners do not average gradients:
hooks on their parameters do so after a backward pass (`embodied.placement`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class World(Protocol):
    """All processes of a run; every one calls the same methods in the same order."""

    @property
    def rank(self) -> int:
        """0 to size - 1; 0 writes files and reports."""
        ...

    @property
    def size(self) -> int:
        """Number of processes."""
        ...

    def sum(self, values: Tensor) -> Tensor:
        """The sum of `values` over all processes, the same shape everywhere."""
        ...

    def mean(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The mean of each of `metrics` over the processes that have it."""
        ...


@dataclass(frozen=True)
class OneProcess:
    """The world of a run in one process."""

    rank: int = 0
    size: int = 1

    def sum(self, values: Tensor) -> Tensor:
        """`values` unchanged."""
        return values

    def mean(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """`metrics` unchanged."""
        return dict(metrics)


ALONE = OneProcess()


def of_each(value: int, world: World) -> list[int]:
    """The `value` of every process, in order."""
    found = torch.zeros(world.size, dtype=torch.int64)
    found[world.rank] = value
    return world.sum(found).tolist()
