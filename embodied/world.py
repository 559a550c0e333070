"""Processes that train together: rank, size, and sums over all of them.

Averages over decisions (advantages, the reward scale, the KL divergence that stops an iteration) are over the
decisions of every process, so that several processes learn the same as one with all decisions. Learners do not average
gradients: hooks on their parameters do so after a backward pass (`embodied.placement`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class World(Protocol):
    """Processes of a run, all of them; every one calls the same methods in the same order."""

    @property
    def rank(self) -> int:
        """Index of this process from 0 to size - 1; process 0 writes files and reports."""
        ...

    @property
    def size(self) -> int:
        """Number of processes."""
        ...

    def sum(self, values: Tensor) -> Tensor:
        """Sum of `values` over all processes, the same shape everywhere."""
        ...

    def mean(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Mean of each of `metrics` over the processes that have it."""
        ...


@dataclass(frozen=True)
class OneProcess:
    """World of a run in one process."""

    rank: int = 0
    size: int = 1

    def sum(self, values: Tensor) -> Tensor:
        """The unchanged `values`."""
        return values

    def mean(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The unchanged `metrics`."""
        return dict(metrics)


ALONE = OneProcess()


def of_each(value: int, world: World) -> list[int]:
    """Gather the `value` of every process, in order."""
    values = torch.zeros(world.size, dtype=torch.int64)
    values[world.rank] = value
    return world.sum(values).tolist()
