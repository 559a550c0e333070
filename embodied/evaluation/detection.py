"""Detection of success in episodes by the scores of their frames: the threshold, errors and their intervals.

A success is detected at the first frame at which the last `frames` scores are all at least the threshold. The episode
ends there, so that an episode has at most one false positive. Letters: E episodes, F frames.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from embodied.data.episodes import SUCCEEDED
from embodied.data.success_frames import NEGATIVE, POSITIVE
from embodied.errors import UserError
from embodied.evaluation.evaluation import wilson

LEAST_THRESHOLD = 0.5
"""Smallest chosen threshold: below it, a frame is more like a failure than like a success."""


def sustained(score: Tensor, episode: Tensor, frames: int) -> Tensor:
    """Smallest score of the last `frames` frames of the same episode, [F]; 0 until there are as many.

    `score` and `episode` [F] are in the order of time.
    """
    result = score.clone()
    for back in range(1, frames):
        same = torch.zeros_like(result, dtype=torch.bool)
        same[back:] = episode[back:] == episode[:-back]
        # roll wraps around, where `same` is False
        result = torch.where(same, torch.minimum(result, score.roll(back)), 0.0)
    return result


def choose_threshold(score: Tensor, label: Tensor, episode: Tensor, frames: int, most: float) -> float:
    """Smallest threshold with false positives in at most a share `most` of the episodes.

    It is the mean of the largest sustained score that must be rejected and the smallest positive one above it, and at
    least `LEAST_THRESHOLD`. All arguments are [F] and of validation episodes.

    Raises:
        UserError: if no positive frame has a score above those that must be rejected.
    """
    numbers = episode.unique()
    score = sustained(score, episode, frames)
    # largest score of each episode's negative frames; an episode is a false positive if it reaches the threshold
    negative = torch.where(label == NEGATIVE, score, 0.0)
    highest = torch.stack([negative[episode == number].max() for number in numbers]).sort(descending=True).values
    allowed = math.floor(most * len(numbers) + 1e-9)
    rejected = float(highest[allowed]) if allowed < len(highest) else 0.0
    above = score[(label == POSITIVE) & (score > rejected)]
    if not len(above):
        raise UserError(
            f"no threshold detects a success with false positives in at most {most:.0%} of {len(numbers)} validation"
            f" episodes: a negative frame has the score {rejected:.3f}; use more steps, other observations, a"
            " larger gap or a larger false_positives"
        )
    return max(LEAST_THRESHOLD, (rejected + float(above.min())) / 2)


@dataclass(frozen=True, eq=False)
class Detection:
    """Errors of a classifier on E episodes; `correct` and `labelled` count its frames with a known label, by episode.

    `false_positive`, `missed` and `success` are [E] bool: a detection on a negative frame, a successful episode without
    any detection, and the outcome.
    """

    episodes: Tensor  # [E] indices
    success: Tensor
    false_positive: Tensor
    missed: Tensor
    correct: Tensor
    labelled: Tensor

    @staticmethod
    def of(score: Tensor, label: Tensor, episode: Tensor, success: Tensor, threshold: float, frames: int) -> Detection:
        """Errors of the scores [F] of frames; `success` has the outcome of all episodes, by index."""
        detected = sustained(score, episode, frames) >= threshold
        has_label = (label == POSITIVE) | (label == NEGATIVE)
        right = has_label & ((score >= threshold) == (label == POSITIVE))
        numbers = episode.unique()
        own = [episode == number for number in numbers]
        succeeded = success[numbers] == SUCCEEDED
        any_of = lambda flags: torch.stack([flags[mine].any() for mine in own])  # noqa: E731
        count = lambda flags: torch.stack([flags[mine].sum() for mine in own])  # noqa: E731
        return Detection(
            numbers,
            succeeded,
            any_of(detected & (label == NEGATIVE)),
            succeeded & ~any_of(detected),
            count(right),
            count(has_label),
        )

    def summary(self) -> dict[str, Any]:
        """JSON-ready rates, each with its count, total and Wilson's 95% interval; None without any episode of its kind.

        The frames of an episode are alike, so that the interval by frame is too narrow; that by episode is over
        independent episodes.
        """
        correct = ~(self.false_positive | self.missed)
        return {
            "frame_accuracy": rate(int(self.correct.sum()), int(self.labelled.sum())),
            "episode_accuracy": rate(int(correct.sum()), len(correct)),
            "false_positives_per_episode": rate(int(self.false_positive.sum()), len(correct)),
            "false_positives_of_failures": rate(
                int((self.false_positive & ~self.success).sum()), int((~self.success).sum())
            ),
            "missed_successes": rate(int(self.missed.sum()), int(self.success.sum())),
        }


def rate(count: int, total: int) -> dict[str, Any] | None:
    """Share `count` of `total` with its interval; None if the total is 0, and the rate therefore unknown."""
    if not total:
        return None
    low, high = wilson(count, total)
    return {"rate": count / total, "low": low, "high": high, "count": count, "total": total}


def worst(score: Tensor, label: Tensor, episode: Tensor, threshold: float, most: int) -> tuple[Tensor, Tensor]:
    """Frames of the worst false positives and of the worst misses, at most `most` each, and one of an episode."""
    positive = label == POSITIVE
    negative = label == NEGATIVE
    false_positives = _extreme(torch.where(negative & (score >= threshold), score, -1.0), episode, most)
    misses = _extreme(torch.where(positive & (score < threshold), 1.0 - score, -1.0), episode, most)
    return false_positives, misses


def _extreme(badness: Tensor, episode: Tensor, most: int) -> Tensor:
    """Frames of largest `badness` [F] that is not negative, worst first, one of each episode."""
    chosen: list[int] = []
    episodes = set()
    for frame in badness.argsort(descending=True, stable=True).tolist():
        if badness[frame] < 0 or len(chosen) == most:
            break
        if int(episode[frame]) not in episodes:
            episodes.add(int(episode[frame]))
            chosen.append(frame)
    return torch.tensor(chosen, dtype=torch.int64)
