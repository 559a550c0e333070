"""How many rows of a minibatch fit into a memory budget, so that large models take large minibatches in pieces."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from embodied import seeding

PROBED = 4
"""Rows of the smaller of two trial passes, where there are so many."""


def saved_bytes(forward: Callable[[], object]) -> int:
    """Bytes that autograd keeps of what `forward` computes until the backward pass, without its leaves."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if not (tensor if tensor._base is None else tensor._base).is_leaf:  # nor a weight that is seen transposed
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
        total = sum(kept.values())
    del result
    return total


def rows_within(memory_gb: float | None, rows: int, forward: Callable[[int], object]) -> int:
    """Rows of a piece, at most `rows`, so that `forward(piece)` keeps no more than `memory_gb` for its backward pass.

    Measured on two small passes, between which it grows in proportion. At least 1; all of them without a budget.
    Random numbers that `forward` draws are drawn again by who calls it next.
    """
    if memory_gb is None or rows < 2:
        return rows
    probed = min(PROBED, rows // 2)
    with seeding.undisturbed():
        small, large = (saved_bytes(lambda count=count: forward(count)) for count in (probed, 2 * probed))
    each = max(1.0, (large - small) / probed)
    return max(1, min(rows, int(memory_gb * 1e9 / each)))
