"""Random minibatches of the rows of all processes: together they take those that one process with all rows would.

Letters: T decisions, N environments of a process, B rows of a minibatch.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from embodied.world import ALONE, World


class Minibatches:
    """Draws among the decisions `kept` [T, N] of all processes of `world`, whose environments follow one another."""

    def __init__(self, kept: Tensor, world: World = ALONE) -> None:
        self.world, envs = world, kept.shape[1]
        everywhere = torch.zeros(len(kept), world.size, envs, dtype=torch.uint8)
        everywhere[:, world.rank] = kept.cpu()
        place = world.sum(everywhere).flatten().nonzero().squeeze(1)
        self.owner = place // envs % world.size
        self.row = place // (envs * world.size) * envs + place % envs  # of the owner's T * N

    def __len__(self) -> int:
        """Decisions of all processes."""
        return len(self.owner)

    def draw(self, size: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """Every decision once, in minibatches of `size` of all processes, by a `generator` that is alike in them.

        Of each: this process's rows [B] of T * N, and which of them count [B]. B is the same in every process, so that
        all make the same passes: a process with fewer rows repeats its first one, which does not count.
        """
        for drawn in torch.randperm(len(self), generator=generator).split(size):
            owner = self.owner[drawn]
            rows = self.row[drawn[owner == self.world.rank]]
            most = int(torch.bincount(owner, minlength=self.world.size).max())
            yield torch.cat((rows, rows.new_zeros(most - len(rows)))), torch.arange(most) < len(rows)
