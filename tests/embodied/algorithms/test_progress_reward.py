"""Failures are worth more the nearer they came to what succeeded."""

import math

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.algorithms.rewards.progress_reward import (
    POINTS,
    ROWS,
    ProgressReward,
    centres,
    changes,
    learned,
    progress,
    sampled,
)
from embodied.rollout.groups import WholeRollout


def episodes(lengths: list[int], task: list[int]) -> tuple[WholeRollout, int]:
    """One episode for each environment, of `lengths` decisions, and the rollout's."""
    longest, envs = max(lengths), len(lengths)
    number = torch.arange(envs).expand(longest, -1).clone()
    for env, length in enumerate(lengths):
        number[length:, env] = -1
    last = (torch.tensor(lengths) - 1) * envs + torch.arange(envs)
    return WholeRollout(number, last, torch.arange(envs), torch.tensor(task), torch.arange(envs)), longest


def worth(distance: float) -> float:
    return 0.6 / (1.0 + math.exp(-10.0 * (0.5 - distance)))


def test_an_episode_is_represented_from_its_first_to_its_last_observation() -> None:
    whole, longest = episodes([3, 50], [0, 0])
    seen = TensorDict({"x": torch.arange(longest * 2.0).view(longest, 2, 1)}, [longest, 2])
    short, long = sampled(seen, whole, torch.tensor([0, 1]))["x"].squeeze(-1)
    assert short.unique().tolist() == [0.0, 2.0, 4.0]
    assert (long[0], long[-1]) == (1.0, 99.0)
    assert len(long.unique()) == POINTS
    assert (long.diff() > 0).all()


def test_what_counts_is_the_change_since_the_beginning_of_all_numbers() -> None:
    seen = TensorDict(
        {
            "b": torch.tensor([[[5.0], [7.0]]]),
            "a": torch.tensor([[[1.0, 1.0], [1.0, 4.0]]]),
            "picture": torch.ones(1, 2, 3, dtype=torch.uint8),
        },
        [1, 2],
    )
    assert changes(seen).tolist() == [[0.0, 0.0, 0.0, 0.0, 3.0, 2.0]]


def test_clusters_are_chains_of_neighbours_and_what_is_alone_is_noise() -> None:
    won = torch.tensor([[0.0], [0.8], [0.4], [9.0], [5.0], [5.2]])
    assert sorted(centres(won).flatten().tolist()) == pytest.approx([0.4, 5.1])
    assert centres(won[[3]]).tolist() == [[9.0]]
    assert sorted(centres(won[[0, 3]]).flatten().tolist()) == [0.0, 9.0]


def test_failures_are_ranked_between_the_nearest_and_the_farthest() -> None:
    found = progress(torch.tensor([[1.0], [4.0], [2.0], [5.0]]), torch.tensor([[0.0], [0.0], [5.0], [5.0]]))
    assert found.tolist() == pytest.approx([worth(0.5), worth(0.5), worth(1.0), worth(0.0)])


def test_each_task_is_compared_with_its_own_successes() -> None:
    """Task 0: a success that moves by 1, failures by 0.9 and 0. Task 1 never succeeds."""
    whole, longest = episodes([4] * 5, [0, 0, 0, 1, 1])
    moved = torch.tensor([1.0, 0.9, 0.0, 1.0, 0.5])
    begun = torch.tensor([0.0, 5.0, 1.0, 0.0, 0.0])
    path = torch.linspace(0.0, 1.0, longest)[:, None, None] * moved[:, None] + begun[:, None]
    success = torch.tensor([True, False, False, False, False])
    reward = ProgressReward()(TensorDict({"x": path}, [longest, 5]), whole, success)
    assert reward.tolist() == pytest.approx([1.0, worth(0.0), worth(1.0), 0.0, 0.0])

    def only_last(observation: TensorDict) -> Tensor:
        return observation["x"][:, -1]

    other = ProgressReward(only_last)(TensorDict({"x": path}, [longest, 5]), whole, success)
    assert other.tolist() == pytest.approx([1.0, worth(1.0), worth(0.0), 0.0, 0.0])  # by where they end


def test_what_a_policy_sees_counts_where_its_features_do() -> None:
    """More episodes than are encoded together; the features are twice the observation and a constant."""

    class Seeing:
        device = torch.device("cpu")

        def features(self, observation: TensorDict) -> Tensor:
            assert len(observation) <= ROWS
            return torch.cat((2.0 * observation["x"], torch.ones(len(observation), 1)), 1)

    x = torch.rand(20, POINTS, 1)
    found = learned(Seeing())(TensorDict({"x": x}, [20, POINTS])).view(20, POINTS, 2)
    torch.testing.assert_close(found[..., :1], 2.0 * (x - x[:, :1]))
    assert not found[..., 1].any()
