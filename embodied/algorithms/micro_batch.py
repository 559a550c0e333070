"""Number of minibatch rows that fit into a memory budget, so that large minibatches can be processed in pieces."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from embodied import seeding

PROBED = 4
"""Rows of the smaller of the two trial passes, if the minibatch has twice as many."""


def saved_bytes(forward: Callable[[], object]) -> int:
    """Bytes that autograd stores for the backward pass of `forward`, without leaves."""
    storage_bytes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if not (tensor if tensor._base is None else tensor._base).is_leaf:  # nor a view of a leaf
            storage = tensor.untyped_storage()
            storage_bytes[storage._cdata] = storage.nbytes()  # not data_ptr: on the meta device all are 0
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
        total = sum(storage_bytes.values())
    del result
    return total


def rows_within(memory_gb: float | None, rows: int, forward: Callable[[int], object]) -> int:
    """Rows per piece, at most `rows`, so that `forward(piece)` stores at most `memory_gb` for its backward pass.

    Extrapolated linearly from two small trial passes. At least 1; all rows if `memory_gb` is None. The random
    generators are restored afterwards.
    """
    if memory_gb is None or rows < 2:
        return rows
    probed = min(PROBED, rows // 2)
    with seeding.undisturbed():
        small, large = (saved_bytes(lambda count=count: forward(count)) for count in (probed, 2 * probed))
    # the slope cancels what does not grow with rows: (bytes(2 p) - bytes(p)) / p
    bytes_per_row = max(1.0, (large - small) / probed)
    return max(1, min(rows, int(memory_gb * 1e9 / bytes_per_row)))
