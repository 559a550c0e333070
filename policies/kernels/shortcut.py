"""Shortcut models (arXiv 2410.12557): a velocity field that reads the length of its step, so that one can suffice.

    s(x, t, 0) is the velocity at a point, learned by flow matching, with which a step of length d is x - d s(x, t, d);
    a long step equals two short ones:  s(x, t, 2 d) = (s(x, t, d) + s(x - d s(x, t, d), t - d, d)) / 2

Differs from the paper: the short steps are by the network itself, not by its moving average; a length is one of
`LENGTHS`, whose shortest consists of two steps of 1/32 at a point (1/128 there). Letters: N samples, H chunk length,
A action dimension.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from embodied.errors import UserError

LENGTHS = (0.0, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
"""Lengths of steps by their index; 0 is the velocity at a point."""

Steps = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Function of noisy chunks [N, H, A], times [N], features [N, F] and length indices [N] -> s [N, H, A]."""


def length_of(steps: int) -> int:
    """Index of the length of each of `steps` steps from noise to action.

    Raises:
        UserError: if there is none.
    """
    if 1.0 / steps not in LENGTHS:
        step_counts = ", ".join(f"{1 / length:.0f}" for length in reversed(LENGTHS[1:]))
        raise UserError(f"expected policy.denoising_steps among {step_counts} with policy.shortcut, got {steps}")
    return LENGTHS.index(1.0 / steps)


def random_steps(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Draw times [N] and length indices [N] of steps from one point of their grid to the next."""
    index = torch.randint(1, len(LENGTHS), (count,), device=device)
    length = torch.tensor(LENGTHS, device=device)[index]
    # t = i d with i = 1 .. 1 / d, so that the step from t ends at t - d >= 0
    return length * (1.0 + torch.floor(torch.rand(count, device=device) / length)).clamp_max(1.0 / length), index


@torch.no_grad()
def two_steps(field: Steps, x: Tensor, time: Tensor, features: Tensor, number: Tensor) -> Tensor:
    """Mean s [N, H, A] of two steps of half the length with index `number` [N], the target of a whole step."""
    half = torch.tensor(LENGTHS, device=x.device)[number] / 2.0
    # s(x, t, 2 d) = (s(x, t, d) + s(x - d s(x, t, d), t - d, d)) / 2
    first = field(x, time, features, number - 1)
    second = field(x - half.view(-1, 1, 1) * first, time - half, features, number - 1)
    return (first + second) / 2.0
