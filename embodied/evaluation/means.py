"""Means to trust: Student's intervals of a mean and of a difference."""

from __future__ import annotations

import math
from statistics import NormalDist

from torch import Tensor


def mean_interval(values: Tensor, confidence: float = 0.95) -> tuple[float, float, float]:
    """Mean of `values` with its interval (Student 1908, Biometrika 6): mean, low, high; no bounds for one value.

    Raises:
        ValueError: where there are none.
    """
    count = values.numel()
    if not count:
        raise ValueError("expected at least one value, got none")
    values = values.double().flatten()
    mean = float(values.mean())
    if count == 1:
        return mean, -math.inf, math.inf
    spread = student(count - 1, confidence) * float(values.std()) / math.sqrt(count)
    return mean, mean - spread, mean + spread


def difference_interval(after: Tensor, before: Tensor, confidence: float = 0.95) -> tuple[float, float, float]:
    """Difference of the means of independent values, with Welch's interval (1947, Biometrika 34)."""
    difference = float(after.double().mean() - before.double().mean())
    if min(after.numel(), before.numel()) < 2:
        return difference, -math.inf, math.inf
    shares = [float(each.double().var()) / each.numel() for each in (after, before)]
    total = sum(shares)
    if not total:
        return difference, difference, difference
    sizes = after.numel(), before.numel()
    degrees = total**2 / sum(share**2 / (size - 1) for share, size in zip(shares, sizes, strict=True))
    spread = student(degrees, confidence) * math.sqrt(total)
    return difference, difference - spread, difference + spread


def student(degrees: float, confidence: float = 0.95) -> float:
    """Two-sided quantile of Student's distribution: exact for 1 and 2 degrees of freedom, else within 1%.

    Expanded about the normal one (Abramowitz and Stegun 1964, 26.7.5).
    """
    if degrees <= 1:
        return math.tan(math.pi * confidence / 2)
    if degrees <= 2:
        return confidence * math.sqrt(2.0 / (1.0 - confidence**2))
    z, v = NormalDist().inv_cdf((1.0 + confidence) / 2), degrees
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
    )
