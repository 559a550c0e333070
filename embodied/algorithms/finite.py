"""Checks that stop training before a number that is not finite spoils the weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from embodied.errors import DivergedError

ADVICE = "try a lower learning rate, or float32 in place of bfloat16"


def check_finite(values: Mapping[str, float | Tensor], gradient_step: int) -> None:
    """Check numbers by name; the error reports the first one that is not finite.

    Raises:
        DivergedError: with its name and the gradient step that would have used it, counted from 1.
    """
    for name, value in values.items():
        if not math.isfinite(number := float(value)):
            raise DivergedError(f"{name.replace('_', ' ')} became {number} at gradient step {gradient_step}; {ADVICE}")


def gradient_norm(parameters: Iterable[Tensor]) -> Tensor:
    """L2 norm of the gradient of `parameters`."""
    return nn.utils.get_total_norm([part.grad for part in parameters if part.grad is not None])


def losses(metrics: Mapping[str, float]) -> dict[str, float | Tensor]:
    """Entries of `metrics` that are losses.

    The others need not be finite: an approximate KL divergence may overflow where clipped losses do not.
    """
    return {name: value for name, value in metrics.items() if name.endswith("loss")}
