"""Averages gradients over processes after every backward pass, by hooks on parameters.

DistributedDataParallel does so for a module that is called; a policy has several entry points, `evaluate`, `value` and
`loss` among them, and learners have networks of their own. A gradient that several passes accumulate is averaged after
each: the average of equal values is the value itself, so that only the last addition changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from embodied.world import World


def average_gradients(parameters: Sequence[Tensor], world: World) -> None:
    """Register hooks so that every backward pass that reaches one of `parameters` averages their gradients at its end.

    Every process must make the same passes. The gradient of a parameter that no process reached is unchanged.
    """
    trainable = [each for each in parameters if each.requires_grad]
    touched: set[int] = set()

    def reduce() -> None:
        # One reduction of all gradients and of flags: a parameter that any process reached gets a gradient in all of
        # them.
        flags = torch.tensor([float(index in touched) for index in range(len(trainable))], device=trainable[0].device)
        parts = [torch.zeros_like(each) if each.grad is None else each.grad for each in trainable]
        flat = torch.cat([part.flatten().float() for part in (*parts, flags)])
        touched.clear()
        *means, flags = (world.sum(flat) / world.size).split([*(part.numel() for part in parts), len(trainable)])
        # a parameter that only other processes reached gets their average, too
        for each, mean, flag in zip(trainable, means, flags.tolist(), strict=True):
            if flag and each.grad is None:
                each.grad = mean.view_as(each).to(each.dtype, copy=True)
            elif flag and each.grad is not None:
                each.grad.copy_(mean.view_as(each))  # in place: the last digits depend on the alignment of its memory

    def note(index: int) -> None:
        if not touched:
            # runs once, when the backward pass is complete
            torch.autograd.Variable._execution_engine.queue_callback(reduce)
        touched.add(index)

    for index, each in enumerate(trainable):
        each.register_post_accumulate_grad_hook(lambda _, index=index: note(index))
