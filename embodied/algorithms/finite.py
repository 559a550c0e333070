"""Training stops when a number is no longer finite, before weights are spoiled."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from embodied.errors import DivergedError

ADVICE = "try a lower learning rate, or float32 in place of bfloat16"


def check_finite(values: Mapping[str, float | Tensor], gradient_step: int) -> None:
    """Check single numbers by name, of which the first that is not finite is told.

    Raises:
        DivergedError: naming it and the gradient step that would have used it, counted from 1.
    """
    for name, value in values.items():
        if not math.isfinite(number := float(value)):
            raise DivergedError(f"{name.replace('_', ' ')} became {number} at gradient step {gradient_step}; {ADVICE}")


def gradient_norm(parameters: Iterable[Tensor]) -> Tensor:
    """Norm of the gradient of `parameters`."""
    return nn.utils.get_total_norm([part.grad for part in parameters if part.grad is not None])


def losses(metrics: Mapping[str, float]) -> dict[str, float | Tensor]:
    """Those of `metrics` that are losses; an approximate KL divergence may overflow where clipped losses do not."""
    return {name: value for name, value in metrics.items() if name.endswith("loss")}
