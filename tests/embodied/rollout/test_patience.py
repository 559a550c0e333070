"""Episodes that run much longer than successes of their task are truncated."""

import torch
from tensordict import TensorDict

from embodied.environment import Transition
from embodied.rollout.patience import NEEDED, REMEMBERED, Patience


def transition(terminated: list[bool], success: list[bool] | None = None) -> Transition:
    ends, flags = torch.tensor(terminated), torch.zeros(len(terminated), dtype=torch.bool)
    reward = torch.zeros(len(ends), 1)
    won = ends if success is None else torch.tensor(success)
    return Transition(TensorDict({}, [len(ends)]), reward, reward == 0, ends, flags, won)


def begun(envs: int = 2) -> torch.Tensor:
    return torch.ones(envs, dtype=torch.bool)


def test_the_limit_is_a_multiple_of_the_longest_success() -> None:
    patience = Patience(torch.zeros(2, dtype=torch.int64), 1.5)
    patience.lengths = [[2] * (NEEDED - 1) + [4]]
    nobody = ~begun()
    for decision in range(1, 8):
        found = patience(begun() if decision == 1 else nobody, transition([False, False]))
        # 1.5 * 4 = 6 decisions
        assert found.truncated.tolist() == [decision >= 6] * 2
        assert found.events["stopped"].tolist() == [decision == 6] * 2
    again = torch.tensor([True, False])
    assert patience(again, transition([False, False])).truncated.tolist() == [False, True]  # until it begins anew


def test_lengths_of_successes_alone_are_remembered_by_task() -> None:
    patience = Patience(torch.tensor([0, 1]), 1.5)
    patience(begun(), transition([True, False]))
    patience(torch.tensor([True, False]), transition([False, False]))
    patience(~begun(), transition([True, True], [True, False]))
    assert patience.lengths == [[1, 2], []]
    patience(~begun(), transition([True, True]))  # frozen: its end was counted
    assert patience.lengths == [[1, 2], []]
    for _ in range(REMEMBERED):
        patience(begun(), transition([True, False]))
    assert patience.lengths[0] == [1] * REMEMBERED


def test_a_success_after_the_end_does_not_count() -> None:
    """A collector that waits for others goes on with a stopped episode's simulation."""
    patience = Patience(torch.zeros(1, dtype=torch.int64), 1.0)
    patience.lengths = [[1] * NEEDED]
    assert patience(begun(1), transition([False])).truncated.tolist() == [True]
    found = patience(~begun(1), transition([True]))
    assert (found.done.tolist(), found.success.tolist()) == ([True], [False])
    assert patience.lengths == [[1] * NEEDED]


def test_a_success_at_the_limit_is_one() -> None:
    patience = Patience(torch.zeros(1, dtype=torch.int64), 1.0)
    patience.lengths = [[1] * NEEDED]
    found = patience(begun(1), transition([True]))
    assert (found.truncated.tolist(), found.success.tolist()) == ([False], [True])
