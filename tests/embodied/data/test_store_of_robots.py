"""The store of experience of a robot: chunks that a person cut short, faults before the first action, interventions."""

from __future__ import annotations

from dataclasses import replace

import torch

from embodied.data.episodes import FAILED, UNKNOWN
from embodied.data.store import EpisodeStore
from embodied.rollout.rollout import Rollout
from tests.embodied.data.test_store import DISCOUNT, rollout, table


def held_at(decisions: Rollout, t: int) -> Rollout:
    """`decisions` in which a fault ends the episode at `t`, before anything is executed."""
    executed, reward, truncated = decisions.executed.clone(), decisions.reward.clone(), decisions.truncated.clone()
    executed[t], reward[t], truncated[t] = False, 0.0, True
    return replace(decisions, executed=executed, reward=reward, truncated=truncated)


def test_a_fault_before_an_action_ends_the_episode_at_the_decision_before() -> None:
    store = EpisodeStore(100)
    store.add(held_at(rollout([0.0, 1.0, 2.0, 3.0], 4.0, {}), 2))
    assert store.written == 3
    # the third decision, which executed nothing, is not stored: its observation follows the second
    assert table(store.transitions(torch.arange(3), 2, DISCOUNT)) == [
        [1.0 + 0.25 * 2.0, 0.0625, 2.0],
        [2.0, 0.25, 2.0],
        [8.0, 0.25, 4.0],
    ]
    decisions = store.decisions(torch.arange(3))
    assert decisions["truncated"].tolist() == [False, True, False]
    assert decisions["success"].tolist() == [FAILED, FAILED, UNKNOWN]
    assert store.chunks(torch.tensor([1]), 4)["valid"].sum() == 2
    assert store.completed == 1


def test_so_does_one_at_the_beginning_of_the_next_rollout() -> None:
    store = EpisodeStore(100)
    first = rollout([0.0, 1.0], 2.0, {})
    store.add(replace(first, episode_steps=torch.tensor([[2], [4]])))
    second = held_at(rollout([2.0, 3.0], 4.0, {}), 0)
    store.add(replace(second, episode_steps=torch.tensor([[4], [2]])))
    assert table(store.transitions(torch.arange(3), 1, DISCOUNT)) == [
        [1.0, 0.25, 1.0],
        [2.0, 0.25, 2.0],
        [2.0, 0.25, 4.0],
    ]
    assert store.decisions(torch.arange(3), "truncated")["truncated"].tolist() == [False, True, False]
    assert store.chunks(torch.tensor([0]), 6)["valid"].sum() == 4
    assert store.completed == 1


def test_a_rollout_in_which_nothing_was_executed_adds_nothing() -> None:
    store = EpisodeStore(100)
    nothing = rollout([0.0, 1.0], 2.0, {})
    nothing = replace(nothing, executed=torch.zeros_like(nothing.executed), reward=torch.zeros(2, 1, 2))
    store.add(rollout([0.0, 1.0], 2.0, {}))
    store.add(nothing)
    assert (store.written, len(store)) == (2, 2)
    store.add(rollout([2.0], 3.0, {}))
    assert table(store.transitions(torch.arange(3), 1, DISCOUNT))[1:] == [[2.0, 0.25, 2.0], [1.0, 0.25, 3.0]]


def test_chunks_and_returns_go_on_after_a_decision_that_was_cut_short() -> None:
    store = EpisodeStore(100)
    whole = rollout([0.0, 1.0, 2.0], 3.0, {})
    executed = whole.executed.clone()
    executed[1, 0, 1] = False  # handed back after one of two actions
    store.add(replace(whole, executed=executed))
    chunks = store.chunks(torch.tensor([0, 1]), 4)
    assert chunks["actions"].squeeze(-1).tolist() == [[0, 1, 3, 3], [3, 6, 7, 7]]  # a walk of two decisions
    assert chunks["valid"].tolist() == [[True, True, True, False], [True, True, True, False]]
    # discount^k for k executed steps: 1/4, 1/2, 1/4
    assert table(store.transitions(torch.arange(3), 2, DISCOUNT)) == [
        [1.0 + 0.25 * 2.0, 0.125, 2.0],
        [2.0 + 0.5 * 4.0, 0.125, 3.0],
        [4.0, 0.25, 3.0],
    ]


def test_interventions_are_rows_in_which_a_person_acted() -> None:
    store = EpisodeStore(4)
    assert store.intervened().tolist() == []
    human = torch.zeros(3, 1, 2, dtype=torch.bool)
    human[1, 0] = True
    store.add(replace(rollout([0.0, 1.0, 2.0], 3.0, {}), signals={"human": human}))
    assert store.intervened().tolist() == [1]
    restored = EpisodeStore(4)
    restored.load_state_dict(store.state_dict())
    assert restored.intervened().tolist() == [1]
    store.add(replace(rollout([3.0, 4.0, 5.0], 6.0, {}), signals={"human": ~human}))  # overwrites the first two
    assert store.decisions(store.intervened())["observation", "x"].flatten().tolist() == [5.0, 3.0]
