"""Reward weights of a task reach its environments, and no others are taken."""

import pytest
import torch

from sims.quadrotor.task import QuadrotorTask


def first_reward(task: QuadrotorTask) -> torch.Tensor:
    env = task.environment(8, task.distributions[0], "train")
    env.reset()
    return env.step(torch.zeros(8, 1, 4)).reward


def test_reward_weights_are_those_of_the_task() -> None:
    plain, richer = QuadrotorTask(), QuadrotorTask(reward={"reward_alive": 4.0})
    assert torch.allclose(first_reward(richer) - first_reward(plain), torch.tensor(3.0))


def test_unknown_reward_weight_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown weight 'position'"):
        QuadrotorTask(reward={"position": 1.0})


def test_environments_run_where_they_are_asked_to() -> None:
    assert QuadrotorTask().environment(2, "disturbed", "train", device="cpu:0").device == torch.device("cpu:0")
