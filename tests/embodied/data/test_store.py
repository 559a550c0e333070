"""The store of experience: its views against values by hand and against a plain list of decisions."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from embodied.data.episodes import FAILED, SUCCEEDED, UNKNOWN, Episodes
from embodied.data.store import EpisodeStore
from embodied.errors import UserError
from embodied.rollout.memory import STARTED
from embodied.rollout.rollout import Collector, Rollout
from embodied.saving.tree import load_tree, save_tree
from tests.embodied.reach import Reach
from tests.embodied.rollout.test_rollout import Constant

DISCOUNT = 0.5


def row_of(numbers: Sequence[int]) -> torch.Tensor:
    return torch.tensor(numbers)


def rollout(x: Sequence[float], after: float, ends: dict[int, tuple[str, float, bool]], **changes: object) -> Rollout:
    """Decisions of one environment with observations `x` and rewards 1, 2, 4, ...; two steps each, one at `ends`.

    `ends` are the decisions that end an episode: how, the observation after them, and whether with success.
    """
    count = len(x)
    flags = {
        how: torch.tensor([[ends.get(t, ("",))[0] == how] for t in range(count)]) for how in ("terminated", "truncated")
    }
    done = flags["terminated"] | flags["truncated"]
    executed = torch.stack((torch.ones_like(done), ~done), -1)
    inside = [t for t in ends if t < count - 1]
    return (
        Rollout(
            observation=TensorDict({"x": torch.tensor(x).view(count, 1, 1)}, [count, 1]),
            last_observation=TensorDict({"x": torch.tensor([[after]])}, [1]),
            actions=torch.arange(3 * count).float().view(count, 1, 3, 1),
            sample=TensorDict({}, [count, 1]),
            log_prob=torch.zeros(count, 1, 1),
            reward=torch.stack((2.0 ** torch.arange(count), torch.zeros(count)), -1).unsqueeze(1),
            executed=executed,
            success=torch.tensor([[t in ends and ends[t][2]] for t in range(count)]),
            task_index=torch.tensor([7]),
            final_rows=torch.tensor(inside) if inside else None,
            final_observation=TensorDict({"x": torch.tensor([[ends[t][1]] for t in inside])}, [len(inside)])
            if inside
            else None,
            **flags,
        )
        if not changes
        else replace(rollout(x, after, ends), **changes)
    )


def table(batch: TensorDict) -> list[list[float]]:
    """Reward, carry and next observation of transitions."""
    return torch.stack((batch["reward"], batch["carry"], batch["next_observation", "x"][:, 0]), 1).tolist()


def test_transitions_by_hand() -> None:
    store = EpisodeStore(100)
    # a termination after three steps, a time limit after one, and an episode that goes on
    store.add(rollout([0.0, 1.0, 2.0, 3.0, 4.0], 5.0, {1: ("terminated", 1.5, True), 2: ("truncated", 2.5, False)}))
    rows = torch.arange(5)
    # discount^k for k executed steps: 1/4 after two, 1/2 after one
    assert table(store.transitions(rows, 1, DISCOUNT)) == [
        [1.0, 0.25, 1.0],
        [2.0, 0.0, 1.5],
        [4.0, 0.5, 2.5],
        [8.0, 0.25, 4.0],
        [16.0, 0.25, 5.0],
    ]
    expected = [
        [1.0 + 0.25 * 2.0, 0.0, 1.5],
        [2.0, 0.0, 1.5],
        [4.0, 0.5, 2.5],
        [8.0 + 0.25 * 16.0, 0.25 * 0.25, 5.0],
        [16.0, 0.25, 5.0],
    ]
    assert table(store.transitions(rows, 3, DISCOUNT)) == expected
    batch = store.transitions(torch.tensor([4, 1]), 3, DISCOUNT)
    assert batch["observation", "x"].flatten().tolist() == [4.0, 1.0]
    assert batch["actions"].flatten(1).tolist() == [[12.0, 13.0], [3.0, 4.0]]
    # the episode goes on: its return is still cut where the first rollout ended
    store.add(rollout([5.0, 6.0], 7.0, {0: ("terminated", 5.5, False)}))
    assert table(store.transitions(rows, 3, DISCOUNT)) == expected
    assert table(store.transitions(torch.tensor([5, 6]), 3, DISCOUNT)) == [[1.0, 0.0, 5.5], [2.0, 0.25, 7.0]]
    outcomes = store.decisions(torch.arange(7))["success"].tolist()
    assert outcomes == [SUCCEEDED, SUCCEEDED, FAILED, FAILED, FAILED, FAILED, UNKNOWN]


def test_rewards_inside_a_decision_are_discounted_by_control_step() -> None:
    store = EpisodeStore(100)
    reward = torch.tensor([[[1.0, 2.0]], [[4.0, 8.0]]])
    store.add(replace(rollout([0.0, 1.0], 2.0, {}), reward=reward))
    assert table(store.transitions(torch.arange(2), 2, DISCOUNT)) == [
        [1.0 + 0.5 * 2.0 + 0.25 * (4.0 + 0.5 * 8.0), 0.0625, 2.0],
        [8.0, 0.25, 2.0],
    ]


def test_chunks_go_on_across_rollouts_and_end_with_the_episode() -> None:
    store = EpisodeStore(100)
    store.add(rollout([0.0, 1.0], 2.0, {}))
    chunks = store.chunks(torch.tensor([0, 1]), 5)  # so far
    assert chunks["valid"].sum(1).tolist() == [4, 2]
    store.add(rollout([2.0, 3.0, 4.0], 5.0, {1: ("terminated", 3.5, True)}))
    chunks = store.chunks(torch.tensor([1, 3, 0]), 5)
    assert chunks["actions"].squeeze(-1).tolist() == [[3, 4, 0, 1, 3], [3, 3, 3, 3, 3], [0, 1, 3, 4, 0]]
    assert chunks["valid"].sum(1).tolist() == [5, 1, 5]
    assert chunks["observation", "x"].flatten().tolist() == [1.0, 3.0, 0.0]
    assert chunks["task_index"].tolist() == [7, 7, 7]
    assert store.chunks(torch.tensor([0]), 2)["actions"].squeeze(-1).tolist() == [[0, 1]]


def test_an_episode_is_overwritten_from_its_beginning() -> None:
    store = EpisodeStore(3)
    store.add(rollout([0.0, 1.0], 2.0, {}))
    store.add(rollout([2.0, 3.0], 3.5, {1: ("terminated", 3.5, True)}))  # takes the place of observation 0
    decisions = store.decisions(torch.arange(3))
    assert decisions["observation", "x"].flatten().tolist() == [3.0, 1.0, 2.0]
    assert decisions["success"].tolist() == [SUCCEEDED] * 3
    assert store.succeeded().tolist() == [1, 2, 0]
    chunks = store.chunks(torch.tensor([1]), 6)
    assert chunks["actions"].flatten().tolist() == [3, 4, 0, 1, 3, 3]
    assert chunks["valid"].sum() == 5
    assert table(store.transitions(torch.tensor([1, 2, 0]), 1, DISCOUNT)) == [
        [2.0, 0.25, 2.0],
        [1.0, 0.25, 3.0],
        [2.0, 0.0, 3.5],
    ]
    store.add(rollout([10.0, 11.0, 12.0, 13.0, 14.0], 15.0, {}))  # more than there is room for
    assert store.decisions(torch.arange(3))["observation", "x"].sort(0).values.flatten().tolist() == [12.0, 13.0, 14.0]
    assert int((~store._free).sum()) == 1


def test_what_a_person_did_is_stored_and_returns_end_before_it() -> None:
    store = EpisodeStore(100)
    human = torch.zeros(3, 1, 2, dtype=torch.bool)
    human[1, 0, 1] = True
    store.add(replace(rollout([0.0, 1.0, 2.0], 3.0, {}), signals={"human": human}))
    decisions = store.decisions(torch.arange(3))
    assert decisions["human"].tolist() == [[False, False], [False, True], [False, False]]
    assert decisions["actions"].flatten(1).tolist() == [[0.0, 1.0], [3.0, 4.0], [6.0, 7.0]]
    assert table(store.transitions(torch.arange(3), 2, DISCOUNT)) == [
        [1.0, 0.25, 1.0],
        [2.0 + 0.25 * 4.0, 0.0625, 3.0],
        [4.0, 0.25, 3.0],
    ]


def test_a_decision_that_diverged_is_stored_but_not_drawn() -> None:
    store = EpisodeStore(100)
    diverged = torch.tensor([[False], [False], [True], [False]])
    ends = {2: ("truncated", -9.0, False)}
    store.add(replace(rollout([0.0, 1.0, 2.0, 3.0], 4.0, ends), events={"diverged": diverged}))
    assert store.decisions(torch.arange(4))["events", "diverged"].tolist() == [False, False, True, False]
    assert len(store) == 3
    assert store.draw(200, torch.Generator().manual_seed(0)).unique().tolist() == [0, 1, 3]
    # the observation before it is the last that is known
    assert table(store.transitions(torch.tensor([0, 1]), 3, DISCOUNT)) == [[1.5, 0.0625, 2.0], [2.0, 0.25, 2.0]]
    with pytest.raises(UserError, match="known rewards and next observations"):
        store.transitions(torch.tensor([1, 2]), 3, DISCOUNT)


def test_an_abandoned_episode_ends_truncated_with_an_unknown_outcome() -> None:
    env = Reach(1, tasks=1, horizon=3)
    collector, store = Collector(env, Constant(env, -0.1), torch.Generator()), EpisodeStore(100)
    store.add(collector.collect(1))  # start 0, from .3 to .1
    collector.abandon()
    env.start[:] = 1  # start 2 follows: .4 succeeds after four steps
    store.add(collector.collect(2))
    chunks = store.chunks(store.succeeded(), 3)
    torch.testing.assert_close(chunks["observation", "position"].flatten(), torch.tensor([0.4, 0.2]))
    decisions = store.decisions(torch.arange(3))
    assert decisions["success"].tolist() == [UNKNOWN, SUCCEEDED, SUCCEEDED]
    assert decisions["truncated"].tolist() == [True, False, False]
    batch = store.transitions(torch.tensor([0]), 2, DISCOUNT)
    torch.testing.assert_close(batch["next_observation", "position"], torch.tensor([[0.1]]))
    assert batch["carry"].tolist() == [0.25]


def successes(split: list[int]) -> TensorDict:
    env = Reach(1, tasks=1, horizon=3)
    collector, store = Collector(env, Constant(env, -0.1), torch.Generator()), EpisodeStore(100)
    for decisions in split:
        store.add(collector.collect(decisions))
    return store.chunks(store.succeeded(), 3)


def test_successful_episodes_become_chunks_wherever_rollouts_end() -> None:
    # start 0 (.3) succeeds after 3 steps; start 1 (-.35) fails; start 2 (.4) succeeds after 4
    chunks = successes([8])
    torch.testing.assert_close(chunks["observation", "position"].flatten(), torch.tensor([0.3, 0.1, 0.4, 0.2]))
    assert chunks["valid"].tolist() == [[True] * 3, [True, False, False], [True] * 3, [True, True, False]]
    torch.testing.assert_close(chunks["actions"], torch.full((4, 3, 1), -0.1))
    assert (chunks == successes([1, 3, 1, 3])).all()


def test_sequences_have_a_mask_of_beginnings() -> None:
    store = EpisodeStore(100)
    store.add(rollout([0.0, 1.0, 2.0], 3.0, {1: ("terminated", 1.5, True)}))
    store.add(rollout([3.0, 4.0], 5.0, {1: ("truncated", 4.5, False)}))
    sequences = store.sequences(torch.tensor([0, 1, 3]), 3)
    assert sequences.batch_size == (3, 3)
    assert sequences["observation", "x"].squeeze(-1).t().tolist() == [[0, 1, 2], [1, 2, 3], [3, 4, 4]]
    started = sequences["observation", STARTED].t().tolist()
    assert started == [[True, False, True], [False, True, False], [False, False, False]]
    assert sequences["valid"].t().tolist() == [[True] * 3, [True] * 3, [True, True, False]]
    assert sequences["reward"][..., 0].t()[0].tolist() == [1.0, 2.0, 4.0]
    store.add(rollout([6.0], 7.0, {}))
    assert store.sequences(torch.tensor([4]), 2)["observation", "x"].flatten().tolist() == [4.0, 6.0]
    assert store.sequences(torch.tensor([4]), 2)["observation", STARTED].flatten().tolist() == [False, True]


def demonstration(length: int, **options: object) -> Episodes:
    x = torch.arange(length).float().unsqueeze(1)
    return Episodes.of(TensorDict({"x": x}, [length]), 10.0 * x, task_index=3, **options)


def final(x: float) -> TensorDict:
    return TensorDict({"x": torch.tensor([x])}, [])


def test_transitions_of_demonstrations_by_hand() -> None:
    store = EpisodeStore(100)
    reward = torch.tensor([1.0, 2.0, 4.0])
    store.add_episodes(demonstration(3, reward=reward, final_observation=final(9.0)), executed=2)
    store.add_episodes(demonstration(3, success=False, reward=reward, final_observation=final(8.0)))
    batch = store.transitions(torch.arange(6), 1, DISCOUNT)
    # chunks of two steps from every observation; the second episode did not terminate
    assert table(batch)[:3] == [[2.0, 0.25, 2.0], [4.0, 0.0, 9.0], [4.0, 0.0, 9.0]]
    assert table(batch)[3:] == [[2.0, 0.25, 2.0], [4.0, 0.25, 8.0], [4.0, 0.5, 8.0]]
    assert batch["actions"].squeeze(-1)[:3].tolist() == [[0.0, 10.0], [10.0, 20.0], [20.0, 20.0]]
    assert table(store.transitions(torch.tensor([0]), 2, DISCOUNT)) == [[2.0 + 0.25 * 4.0, 0.0, 9.0]]
    assert store.succeeded().tolist() == [0, 1, 2]
    ends = store.decisions(torch.arange(6))
    assert ends["success"].tolist() == [SUCCEEDED] * 3 + [FAILED] * 3
    assert ends["terminated"].tolist() == [False, True, True, False, False, False]
    assert ends["truncated"].tolist() == [False, False, False, False, True, True]
    assert store.chunks(torch.tensor([0]), 4)["actions"].flatten().tolist() == [0.0, 10.0, 20.0, 20.0]
    sequences = store.sequences(torch.tensor([0]), 2)["observation"]
    assert sequences["x"].flatten().tolist() == [0.0, 2.0]
    assert sequences[STARTED].flatten().tolist() == [True, False]
    assert store.sequences(torch.tensor([1]), 2)["valid"].flatten().tolist() == [True, False]


def test_successes_of_demonstrations_and_rollouts_are_in_the_order_of_their_ends() -> None:
    store = EpisodeStore(100)
    success = {1: ("terminated", 1.5, True)}
    store.add(rollout([0.0], 1.0, {}))
    store.add_episodes(Episodes.join([demonstration(2), demonstration(1)]))
    store.add(rollout([10.0, 11.0, 12.0], 13.0, success))
    store.add_episodes(demonstration(1))
    assert store.succeeded().tolist() == [1, 2, 3, 0, 4, 5, 7]  # the first decision, of an episode that then succeeds


def test_frozen_environments_decide_nothing() -> None:
    frozen = rollout([0.0, 1.0, 2.0], 3.0, {0: ("terminated", 0.5, True)})
    executed = frozen.executed.clone()
    executed[1] = False
    store = EpisodeStore(100)
    store.add(replace(frozen, executed=executed))
    assert store.written == 2
    assert table(store.transitions(torch.arange(2), 1, DISCOUNT)) == [[1.0, 0.0, 0.5], [4.0, 0.25, 3.0]]
    assert store.sequences(torch.tensor([0]), 2)["observation", "x"].flatten().tolist() == [0.0, 2.0]


def test_outcomes_that_an_environment_does_not_define_are_unknown() -> None:
    store = EpisodeStore(100)
    store.add(replace(rollout([0.0], 1.0, {0: ("truncated", 1.0, False)}), has_success=False))
    assert store.decisions(torch.arange(1))["success"].tolist() == [UNKNOWN]


def test_beginnings_follow_from_the_steps_of_the_episode() -> None:
    store = EpisodeStore(100)
    steps = torch.tensor([[9.0], [11.0], [2.0]])  # the first episode began before the store
    store.add(replace(rollout([0.0, 1.0, 2.0], 3.0, {1: ("truncated", 1.5, False)}), episode_steps=steps))
    assert store.sequences(torch.tensor([0]), 3)["observation", STARTED].flatten().tolist() == [False, False, True]


def test_an_unknown_reward_is_refused() -> None:
    store = EpisodeStore(100)
    store.add(rollout([0.0, 1.0], 2.0, {}))
    store.add_episodes(demonstration(2))
    assert table(store.transitions(torch.tensor([0, 1]), 1, DISCOUNT))[0] == [1.0, 0.25, 1.0]
    with pytest.raises(UserError, match="known rewards"):
        store.transitions(torch.tensor([0, 2]), 1, DISCOUNT)
    assert store.chunks(torch.tensor([2]), 2)["actions"].flatten().tolist() == [0.0, 10.0]  # to imitate
    again = EpisodeStore(100)
    again.load_state_dict(copy.deepcopy(store.state_dict()))
    with pytest.raises(UserError, match="known rewards"):
        again.transitions(torch.tensor([0, 2]), 1, DISCOUNT)


def test_an_episode_without_a_final_observation_is_bootstrapped_before_its_last_decision() -> None:
    store = EpisodeStore(100)
    reward = torch.tensor([1.0, 2.0, 4.0])
    store.add_episodes(demonstration(3, success=False, reward=reward))
    store.add_episodes(demonstration(3, success=True, reward=reward))  # terminated: nothing follows
    assert len(store) == 5
    assert table(store.transitions(torch.tensor([0, 1]), 3, DISCOUNT)) == [[2.0, 0.25, 2.0], [2.0, 0.5, 2.0]]
    assert store.transitions(torch.tensor([3]), 3, DISCOUNT)["carry"].tolist() == [0.0]
    with pytest.raises(UserError, match="next observations"):
        store.transitions(torch.tensor([2]), 3, DISCOUNT)


def test_only_the_last_decisions_of_demonstrations_fit() -> None:
    store = EpisodeStore(3)
    episodes = Episodes.join(
        [demonstration(2, final_observation=final(7.0)), demonstration(2, final_observation=final(9.0))]
    )
    store.add_episodes(episodes)
    assert store.decisions(torch.arange(3))["observation", "x"].flatten().tolist() == [1.0, 0.0, 1.0]
    assert store.chunks(torch.arange(3), 2)["valid"].sum(1).tolist() == [1, 2, 1]
    assert store.decisions(torch.arange(3), "success")["success"].tolist() == [SUCCEEDED] * 3


def test_what_does_not_fit_the_store_is_refused() -> None:
    sparse = demonstration(4)
    sparse = replace(sparse, observation=sparse.observation[::2], first=torch.tensor([0, 2]))
    EpisodeStore(9).add_episodes(sparse, executed=2)
    with pytest.raises(UserError, match="an observation after every 1 steps"):
        EpisodeStore(9).add_episodes(sparse, executed=1)
    store = EpisodeStore(9)
    store.add(rollout([0.0], 1.0, {}))
    other = demonstration(2)
    with pytest.raises(UserError, match=r"expected observation\.x \[1\] as in the store, got observation\.y \[1\]"):
        store.add_episodes(replace(other, observation=other.observation.rename_key_("x", "y")))
    with pytest.raises(UserError, match=r"expected .*reward \[2\].* as in the store, got .*reward \[1\]"):
        store.add_episodes(demonstration(2), executed=1)  # torch would repeat the action and its reward
    with pytest.raises(UserError, match=r"expected nothing more as in the store, got advantage \[\]"):
        store.add(rollout([0.0], 1.0, {}), advantage=torch.zeros(1, 1))  # unknown of earlier decisions
    without_x = replace(rollout([0.0], 1.0, {}), last_observation=TensorDict({}, [1]))
    with pytest.raises(UserError, match=r"expected x \[1\] as in the store, got nothing more"):
        store.add(without_x)
    with pytest.raises(UserError, match="of an earlier release"):
        store.load_state_dict({"written": 3, "rows": None})
    with pytest.raises(UserError, match="expected a replay with capacity 5, got one with 9"):
        EpisodeStore(5).load_state_dict(store.state_dict())


@dataclass
class Decision:
    """A decision in the plain list."""

    env: int
    x: float
    actions: list[float]
    reward: list[float]
    terminated: bool
    cut: bool
    known: bool
    after: float  # observation
    continues: bool = True
    success: int = UNKNOWN


def random_rollout(draw: torch.Generator, began: torch.Tensor, decisions: int, executed: int, extra: float) -> Rollout:
    """Random endings, people and divergences; `began` [N] are the steps of running episodes, updated in place."""
    shape = (decisions, len(began))
    terminated, truncated, diverged, human = (torch.rand(shape, generator=draw) < p for p in (0.2, 0.15, 0.05, 0.1))
    truncated = truncated | diverged
    done = terminated | truncated
    count = torch.randint(1, executed + 1, shape, generator=draw).where(done, torch.tensor(executed))
    steps = torch.zeros(shape)
    for t in range(decisions):
        steps[t] = began + count[t]
        began.copy_(steps[t] * ~done[t])
    x = torch.rand(*shape, 1, generator=draw)
    rows = done[:-1].flatten().nonzero().squeeze(1)
    return Rollout(
        observation=TensorDict({"x": x}, shape),
        last_observation=TensorDict({"x": torch.full((len(began), 1), extra)}, [len(began)]),
        actions=torch.rand(*shape, executed + 1, 1, generator=draw),
        sample=TensorDict({}, shape),
        log_prob=torch.zeros(*shape, 1),
        reward=torch.rand(*shape, executed, generator=draw) * (torch.arange(executed) < count.unsqueeze(-1)),
        executed=torch.arange(executed) < count.unsqueeze(-1),
        terminated=terminated,
        truncated=truncated,
        success=torch.rand(shape, generator=draw) < 0.5,
        task_index=torch.arange(len(began)) % 3,
        signals={"human": human.unsqueeze(-1).expand(*shape, executed)},
        events={"diverged": diverged},
        episode_steps=steps,
        final_rows=rows,
        final_observation=TensorDict({"x": torch.rand(len(rows), 1, generator=draw)}, [len(rows)]),
    )


class PlainList:
    """All decisions one after the other, and what the views of a store should show of them."""

    def __init__(self) -> None:
        self.all: list[Decision] = []

    def add(self, rollout: Rollout) -> None:
        following, cut = rollout.next_observation()["x"][..., 0].tolist(), (rollout.cut | rollout.done).tolist()
        for t, n in torch.cartesian_prod(*map(torch.arange, rollout.done.shape)).tolist():
            executed = rollout.executed[t, n]
            begins = float(rollout.episode_steps[t, n]) == int(executed.sum())
            before = next((each for each in reversed(self.all) if each.env == n), None)
            if before is not None and begins:
                before.continues = False
            elif before is not None:
                before.after = float(rollout.observation["x"][t, n])
            decision = Decision(
                n,
                float(rollout.observation["x"][t, n]),
                rollout.actions[t, n, : len(executed), 0][executed].tolist(),
                rollout.reward[t, n].tolist(),
                bool(rollout.terminated[t, n]),
                cut[t][n] or t == len(cut) - 1,
                not bool(rollout.events["diverged"][t, n]),
                following[t][n],
            )
            self.all.append(decision)
            if rollout.done[t, n]:
                decision.continues = False
                for each in self.episode(len(self.all) - 1):
                    each.success = SUCCEEDED if rollout.success[t, n] else FAILED

    def episode(self, last: int) -> list[Decision]:
        """Decisions of the episode that ends with the `last`."""
        before = [each for each in self.all[:last] if each.env == self.all[last].env]
        episode = [self.all[last]]
        while before and before[-1].continues:
            episode.insert(0, before.pop())
        return episode

    def rest(self, number: int) -> list[Decision]:
        """The decision `number` and the following ones of its episode."""
        rest = [self.all[number]]
        for later in self.all[number + 1 :]:
            if later.env == rest[0].env:
                if not rest[-1].continues:
                    break
                rest.append(later)
        return rest

    def transition(self, number: int, steps: int) -> tuple[float, float, float]:
        """Return, carry and next observation."""
        total, carry = 0.0, 1.0
        for decision in self.rest(number)[:steps]:
            total += carry * sum(DISCOUNT**i * reward for i, reward in enumerate(decision.reward))
            carry *= DISCOUNT ** len(decision.actions)
            if decision.cut:
                break
        return total, carry * (not decision.terminated), decision.after


@pytest.mark.parametrize("trial", range(30))
def test_views_are_those_of_a_plain_list(trial: int) -> None:
    draw = torch.Generator().manual_seed(trial)
    envs, executed, horizon, steps = (int(torch.randint(1, high, (), generator=draw)) for high in (5, 4, 9, 5))
    capacity = int(torch.randint(3, 40, (), generator=draw))
    store, reference, began = EpisodeStore(capacity), PlainList(), torch.zeros(envs)
    for number in range(6):
        if number == 3:  # episodes are abandoned
            began.zero_()
        added = random_rollout(draw, began, int(torch.randint(1, 7, (), generator=draw)), executed, 10.0 + number)
        store.add(added)
        reference.add(added)
        if number == 4:
            saved, store = copy.deepcopy(store.state_dict()), EpisodeStore(capacity)
            store.load_state_dict(saved)
        skipped = max(0, added.done.numel() - capacity)
        if skipped:
            return  # rows are then counted without what never had room
        numbers = list(range(max(0, len(reference.all) - capacity), len(reference.all)))
        rows = torch.tensor(numbers) % capacity
        live = [reference.all[number] for number in numbers]
        decisions = store.decisions(rows)
        assert decisions["observation", "x"].flatten().tolist() == [each.x for each in live]
        assert decisions["success"].tolist() == [each.success for each in live]
        chunks = store.chunks(rows, horizon)
        for chunk, valid, number in zip(chunks["actions"][..., 0], chunks["valid"], numbers, strict=True):
            expected = [action for each in reference.rest(number) for action in each.actions][:horizon]
            assert valid.sum() == len(expected)
            assert chunk.tolist() == expected + expected[-1:] * (horizon - len(expected))
        known = [number for number, each in zip(numbers, live, strict=True) if each.known]
        assert len(store) == len(known)
        for transition, number in zip(
            table(store.transitions(torch.tensor(known, dtype=torch.int64) % capacity, steps, DISCOUNT)),
            known,
            strict=True,
        ):
            assert transition == pytest.approx(reference.transition(number, steps), abs=1e-6)
        # every observation is stored once: others than those of decisions only where no decision follows in an episode
        finals = sum(not each.continues for each in live) + sum(
            each.continues and not any(later.env == each.env for later in live[place + 1 :])
            for place, each in enumerate(live)
        )
        assert int((~store._free).sum()) == finals
    assert math.isfinite(float(store.draw(5, torch.Generator()).float().mean())) or not len(store)


def test_successes_are_in_the_order_of_their_ends() -> None:
    """By rollout, then by environment, then by time."""
    draw, began = torch.Generator().manual_seed(0), torch.zeros(4)
    store, expected, running = EpisodeStore(1000), [], [[] for _ in range(4)]
    for _ in range(8):
        added = random_rollout(draw, began, 3, 2, 9.0)
        store.add(added)
        for env in range(4):
            for t in range(3):
                running[env].append(float(added.observation["x"][t, env]))
                if added.done[t, env]:
                    expected += running[env] if added.success[t, env] else []
                    running[env].clear()
    assert expected
    rows = store.succeeded()
    assert store.decisions(rows)["observation", "x"].flatten().tolist() == expected


def test_a_resumed_store_draws_the_same(tmp_path: Path) -> None:
    draw, began = torch.Generator().manual_seed(1), torch.zeros(3)
    store = EpisodeStore(25)
    for _ in range(4):
        store.add(random_rollout(draw, began, 4, 2, 9.0))
    store.transitions(store.draw(3, draw), 3, DISCOUNT)
    save_tree(tmp_path / "store", store.state_dict())
    other = EpisodeStore(25)
    other.load_state_dict(load_tree(tmp_path / "store"))
    for number in range(3):
        added = random_rollout(draw, began, 4, 2, 9.0)
        batches = []
        for each in (store, other):
            each.add(added)
            rows = each.draw(64, torch.Generator().manual_seed(number))
            batches.append(each.transitions(rows, 3, DISCOUNT))
            batches.append(each.chunks(each.succeeded(), 5))
        assert (batches[0] == batches[2]).all()
        assert (batches[1] == batches[3]).all()


def test_memory_grows_with_what_is_stored() -> None:
    store = EpisodeStore(1000)
    store.add(rollout([0.0, 1.0, 2.0], 3.0, {}))
    assert len(store._rows) == 3
    store.add(rollout([3.0, 4.0], 5.0, {}))
    assert len(store._rows) == store.max_rows(5) == 10
    assert store.max_rows(600) == 1000
