"""The threshold of a reflex: as few failures as possible at no lower score, counted from evaluations by hand."""

import math

import pytest
import torch

from embodied.environments.reflex import CUT
from embodied.errors import UserError
from embodied.evaluation.evaluation import EvaluationResult
from embodied.training.reflex import Validation, chosen_threshold, failed_episodes


def figures(threshold: float | None, score: float, failed: float) -> Validation:
    return Validation(threshold, score, failed, 0.0, 0.0, 100)


def test_the_threshold_with_the_fewest_failures_among_those_that_keep_the_score():
    results = [figures(None, 0.9, 0.1), figures(0.1, 0.8, 0.0), figures(0.2, 0.9, 0.05), figures(0.3, 0.95, 0.05)]
    assert chosen_threshold([*results, figures(0.5, 0.9, 0.1)]) == 0.3
    assert chosen_threshold([*results, figures(0.5, 0.91, 0.02)]) == 0.5


@pytest.mark.parametrize("result", [figures(0.1, 0.89, 0.0), figures(0.1, 0.9, 0.1)])
def test_no_threshold_is_chosen_where_none_helps_at_that_score(result: Validation):
    with pytest.raises(UserError, match="by hand"):
        chosen_threshold([figures(None, 0.9, 0.1), result])


def result() -> EvaluationResult:
    """Four episodes: a success, a collision, a time-out, and a success with a hold."""
    return EvaluationResult(
        ("drive",),
        torch.tensor([[True, False, False, True]]),
        torch.tensor([[9, 9, 9, 9]]),
        9,
        {"hold": torch.tensor([[0.0, 0.0, math.nan, 2.0]])},
        {CUT: torch.tensor([[False, True, True, False]])},
        True,
        None,
        {
            "collision": torch.tensor([[False, True, False, False]]),
            "time-out": torch.tensor([[False, False, True, False]]),
        },
        0,
    )


def test_a_time_out_is_no_failure_and_an_unknown_signal_is_one():
    assert failed_episodes(result()).tolist() == [[False, True, False, False]]
    assert failed_episodes(result(), ["hold"]).tolist() == [[False, True, True, True]]
    with pytest.raises(UserError, match="'force'"):
        failed_episodes(result(), ["force"])
    assert Validation.of(result(), 0.3, []) == Validation(0.3, 0.5, 0.25, 0.25, 0.5, 4)
