"""Squashed Gaussian: what imitation leaves for soft actor-critic to learn on."""

import math

import torch
from tensordict import TensorDict

from embodied.algorithms.imitation.sft import SFTConfig
from embodied.contract import Contract, TensorSpec
from embodied.data.episodes import Episodes
from policies.squashed import SATURATED, SquashedConfig, SquashedPolicy

CONTRACT = Contract(
    {"position": TensorSpec((2,))}, TensorSpec((2,), low=(-0.5, -0.5), high=(0.5, 0.5)), 0.1, horizon=2, executed=2
)


def imitated(steps: int = 400) -> tuple[SquashedPolicy, Episodes]:
    """A policy that has imitated a proportional controller and a gripper, whose actions are the limits."""
    torch.manual_seed(0)
    position = torch.rand(64, 2) * 2.0 - 1.0
    actions = torch.stack((0.3 * position[:, 0], 0.5 * position[:, 1].sign()), 1)
    episodes = Episodes.of(TensorDict({"position": position}, [64]), actions)
    policy = SquashedConfig(hidden=[32, 32], initial_std=0.1).build(CONTRACT)
    policy.fit(episodes.observation, actions)
    SFTConfig(steps=steps, batch=32, learning_rate=1e-2).build(policy, torch.Generator().manual_seed(0)).fit(
        episodes, steps
    )
    return policy, episodes


def test_imitation_leaves_the_deviations_as_they_are_in_all_observations() -> None:
    policy, episodes = imitated()
    _, log_std = policy._gaussian(episodes.observation)
    torch.testing.assert_close(log_std, torch.full_like(log_std, math.log(0.1)), rtol=1e-3, atol=0.0)  # weight decay


def test_deterministic_actions_are_those_of_act_and_leave_the_deviations_alone() -> None:
    policy, episodes = imitated()
    actions = policy.actions(episodes.observation)
    torch.testing.assert_close(actions.detach(), policy.act(episodes.observation, deterministic=True).actions)
    actions.sum().backward()
    gradient = policy.actor[-1].weight.grad
    assert bool((gradient[:4].abs().sum(1) > 0).all())
    assert not bool(gradient[4:].any())
    assert {id(parameter) for parameter in policy.mean_parameters()} >= {id(each) for each in policy.actor.parameters()}


def test_imitated_actions_at_the_limits_keep_a_gradient_and_an_entropy() -> None:
    policy, episodes = imitated()
    mean, _ = policy._gaussian(episodes.observation)
    gripper = mean[:, 0, 1].detach()
    assert float(gripper.abs().quantile(0.9)) < SATURATED + 0.2
    assert float(torch.tanh(gripper.abs()).quantile(0.5)) > 0.95
    noise = torch.randn(64, 2, 2, generator=torch.Generator().manual_seed(0))
    _, log_prob = policy.sample(episodes.observation, noise)
    # of an element: that of a deviation of 0.1 before tanh, and at most log(1 - tanh(2.5 + 0.2)^2) = -4.0 less
    assert float(-log_prob.detach().mean()) > 4 * (0.5 * math.log(2.0 * math.pi * math.e * 0.01)) - 2 * 4.1 - 2 * 1.0


def test_means_far_beyond_the_limits_come_back() -> None:
    policy, _ = imitated(1)
    observation = TensorDict({"position": torch.zeros(4, 2)}, [4])
    actions, valid = torch.full((4, 2, 2), 0.5), torch.ones(4, 2, dtype=torch.bool)
    with torch.no_grad():
        policy.actor[-1].bias[:4] = 12.0
    optimiser = torch.optim.Adam(policy.actor.parameters(), 0.1)
    for _ in range(200):
        optimiser.zero_grad()
        policy.loss(observation, actions, valid).backward()
        optimiser.step()
    mean, _ = policy._gaussian(observation)
    assert float(mean.detach().max()) < SATURATED + 0.1
