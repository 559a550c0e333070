"""Student's and Welch's intervals, beside tables and SciPy's results."""

import math

import pytest
import torch

from embodied.evaluation.means import difference_interval, mean_interval, student


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
