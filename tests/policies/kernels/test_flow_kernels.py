"""Kernels against numbers computed by hand and against the marginals they must keep."""

import math

import pytest
import torch

from policies.kernels.flow import (
    TimeGrid,
    flow_noise_std,
    flow_sde_step,
    gaussian_entropy,
    gaussian_log_prob,
    gaussian_velocity,
    guided_velocity,
    ode_step,
)

GRID = TimeGrid(4)


def scalar(value: float) -> torch.Tensor:
    return torch.full((1, 1, 1), value)


def test_standard_deviations_of_four_steps_at_noise_level_one_half() -> None:
    # sqrt(1/4) * .5 * sqrt(t / (1 - t)) at t = 1 (denominator 1 - .75), .75, .5, .25
    index = torch.arange(4)
    _, std = flow_sde_step(torch.zeros(4, 1, 1), torch.zeros(4, 1, 1), index, GRID, 0.5)
    expected = [0.5, 0.25 * math.sqrt(3), 0.25, 0.25 / math.sqrt(3)]
    assert std.flatten().tolist() == pytest.approx(expected, rel=1e-6)


def test_mean_by_hand() -> None:
    # t = .5: sigma^2 = .25; x - .25 v - .25 * .25 / (2 * .5) * (x + .5 v) with x = 2, v = 1
    mean, _ = flow_sde_step(scalar(2.0), scalar(1.0), torch.tensor([2]), GRID, 0.5)
    assert mean.item() == pytest.approx(2.0 - 0.25 - 0.0625 * 2.5)


def test_mean_by_hand_away_from_the_middle() -> None:
    # t = .75: sigma^2 = .75; x - .25 v - .75 * .25 / (2 * .75) * (x + .25 v)
    mean, _ = flow_sde_step(scalar(2.0), scalar(1.0), torch.tensor([1]), GRID, 0.5)
    assert mean.item() == pytest.approx(2.0 - 0.25 - 0.125 * 2.25)


def test_entropy_and_log_probability_are_those_of_the_normal_distribution() -> None:
    x, mean, std = torch.randn(20), torch.randn(20), torch.rand(20) + 0.1
    normal = torch.distributions.Normal(mean, std)
    torch.testing.assert_close(gaussian_entropy(std), normal.entropy())
    torch.testing.assert_close(gaussian_log_prob(x, mean, std), normal.log_prob(x))


@pytest.mark.parametrize("deviation", [0.2, 1.0, 1.5])
def test_the_flow_of_normal_actions_ends_in_their_deviation(deviation: float) -> None:
    grid, x = TimeGrid(1000), torch.tensor([[[1.0]]])
    for step in range(grid.steps):
        t = grid.times(torch.tensor([step])).view(-1, 1, 1)
        x = ode_step(x, gaussian_velocity(x, t, deviation), grid)
    assert x.item() == pytest.approx(deviation, rel=0.01)


def test_no_noise_is_the_ode() -> None:
    x, v = torch.randn(4, 3, 2), torch.randn(4, 3, 2)
    mean, std = flow_sde_step(x, v, torch.arange(4), GRID, 0.0)
    torch.testing.assert_close(mean, ode_step(x, v, GRID))
    assert not std.any()


MEANS, SPREAD = (-1.0, 0.8), 0.25
"""Actions of the closed form: one of two normal distributions, equally often."""


def mixture_velocity(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """E[noise - action | x_t = x], which a perfect network predicts.

    Each half of x_t = t noise + (1 - t) action is normal, with mean (1 - t) m and variance t^2 + (1 - t)^2 s^2.
    """
    variance = t.square() + (1.0 - t).square() * SPREAD**2
    means = torch.tensor(MEANS)
    apart = x.unsqueeze(-1) - (1.0 - t).unsqueeze(-1) * means
    share = (-0.5 * apart.square() / variance.unsqueeze(-1)).softmax(-1)
    # cov(noise - action, x_t) = t - (1 - t) s^2
    each = (t - (1.0 - t) * SPREAD**2).unsqueeze(-1) / variance.unsqueeze(-1) * apart - means
    return (share * each).sum(-1)


@pytest.mark.parametrize("noise_level", [0.5, 1.0])
def test_stochastic_steps_keep_the_marginals_of_the_ode(noise_level: float) -> None:
    """All of 1000 steps are noisy; samples are distributed as t noise + (1 - t) action, during and at the end."""
    torch.manual_seed(0)
    grid, count = TimeGrid(1000), 10_000
    x = torch.randn(count, 1, 1)
    for step in range(1000):
        index = torch.full((count,), step)
        velocity = mixture_velocity(x, grid.times(index).view(-1, 1, 1))
        mean, std = flow_sde_step(x, velocity, index, grid, noise_level)
        x = mean + std * torch.randn_like(x)
        if step + 1 in (100, 500, 800, 1000):
            t = 1.0 - (step + 1) / 1000
            actions = torch.tensor(MEANS)[torch.arange(count) % 2] + SPREAD * torch.randn(count)
            expected = t * torch.randn(count) + (1.0 - t) * actions
            shares = torch.linspace(0.05, 0.95, 10)
            apart = x.flatten().quantile(shares) - expected.quantile(shares)
            assert apart.abs().max() < 0.07, t
            assert float(x.std() / expected.std()) == pytest.approx(1.0, abs=0.03), t


def test_ode_carries_noise_to_the_action_along_a_straight_path() -> None:
    action, noise = torch.randn(1, 3, 2), torch.randn(1, 3, 2)
    x = noise
    for _ in range(4):
        x = ode_step(x, noise - action, GRID)
    torch.testing.assert_close(x, action)


def test_log_prob_by_hand() -> None:
    value = gaussian_log_prob(scalar(1.0), scalar(0.5), scalar(0.25))
    assert value.item() == pytest.approx(-2.0 - math.log(0.25) - 0.5 * math.log(2 * math.pi))


def test_learned_deviation_stays_in_its_range() -> None:
    std = flow_noise_std(torch.tensor([-50.0, 0.0, 50.0]), 0.08, 0.16)
    assert std.tolist() == pytest.approx([0.08, math.sqrt(0.08 * 0.16), 0.16], rel=1e-5)


@pytest.mark.parametrize(("time", "weight"), [(1.0, 5.0), (0.5, 2.0), (0.25, 10 / 3), (0.9, 82 / 9)])
def test_guidance_against_a_linear_field_by_hand(time: float, weight: float) -> None:
    """With u = M x the chunk is a = (I - t M) x, so its Jacobian is I - t M."""
    generator = torch.Generator().manual_seed(0)
    matrix, x, target = (torch.randn(*shape, generator=generator) for shape in ((4, 4), (3, 4, 1), (3, 4, 1)))
    mask = torch.tensor([1.0, 0.5, 0.0, 0.0]).expand(3, -1).unsqueeze(-1)
    found = guided_velocity(lambda x: matrix @ x, x, time, target, mask, 5.0)
    jacobian = torch.eye(4) - time * matrix
    pull = jacobian.T @ (mask * (target - jacobian @ x))
    torch.testing.assert_close(found, matrix @ x - min(weight, 5.0) * pull)
    assert not found.requires_grad
