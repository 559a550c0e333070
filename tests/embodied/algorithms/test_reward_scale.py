"""The reward scale: by hand, resumed, and with rare rewards at first."""

import copy
import math
from dataclasses import replace

import pytest
import torch

from embodied.algorithms.rewards.reward_scale import RewardScale
from embodied.rollout.rollout import Collector, Rollout
from policies.mlp import MLPConfig
from tests.embodied.reach import Reach


def rollout(reward: list[list[float]], executed: list[int], terminated: list[bool], truncated: list[bool]) -> Rollout:
    """Decisions of one environment, chunks of two."""
    env = Reach(1)
    policy = MLPConfig(hidden=[4]).build(env.contract)
    policy.fit(Reach(8).reset(starts=torch.arange(8)), torch.zeros(1, 1))
    found = Collector(env, policy, torch.Generator().manual_seed(0)).collect(len(reward))
    return replace(
        found,
        reward=torch.tensor(reward).unsqueeze(1),
        executed=torch.arange(2) < torch.tensor(executed).view(-1, 1, 1),
        terminated=torch.tensor(terminated).unsqueeze(1),
        truncated=torch.tensor(truncated).unsqueeze(1),
    )


def running(*reward: float) -> Rollout:
    """One episode that goes on, with rewards for the first action of each decision."""
    none = [False] * len(reward)
    return rollout([[each, 0.0] for each in reward], [2] * len(reward), none, none)


def test_by_hand() -> None:
    scale = RewardScale(0.9)
    assert scale() == 1.0
    scale.add(
        rollout(
            [[0.0, 2.0], [2.0, 0.0], [0.0, 0.0], [-2.0, 0.0], [-2.0, 0.0], [-2.0, 0.0]],
            [2, 1, 2, 2, 2, 2],
            [False, True, False, False, False, False],
            [False, False, True, False, False, False],
        )
    )
    # .9 * 2 and .81 * 2; 2 ends the episode; nothing until its limit; -2 three times
    returns = torch.tensor([3.42, 2.0, 0.0, -2.0 - 0.81 * 3.62, -3.62, -2.0])
    assert scale() == pytest.approx(1.0 / float(returns.std(correction=0)))
    resumed = RewardScale(0.9)
    resumed.load_state_dict(copy.deepcopy(scale.state_dict()))
    for each in (scale, resumed):
        each.add(running(0.0, 2.0))
    returns = torch.cat((returns, torch.tensor([1.62, 2.0])))
    assert resumed() == scale() == pytest.approx(1.0 / float(returns.std(correction=0)))


@pytest.mark.parametrize("reward", [1e9, math.inf])
def test_the_reward_of_a_simulation_that_diverged_does_not_count(reward: float) -> None:
    scale, other = RewardScale(0.9), RewardScale(0.9)
    blown_up = running(0.0, 2.0, reward, -2.0)
    diverged = torch.tensor([False, False, True, False]).unsqueeze(1)
    scale.add(replace(blown_up, events={"diverged": diverged}))
    other.add(running(0.0, 2.0, 0.0, -2.0))
    assert scale() == other()


def test_a_rare_reward_is_not_a_small_one() -> None:
    scale = RewardScale(0.9)
    for _ in range(20):
        scale.add(running(*[0.0] * 50))
    assert scale() == 1.0
    scale.add(running(0.0, 5.0))
    assert scale() == pytest.approx(0.2)
    scale.add(running(5.0, 10.0))
    assert scale() == pytest.approx(1.0 / math.sqrt(50.0))


def test_rewards_that_never_differ_are_scaled_by_their_size() -> None:
    scale = RewardScale(0.9)
    for _ in range(3):
        scale.add(running(1e-3))
    assert scale() == pytest.approx(1e3)
