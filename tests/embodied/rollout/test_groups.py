"""Groups of episodes from one initial state are dealt and collected as a whole."""

from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict

from embodied.environment import Transition
from embodied.rollout.groups import GroupStarts, WholeEpisodes, WholeRollout
from embodied.rollout.rollout import Collector, Rollout
from policies.mlp import MLPConfig
from tests.embodied.counter import BLOWN, Counter
from tests.embodied.reach import Reach


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def dealt(starts: GroupStarts, finished: list[int]) -> list[int]:
    """Starts of the environments `finished`, counted from the first."""
    mask = torch.zeros(len(starts.task_index), dtype=torch.bool)
    mask[finished] = True
    found = starts(mask, torch.zeros_like(mask))
    assert (found[~mask] == 0).all()
    return found[mask].tolist()


def test_a_group_is_the_same_whoever_ends_first() -> None:
    index = torch.tensor([0, 1, 0, 1, 0, 1])  # three environments of each task: rounds of three
    in_order, other = (GroupStarts(index, 2, generator()) for _ in range(2))
    first = int(in_order.fresh[0])
    begun = [dealt(starts, list(range(6))) for starts in (in_order, other)]
    assert begun == [[first, first, first, first, first + 1, first + 1]] * 2  # groups of two; the third begins one
    assert dealt(in_order, [0, 2, 4]) == [first + 1, first + 2, first + 2]
    assert [dealt(other, [env])[0] for env in (4, 2, 0)] == [first + 2, first + 2, first + 1]
    for starts, used in ((in_order, [3, 2]), (other, [3, 2])):
        starts.abandon()  # task 1 has had one round: a whole group and a smaller one
        assert (starts.fresh - first).tolist() == used
    assert dealt(in_order, [0, 1]) == [first + 3, first + 2]


def test_numbers_stay_below_those_that_there_are() -> None:
    starts = GroupStarts(torch.zeros(6, dtype=torch.int64), 2, generator(), num_starts=4)
    starts.fresh[:] = 3
    assert dealt(starts, list(range(6))) == [3, 3, 0, 0, 1, 1]


def test_whoever_is_free_takes_the_next_place_of_the_oldest_group() -> None:
    starts = GroupStarts(torch.tensor([0, 1, 0, 1, 0, 1]), 2, generator(), continuous=True)
    first = int(starts.fresh[0])
    assert dealt(starts, list(range(6))) == [first] * 4 + [first + 1] * 2
    assert dealt(starts, [4]) == [first + 1]  # of task 0 alone
    assert dealt(starts, [0, 4]) == [first + 2] * 2
    assert dealt(starts, [4]) == [first + 3]
    starts.abandon()
    assert (starts.fresh - first).tolist() == [4, 2]
    other = GroupStarts(starts.task_index, 2, generator(), continuous=True)
    other.load_state_dict(starts.state_dict())
    assert dealt(starts, [1, 3]) == dealt(other, [1, 3]) == [first + 2] * 2


def test_starts_continue_where_they_were() -> None:
    starts, other = (GroupStarts(torch.zeros(4, dtype=torch.int64), 2, generator()) for _ in range(2))
    dealt(starts, [0, 1, 2, 3])
    other.load_state_dict(starts.state_dict())
    starts.abandon()
    other.abandon()
    assert dealt(starts, [0, 2]) == dealt(other, [0, 2])
    assert torch.equal(starts.fresh, other.fresh)


def collected(decisions: int, envs: int = 6, **options: int) -> tuple[WholeEpisodes, Rollout]:
    torch.manual_seed(0)
    env = Reach(envs, **options)
    policy = MLPConfig(hidden=[8], initial_std=0.5).build(env.contract)
    policy.fit(Reach(32).reset(starts=torch.arange(32)), torch.zeros(1, 1))
    collector = WholeEpisodes(env, policy, generator(), GroupStarts(env.task_index, 3, generator()))
    return collector, collector.collect(decisions)


@pytest.mark.parametrize(("asked", "length", "rounds"), [(1, 4, 1), (4, 4, 1), (11, 8, 2)])
def test_all_episodes_of_a_rollout_begin_and_end_in_it(asked: int, length: int, rounds: int) -> None:
    collector, _ = collected(asked, envs=30)  # the longest episode has seven steps, four decisions of two
    rollout = collector.collect(asked)  # what ran before is over
    assert rollout.done.shape == (length, 30)
    assert (rollout.done.sum(0) == rounds).all()
    frozen = rollout.done.long().cumsum(0) - rollout.done.long() == rounds
    assert frozen.any()
    assert not rollout.executed[frozen].any()
    assert not rollout.success[frozen].any()
    assert rollout.executed[~frozen].any(-1).all()
    assert bool((rollout.episode_steps[rollout.done] <= 7).all())
    truth, seen = rollout.next_observation()["position"], rollout.observation["position"]
    same = ~rollout.done[:-1] & ~frozen[:-1]
    assert torch.equal(truth[:-1][same], seen[1:][same])


def test_episodes_are_numbered_by_environment_then_by_time() -> None:
    _, rollout = collected(8)
    episodes = WholeRollout.of(rollout)
    assert len(episodes) == 12
    assert episodes.env.tolist() == [number // 2 for number in range(12)]
    assert torch.equal(episodes.task, rollout.task_index[episodes.env])
    steps = torch.zeros(12, dtype=torch.int64)
    for t, n in torch.cartesian_prod(torch.arange(8), torch.arange(6)).tolist():
        if (number := int(episodes.episode[t, n])) >= 0:
            steps[number] += int(rollout.executed[t, n].sum())
            assert rollout.start[t, n] == rollout.start.flatten()[episodes.last[number]]
        else:
            assert not rollout.executed[t, n].any()
    assert torch.equal(steps, episodes.at_end(rollout.episode_steps).long())
    values = torch.arange(12.0)
    spread = episodes.spread(values)
    assert torch.equal(spread[episodes.episode >= 0], values[episodes.episode[episodes.episode >= 0]])
    assert (spread[episodes.episode < 0] == 0.0).all()
    # six episodes of each of two tasks
    assert torch.bincount(episodes.group).tolist() == [3, 3, 3, 3]
    for group in range(4):
        members = episodes.group == group
        assert len(episodes.task[members].unique()) == len(episodes.at_end(rollout.start)[members].unique()) == 1


def test_an_episode_that_goes_on_is_none() -> None:
    torch.manual_seed(0)
    env = Reach(4)
    policy = MLPConfig(hidden=[8], initial_std=0.1).build(env.contract)
    policy.fit(Reach(32).reset(starts=torch.arange(32)), torch.zeros(1, 1))
    rollout = Collector(env, policy, generator()).collect(6)
    episodes = WholeRollout.of(rollout)
    assert len(episodes) == int(rollout.done.sum())
    last = rollout.done.long().flip(0).cumsum(0).flip(0) == 0  # no ending follows
    assert last.any()
    assert torch.equal(episodes.episode < 0, last)
    assert len(set(WholeRollout.of(replace(rollout, start=None)).group.tolist())) == len(episodes)


def test_a_simulation_that_blew_up_is_counted_once() -> None:
    class Blowing(Counter):
        def step(self, actions: torch.Tensor) -> Transition:
            if int(self.steps.max()) == 0:
                self.x[0] = BLOWN - float(actions[0, 0, 0])
            return super().step(actions)

    env = Blowing(2, executed=1)
    policy = MLPConfig(hidden=[8], initial_std=0.1).build(env.contract)
    policy.fit(TensorDict({name: torch.randn(8, 1) for name in ("x", "start")}, [8]), torch.zeros(1, 1))
    rollout = WholeEpisodes(env, policy, generator()).collect(7)
    assert rollout.odd_episodes()["diverged"] == 1
    assert rollout.done.sum(0).tolist() == [1, 1]
