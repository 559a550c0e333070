"""Thresholds, detections and their intervals, by hand."""

import pytest
import torch

from embodied.data.episodes import FAILED, SUCCEEDED
from embodied.errors import UserError
from embodied.evaluation.detection import Detection, choose_threshold, sustained, worst

P, N, U = 1, 0, -1


def test_sustained_scores_are_the_smallest_of_consecutive_frames_of_an_episode():
    score = torch.tensor([0.9, 0.8, 0.7, 0.9, 0.95, 0.2, 0.9])
    episode = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    assert sustained(score, episode, 1).tolist() == score.tolist()
    assert sustained(score, episode, 2).tolist() == pytest.approx([0.0, 0.8, 0.7, 0.0, 0.9, 0.2, 0.2])
    assert sustained(score, episode, 3).tolist() == pytest.approx([0.0, 0.0, 0.7, 0.0, 0.0, 0.2, 0.2])


EPISODE = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
LABEL = torch.tensor([N, P, N, P, N, N, N, N])
SCORE = torch.tensor([0.1, 0.95, 0.2, 0.75, 0.6, 0.3, 0.8, 0.4])
"""The largest negative scores of the four episodes are 0.1, 0.2, 0.6 and 0.8."""


@pytest.mark.parametrize(
    ("most", "threshold"),
    [
        (0.0, (0.8 + 0.95) / 2),  # 0.8 is rejected; the smallest positive score above it is 0.95
        (0.24, (0.8 + 0.95) / 2),  # less than one of four episodes
        (0.25, (0.6 + 0.75) / 2),  # one episode may end wrongly
        (0.5, 0.5),  # (0.2 + 0.75) / 2 is below the least threshold
        (1.0, 0.5),
    ],
)
def test_the_smallest_threshold_with_few_enough_false_positives(most: float, threshold: float):
    assert choose_threshold(SCORE, LABEL, EPISODE, 1, most) == pytest.approx(threshold)


def test_no_threshold_is_better_than_one_that_detects_nothing():
    with pytest.raises(UserError, match=r"a negative frame has the score 0\.990"):
        choose_threshold(SCORE.index_fill(0, torch.tensor(6), 0.99), LABEL, EPISODE, 1, 0.0)


def test_an_unknown_frame_is_neither_right_nor_wrong():
    label = LABEL.index_fill(0, torch.tensor(6), U)
    assert choose_threshold(SCORE, label, EPISODE, 1, 0.0) == pytest.approx((0.6 + 0.75) / 2)


def test_errors_by_frame_and_by_episode_by_hand():
    success = torch.tensor([SUCCEEDED, SUCCEEDED, FAILED, FAILED], dtype=torch.int8)
    detection = Detection.of(SCORE, LABEL, EPISODE, success, 0.78, 1)
    assert detection.false_positive.tolist() == [False, False, False, True]
    assert detection.missed.tolist() == [False, True, False, False]  # 0.75 is below
    summary = detection.summary()
    assert summary["frame_accuracy"]["count"] == 6
    assert summary["frame_accuracy"]["total"] == 8
    # Wilson, z = 1.959964, n = 4, p = 0.5: centre 0.5, half width z sqrt(1/16 + z^2/64) / (1 + z^2/4)
    assert summary["episode_accuracy"] == {
        "rate": 0.5,
        "low": pytest.approx(0.150039, abs=1e-5),
        "high": pytest.approx(0.849961, abs=1e-5),
        "count": 2,
        "total": 4,
    }
    assert summary["false_positives_per_episode"]["rate"] == 0.25
    assert summary["false_positives_of_failures"]["rate"] == 0.5
    assert summary["missed_successes"]["rate"] == 0.5


def test_a_rate_of_no_episodes_is_unknown():
    success = torch.tensor([SUCCEEDED, SUCCEEDED], dtype=torch.int8)
    summary = Detection.of(SCORE[:4], LABEL[:4], EPISODE[:4], success, 0.7, 1).summary()
    assert summary["false_positives_of_failures"] is None
    assert summary["episode_accuracy"]["rate"] == 1.0


def test_two_consecutive_frames_are_required():
    success = torch.tensor([FAILED, FAILED, FAILED, FAILED], dtype=torch.int8)
    negative = torch.zeros(8, dtype=torch.int64)
    detection = Detection.of(SCORE, negative, EPISODE, success, 0.3, 2)
    assert detection.false_positive.tolist() == [False, False, True, True]  # 0.6, 0.3 and 0.8, 0.4


def test_a_threshold_for_two_consecutive_frames():
    score = torch.tensor([0.9, 0.6, 0.9, 0.2, 0.8, 0.9, 0.95])
    label = torch.tensor([N, N, N, N, N, P, P])
    episode = torch.tensor([0, 0, 0, 0, 1, 1, 1])
    # sustained: 0, 0.6, 0.6, 0.2 and 0, 0.8, 0.9: the single peaks of 0.9 are no detections
    assert choose_threshold(score, label, episode, 2, 0.0) == pytest.approx(0.7)
    with pytest.raises(UserError, match=r"the score 0\.900"):
        choose_threshold(score.index_fill(0, torch.tensor(6), 0.9), label, episode, 1, 0.0)


def test_the_worst_frames_one_of_each_episode():
    false_positives, misses = worst(SCORE, LABEL, EPISODE, 0.25, 5)
    assert false_positives.tolist() == [6, 4]  # not 7 and 5, of the same episodes
    assert misses.tolist() == []
    false_positives, misses = worst(SCORE, LABEL, EPISODE, 0.96, 1)
    assert (false_positives.tolist(), misses.tolist()) == ([], [3])
