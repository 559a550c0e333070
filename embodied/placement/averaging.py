"""Gradients averaged over processes after every backward pass, by hooks on parameters.

DistributedDataParallel does so for a module that is called; a policy has several entry points, `evaluate`, `value` and
`loss` among them, and learners make networks of their own. What several passes add to a gradient is averaged with it:
the average of what is averaged already is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from embodied.world import World


def average_gradients(parameters: Sequence[Tensor], world: World) -> None:
    """From now on every backward pass that reaches one of `parameters` ends with their gradients' average.

    Every process must make the same passes. A parameter that no process reached keeps its gradient, or has none.
    """
    learned = [each for each in parameters if each.requires_grad]
    touched: set[int] = set()

    def reduce() -> None:
        flags = torch.tensor([float(index in touched) for index in range(len(learned))], device=learned[0].device)
        parts = [torch.zeros_like(each) if each.grad is None else each.grad for each in learned]
        flat = torch.cat([part.flatten().float() for part in (*parts, flags)])
        touched.clear()
        *means, flags = (world.sum(flat) / world.size).split([*(part.numel() for part in parts), len(learned)])
        for each, mean, flag in zip(learned, means, flags.tolist(), strict=True):
            if flag and each.grad is None:
                each.grad = mean.view_as(each).to(each.dtype, copy=True)
            elif flag and each.grad is not None:
                each.grad.copy_(mean.view_as(each))  # in its own, aligned memory, on which last digits depend

    def note(index: int) -> None:
        if not touched:
            torch.autograd.Variable._execution_engine.queue_callback(reduce)
        touched.add(index)

    for index, each in enumerate(learned):
        each.register_post_accumulate_grad_hook(lambda _, index=index: note(index))
