"""Confidence intervals of means, of differences, and of aggregates over several runs on several tasks."""

from __future__ import annotations

import math
from statistics import NormalDist

import torch
from torch import Tensor

DRAWS = 2000
"""Number of resamples of a bootstrap."""


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
    # mean +- t_{n-1} s / sqrt(n)
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
    # Welch and Satterthwaite: v = (s1 + s2)^2 / (s1^2 / (n1 - 1) + s2^2 / (n2 - 1)) with s = var / n
    degrees = total**2 / sum(share**2 / (size - 1) for share, size in zip(shares, sizes, strict=True))
    spread = student(degrees, confidence) * math.sqrt(total)
    return difference, difference - spread, difference + spread


def interquartile_mean(scores: Tensor) -> Tensor:
    """Mean of the middle half of scores [..., runs, tasks] (Agarwal et al. 2021, arXiv 2108.13264), [...]."""
    ordered = scores.double().flatten(-2).sort(-1).values
    cut = ordered.shape[-1] // 4
    return ordered[..., cut : ordered.shape[-1] - cut].mean(-1)


def interquartile_interval(scores: Tensor, confidence: float = 0.95) -> tuple[float, float, float]:
    """Interquartile mean of scores [runs, tasks] with its interval: mean, low, high; no bounds for one run.

    A bootstrap draws runs with all of their tasks, since one run learns them all. Agarwal et al. draw the runs of each
    task separately, as if trained separately: too narrow where a run is good or bad at everything. Percentiles are too
    narrow, too, where runs are few: the interval is Student's, with the bootstrap's standard error, and equals his
    where nothing is cut off.
    """
    estimate = float(interquartile_mean(scores))
    runs = len(scores)
    if runs == 1:
        return estimate, -math.inf, math.inf
    resamples = torch.randint(runs, (DRAWS, runs), generator=torch.Generator().manual_seed(0))
    # the factor sqrt(n / (n - 1)) corrects the bootstrap's variance, which divides by n
    error = float(interquartile_mean(scores[resamples]).std()) * math.sqrt(runs / (runs - 1))
    spread = student(runs - 1, confidence) * error
    return estimate, estimate - spread, estimate + spread


def probability_of_improvement(after: Tensor, before: Tensor, confidence: float = 0.95) -> tuple[float, float, float]:
    """Probability that a run's score on a task is above another's, averaged over tasks, and its bounds: P, low, high.

    Scores are [runs, tasks] each. P is Mann and Whitney's statistic, ties count half (Agarwal et al. 2021). Its bounds
    are those whose own variance (Hanley and McNeil 1982, Radiology 143) allows P (Newcombe 2006, Stat. Med. 25, part
    2), as of one task, so that they hold however alike a run's tasks are. A bootstrap would estimate no variance at all
    where every run is above.
    """
    above = (after.unsqueeze(1) - before.unsqueeze(0)).sign().double()
    estimate = float((above.mean() + 1) / 2)
    p = torch.linspace(0.0, 1.0, 10001, dtype=torch.float64)
    others = (len(after) + len(before)) / 2 - 1
    # Hanley and McNeil, with N = (m + n) / 2: p (1 - p) (1 + (N - 1) ((1 - p) / (2 - p) + p / (1 + p))) / (m n)
    variance = p * (1 - p) * (1 + others * ((1 - p) / (2 - p) + p / (1 + p))) / (len(after) * len(before))
    allowed = p[(p - estimate).abs() <= NormalDist().inv_cdf((1 + confidence) / 2) * variance.sqrt() + 1e-9]
    return estimate, min(estimate, float(allowed[0])), max(estimate, float(allowed[-1]))


def student(degrees: float, confidence: float = 0.95) -> float:
    """Two-sided quantile of Student's distribution: exact for 1 and 2 degrees of freedom, else within 1%.

    Expanded about the normal one (Abramowitz and Stegun 1964, 26.7.5).
    """
    if degrees <= 1:
        return math.tan(math.pi * confidence / 2)
    if degrees <= 2:
        return confidence * math.sqrt(2.0 / (1.0 - confidence**2))
    z = NormalDist().inv_cdf((1.0 + confidence) / 2)
    v = degrees
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
    )
