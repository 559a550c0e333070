"""Intervals of means, differences and of several runs on several tasks, beside tables and SciPy's results."""

import math

import pytest
import torch

from embodied.evaluation.means import (
    difference_interval,
    interquartile_interval,
    interquartile_mean,
    mean_interval,
    probability_of_improvement,
    student,
)


@pytest.mark.parametrize(
    ("degrees", "quantile"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (9, 2.2622), (49, 2.0096)]
)
def test_student_is_that_of_the_tables(degrees, quantile):
    assert student(degrees) == pytest.approx(quantile, rel=0.01 if degrees < 5 else 2e-4)
    assert student(49, 0.9) == pytest.approx(1.6766, rel=1e-4)


def test_the_interval_of_a_mean():
    mean, low, high = mean_interval(torch.tensor([[1.0, 2.0], [3.0, 6.0]]))
    assert mean == 3.0
    assert (low, high) == pytest.approx((-0.4374, 6.4374), abs=0.03)  # 3.1824 * 2.1602 / 2
    assert mean_interval(torch.tensor([7.0])) == (7.0, -math.inf, math.inf)
    with pytest.raises(ValueError, match="at least one"):
        mean_interval(torch.tensor([]))


def test_the_interval_of_a_difference_of_other_episodes():
    after, before = torch.arange(20.0), torch.tensor([3.0, 5.0, 4.0, 8.0, 2.0, 6.0, 5.0, 5.0])
    difference, low, high = difference_interval(after, before)
    assert difference == pytest.approx(4.75)
    assert (low, high) == pytest.approx((1.7180, 7.7820), abs=2e-3)  # Welch, 25.26 degrees of freedom
    assert difference_interval(after[:1], before)[1:] == (-math.inf, math.inf)
    assert difference_interval(torch.ones(3), torch.zeros(3)) == (1.0, 1.0, 1.0)


def test_intervals_hold_the_mean_as_often_as_they_say():
    draws = torch.randn(4000, 6, generator=torch.Generator().manual_seed(0)) + 1.0
    held = [low <= 1.0 <= high for _, low, high in map(mean_interval, draws)]
    assert 0.94 <= sum(held) / len(held) <= 0.96


def scored(generator: torch.Generator, logits: torch.Tensor, runs: int, together: float, apart: float) -> torch.Tensor:
    """Success rates of 50 episodes, [200, runs, tasks]: runs are good or bad at all tasks `together`, and at each."""
    shape = (200, runs, len(logits))
    shared = together * torch.randn(*shape[:2], 1, generator=generator)
    logits = logits + shared + apart * torch.randn(*shape, generator=generator)
    return torch.binomial(torch.full(shape, 50.0), torch.sigmoid(logits), generator=generator).double() / 50


def share(held: list[bool]) -> float:
    return sum(held) / len(held)


def test_the_interquartile_mean_leaves_out_a_quarter_at_either_end():
    scores = torch.tensor([[0.0, 1.0, 0.5, 0.4], [0.6, 0.9, 0.1, 0.2]])
    assert interquartile_mean(scores).tolist() == pytest.approx((0.2 + 0.4 + 0.5 + 0.6) / 4)
    assert interquartile_mean(torch.stack([scores, scores + 1])).tolist() == pytest.approx([0.425, 1.425])
    assert float(interquartile_mean(torch.tensor([[0.0], [0.3], [0.9]]))) == pytest.approx(0.4)  # too few to leave out
    stats = pytest.importorskip("scipy.stats")
    drawn = torch.rand(5, 7, generator=torch.Generator().manual_seed(0))
    assert float(interquartile_mean(drawn)) == pytest.approx(stats.trim_mean(drawn.flatten().numpy(), 0.25))


def test_where_nothing_is_left_out_the_interval_of_runs_is_students():
    scores = torch.tensor([[0.2], [0.5], [0.9]])
    assert interquartile_interval(scores) == pytest.approx(mean_interval(scores), abs=0.03)
    assert interquartile_interval(scores) == interquartile_interval(scores)
    assert interquartile_interval(scores[:1])[1:] == (-math.inf, math.inf)


@pytest.mark.parametrize("runs", [2, 3, 5])
@pytest.mark.parametrize(("together", "apart"), [(0.5, 0.7), (0.0, 0.7), (0.5, 0.0)])
def test_the_interval_of_runs_on_tasks_holds_what_many_runs_reach(runs, together, apart):
    generator, logits = torch.Generator().manual_seed(1), torch.linspace(-1.0, 3.0, 10)
    many = scored(generator, logits, 100, together, apart)
    truth = float(interquartile_mean(many.flatten(0, 1)))
    found = map(interquartile_interval, scored(generator, logits, runs, together, apart))
    held = [low <= truth <= high for _, low, high in found]
    assert 0.9 <= share(held) <= 0.995


def test_the_probability_of_improvement_is_counted_over_pairs_of_runs_and_averaged_over_tasks():
    after, before = torch.tensor([[0.9, 0.5], [0.4, 0.5]]), torch.tensor([[0.4, 0.6], [0.3, 0.5], [0.8, 0.1]])
    # first task: 3 of 3 and 1.5 of 3 pairs; second: 0 + 0.5 + 1 twice
    found, low, high = probability_of_improvement(after, before)
    assert found == pytest.approx((4.5 + 3.0) / 12)
    assert low < found < high
    other, other_low, other_high = probability_of_improvement(before, after)
    assert (other, other_low, other_high) == pytest.approx((1 - found, 1 - high, 1 - low), abs=1e-3)


def test_runs_that_are_all_better_are_not_certain_to_be():
    found, low, high = probability_of_improvement(torch.ones(3, 4), torch.zeros(3, 4))
    assert (found, high) == (1.0, 1.0)
    # (1 - p)^2 = 1.96^2 p (1 - p) (1 + 2 ((1 - p) / (2 - p) + p / (1 + p))) / 9 at the bound
    variance = low * (1 - low) * (1 + 2 * ((1 - low) / (2 - low) + low / (1 + low))) / 9
    assert (1 - low) ** 2 == pytest.approx(1.95996**2 * variance, rel=1e-3)
    assert probability_of_improvement(torch.zeros(3, 4), torch.ones(3, 4))[0] == 0.0


@pytest.mark.parametrize("runs", [(2, 2), (3, 3), (3, 5)])
@pytest.mark.parametrize(("logits", "together"), [([0.0, 1.0, 2.0], 0.5), ([1.0], 0.0)])
@pytest.mark.parametrize("ahead", [0.0, 2.0])
def test_the_interval_of_the_probability_of_improvement_holds_it(runs, logits, together, ahead):
    generator, logits = torch.Generator().manual_seed(1), torch.tensor(logits)
    many = scored(generator, logits + ahead, 5, together, 0.7), scored(generator, logits, 5, together, 0.7)
    truth = probability_of_improvement(*(each.flatten(0, 1)[:600] for each in many))[0]
    drawn = scored(generator, logits + ahead, runs[0], together, 0.7), scored(generator, logits, runs[1], together, 0.7)
    held = [low <= truth <= high for _, low, high in map(probability_of_improvement, *drawn)]
    assert share(held) >= 0.9
