"""The scale of rewards: by hand, across rollouts, and where reward is rare at first."""

import copy
import math
from dataclasses import replace

import pytest
import torch

from embodied.algorithms.reward_scale import RewardScale
from embodied.rollout import Collector, Rollout
from policies.mlp import MLPConfig
from tests.embodied.reach import Reach


def rollout(reward: list[list[float]], executed: list[int], done: list[bool]) -> Rollout:
    """Decisions of one environment, chunks of two."""
    env = Reach(1)
    policy = MLPConfig(hidden=[4]).build(env.contract)
    policy.fit(Reach(8).reset(starts=torch.arange(8)), torch.zeros(1, 1))
    found = Collector(env, policy, torch.Generator().manual_seed(0)).collect(len(reward))
    ran = torch.arange(2) < torch.tensor(executed).view(-1, 1, 1)
    ended = torch.tensor(done).unsqueeze(1)
    return replace(
        found,
        reward=torch.tensor(reward).unsqueeze(1),
        executed=ran,
        terminated=ended,
        truncated=torch.zeros_like(ended),
    )


def test_by_hand() -> None:
    scale = RewardScale(0.5)
    assert scale() == 1.0
    scale.add(rollout([[0.0, 0.0], [2.0, 0.0], [0.0, 4.0]], [2, 2, 2], [False, False, False]))
    # nothing yet; 2; 2 * .25 + 4 * .5
    assert scale() == pytest.approx(math.sqrt(2 / (2.0**2 + 2.5**2)))
    scale.add(rollout([[8.0, 0.0], [0.0, 0.0], [-1.0, 0.0]], [1, 2, 2], [True, False, False]))
    # 2.5 * .5 + 8 after one action, with which the episode ends; nothing yet; -1
    assert scale() == pytest.approx(math.sqrt(4 / (2.0**2 + 2.5**2 + 9.25**2 + 1.0)))
    resumed = RewardScale(0.5)
    resumed.load_state_dict(copy.deepcopy(scale.state_dict()))
    more = rollout([[0.0, 1.0]], [2], [False])
    for each in (scale, resumed):
        each.add(more)
    assert resumed() == scale() == pytest.approx(math.sqrt(5 / (2.0**2 + 2.5**2 + 9.25**2 + 1.0 + 0.25**2)))


def test_rollouts_cut_anywhere_tell_the_same() -> None:
    whole, parts = RewardScale(0.9), RewardScale(0.9)
    rewards = torch.randn(6, 2, generator=torch.Generator().manual_seed(0)).tolist()
    executed, done = [2, 2, 1, 2, 2, 2], [False, False, True, False, False, False]
    whole.add(rollout(rewards, executed, done))
    for piece in (slice(0, 1), slice(1, 4), slice(4, 6)):
        parts.add(rollout(rewards[piece], executed[piece], done[piece]))
    assert parts() == pytest.approx(whole(), rel=1e-6)


def test_a_rare_reward_is_not_a_small_one() -> None:
    scale = RewardScale(0.9)
    for _ in range(20):
        scale.add(rollout([[0.0, 0.0]] * 50, [2] * 50, [False] * 50))
    scale.add(rollout([[5.0, 0.0]], [2], [True]))
    assert scale() == pytest.approx(0.2)
