"""GAE over chunks against numbers computed by hand."""

import pytest
import torch

from embodied.algorithms.advantage import chunk_reward, gae


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values).unsqueeze(1)


def run(**changes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two decisions of two steps, discount 0.5, lambda 0.5."""
    arguments = {
        "reward": torch.tensor([[[1.0, 2.0]], [[0.0, 4.0]]]),
        "executed": torch.ones(2, 1, 2, dtype=torch.bool),
        "terminated": torch.zeros(2, 1, dtype=torch.bool),
        "truncated": torch.zeros(2, 1, dtype=torch.bool),
        "value": column(3.0, 5.0),
        "next_value": column(5.0, 8.0),
    }
    return gae(**(arguments | changes), discount=0.5, gae_lambda=0.5)


def test_chunk_reward_discounts_inside_the_chunk() -> None:
    assert chunk_reward(torch.tensor([[1.0, 2.0, 4.0]]), 0.5).item() == 1.0 + 1.0 + 1.0


def test_running_episode() -> None:
    # delta_1 = 0 + .5 * 4 + .25 * 8 - 5 = -1; delta_0 = 1 + .5 * 2 + .25 * 5 - 3 = .25; A_0 = .25 + .25 * .5 * -1
    advantage, returns = run()
    torch.testing.assert_close(advantage, column(0.125, -1.0))
    torch.testing.assert_close(returns, column(3.125, 4.0))


def test_termination_drops_the_bootstrap_and_cuts_the_recursion() -> None:
    # delta_0 = 2 - 3, and nothing of decision 1 reaches decision 0
    advantage, _ = run(terminated=torch.tensor([[True], [False]]))
    torch.testing.assert_close(advantage, column(-1.0, -1.0))


def test_time_limit_bootstraps_from_the_true_next_observation_and_cuts_the_recursion() -> None:
    # the final observation is worth 9, the next episode's first one (5) is not used: 2 + .25 * 9 - 3
    truncated = torch.tensor([[True], [False]])
    advantage, _ = run(truncated=truncated, next_value=column(9.0, 8.0))
    torch.testing.assert_close(advantage, column(1.25, -1.0))


def test_a_chunk_that_ended_early_discounts_by_what_it_executed() -> None:
    # only one step ran: delta_1 = 0 + .5 * 8 - 5
    executed = torch.tensor([[[True, True]], [[True, False]]])
    advantage, _ = run(executed=executed, reward=torch.tensor([[[1.0, 2.0]], [[0.0, 0.0]]]))
    assert advantage[1].item() == pytest.approx(-1.0)


def test_chunks_of_one_step_equal_ordinary_gae() -> None:
    torch.manual_seed(0)
    reward, value, following = torch.randn(5, 3), torch.randn(5, 3), torch.randn(5, 3)
    ended = torch.rand(5, 3) < 0.3
    advantage, _ = gae(
        reward.unsqueeze(-1),
        torch.ones(5, 3, 1, dtype=torch.bool),
        ended,
        torch.zeros_like(ended),
        value,
        following,
        discount=0.9,
        gae_lambda=0.8,
    )
    for env in range(3):
        carried = 0.0
        for t in reversed(range(5)):
            alive = 0.0 if ended[t, env] else 1.0
            delta = float(reward[t, env]) + 0.9 * alive * float(following[t, env]) - float(value[t, env])
            carried = delta + 0.9 * 0.8 * alive * carried
            assert advantage[t, env].item() == pytest.approx(carried, abs=1e-5)
