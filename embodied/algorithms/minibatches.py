"""Random minibatches of the rows of all processes: together the processes draw what one process with all rows would.

Letters: T decisions, N environments of a process, B rows of a minibatch.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from embodied.world import ALONE, World


class Minibatches:
    """Minibatches of the decisions `used` [T, N] of all processes of `world`, whose environments are concatenated."""

    def __init__(self, used: Tensor, world: World = ALONE) -> None:
        self.world = world
        envs = used.shape[1]
        used_by_process = torch.zeros(len(used), world.size, envs, dtype=torch.uint8)
        # each process fills its own columns; the sum is the mask of all processes
        used_by_process[:, world.rank] = used.cpu()
        position = world.sum(used_by_process).flatten().nonzero().squeeze(1)
        # position = (t * processes + owner) * N + env; the owner's own row is t * N + env
        self.owner = position // envs % world.size
        self.row = position // (envs * world.size) * envs + position % envs  # of the owner's T * N

    def __len__(self) -> int:
        """Number of decisions of all processes."""
        return len(self.owner)

    def draw(self, size: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield every decision once, in minibatches of `size` rows over all processes.

        The `generator` must be in the same state in all processes. Each minibatch consists of this process's rows [B]
        of T * N, and flags [B] of those that count. B is the same in every process, so that all make the same passes:
        a process with fewer rows repeats row 0, which does not count.
        """
        for positions in torch.randperm(len(self), generator=generator).split(size):
            owner = self.owner[positions]
            rows = self.row[positions[owner == self.world.rank]]
            largest = int(torch.bincount(owner, minlength=self.world.size).max())
            yield torch.cat((rows, rows.new_zeros(largest - len(rows)))), torch.arange(largest) < len(rows)
