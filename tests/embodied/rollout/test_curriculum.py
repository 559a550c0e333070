"""A curriculum repeats initial states by how near the policy solves half of its attempts."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from embodied.algorithms.on_policy.ppo import PPOConfig
from embodied.errors import UserError
from embodied.rollout.curriculum import REMEMBERED, CurriculumStarts, Favours, weight
from embodied.rollout.rollout import Collector
from embodied.saving.tree import load_tree, save_tree
from policies.mlp import MLPConfig
from tests.embodied.nameless import Nameless
from tests.embodied.reach import Reach


def make(envs: int = 1, repeated: float = 0.5, tasks: int = 1, num_starts: int | None = None) -> CurriculumStarts:
    generator = torch.Generator().manual_seed(0)
    return CurriculumStarts(torch.arange(envs) % tasks, repeated=repeated, generator=generator, num_starts=num_starts)


def everywhere(starts: CurriculumStarts, success: Tensor | None = None) -> Tensor:
    finished = torch.ones(len(starts.running), dtype=torch.bool)
    return starts(finished, torch.zeros_like(finished) if success is None else success)


def test_weights_fall_on_both_sides_of_one_half() -> None:
    assert weight((0.0, 0.0)) == weight((2.0, 1.0)) == 1.0
    assert weight((1.0, 0.0)) == pytest.approx(math.exp(-(1 / 2 - 1 / 3) / 0.1))
    assert weight((4.0, 0.0)) == pytest.approx(weight((4.0, 4.0))) == pytest.approx(math.exp(-(1 / 3) / 0.1))
    assert weight((4.0, 2.0)) > weight((4.0, 1.0)) > weight((4.0, 0.0))


def test_by_failures_what_is_never_solved_weighs_most_and_what_is_always_solved_a_little() -> None:
    weights = [Favours.FAILURES.weight((4.0, successes)) for successes in (0.0, 1.0, 3.8, 4.0)]
    assert weights == pytest.approx([1.0, 0.75, 0.1, 0.1])
    generator, drawn = torch.Generator().manual_seed(0), []
    starts = CurriculumStarts(torch.zeros(1).long(), repeated=1.0, generator=generator, favours=Favours.FAILURES)
    for _ in range(4000):
        starts.records[0] = {11: (4.0, 0.0), 12: (4.0, 2.0), 13: (4.0, 4.0)}
        starts.abandon()
        drawn.append(int(everywhere(starts)[0]))
    counts = torch.tensor([drawn.count(start) for start in (11, 12, 13)]) / 4000
    torch.testing.assert_close(counts, torch.tensor([1.0, 0.5, 0.1]) / 1.6, atol=0.03, rtol=0.0)
    starts.records[0] = {start: (2.0, 1.0) for start in range(REMEMBERED)} | {7: (9.0, 9.0)}
    starts.running = [50]
    everywhere(starts)
    assert 50 in starts.records[0]
    assert 7 not in starts.records[0]


def test_states_are_drawn_by_their_weights_and_a_share_is_new() -> None:
    starts, drawn = make(repeated=0.7), []
    for _ in range(4000):
        starts.records[0] = {11: (4.0, 2.0), 12: (4.0, 3.0), 13: (4.0, 4.0)}
        starts.abandon()  # so that they stay as they are
        drawn.append(int(everywhere(starts)[0]))
    counts = torch.tensor([drawn.count(start) for start in (11, 12, 13)])
    assert int(counts.sum()) / 4000 == pytest.approx(0.7, abs=0.03)
    expected = torch.tensor([1.0, math.exp(-(2 / 3 - 1 / 2) / 0.1), math.exp(-(5 / 6 - 1 / 2) / 0.1)])
    torch.testing.assert_close(counts / counts.sum(), expected / expected.sum(), atol=0.03, rtol=0.0)
    new = [start for start in drawn if start not in (11, 12, 13)]
    assert len(set(new)) == len(new)


def test_a_policy_that_always_or_never_solves_most_states_meets_the_others_more_often() -> None:
    """Of ten states one is solved half of the time; every task has its own."""
    random, starts = torch.Generator().manual_seed(1), make(envs=8, tasks=2)
    rates = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0])
    now, met = everywhere(starts), torch.zeros(2, 10)
    for _ in range(600):
        kind = (now + 3 * (torch.arange(8) % 2)) % 10  # other states in the other task
        met.index_put_((torch.arange(8) % 2, kind), torch.ones(8), accumulate=True)
        now = everywhere(starts, torch.rand(8, generator=random) < rates[kind])
    share = met[:, 4] / met.sum(1)
    assert (share > 0.2).all()  # one of ten without a curriculum


def test_success_counts_for_the_state_that_the_episode_began_in() -> None:
    starts = make(envs=2, repeated=0.0)
    first = everywhere(starts)
    assert starts.records == [{}]
    everywhere(starts, torch.tensor([True, False]))
    assert starts.records == [{int(first[0]): (1.0, 1.0), int(first[1]): (1.0, 0.0)}]
    second = starts(torch.tensor([False, True]), torch.tensor([True, True]))
    assert second[0] == 0
    assert len(starts.records[0]) == 3
    starts.abandon()
    everywhere(starts, torch.tensor([True, True]))
    assert len(starts.records[0]) == 3  # what was running did not end


def test_recent_attempts_weigh_more() -> None:
    starts = make(num_starts=1, repeated=1.0)
    for success in (True, True, False, False):
        everywhere(starts, torch.tensor([success]))  # the first has no episode behind it
    ((_, (attempts, successes)),) = starts.records[0].items()
    assert attempts == pytest.approx(0.9**2 + 0.9 + 1.0)
    assert successes == pytest.approx(0.9**2)


def test_the_states_farthest_from_one_half_are_forgotten() -> None:
    starts = make(repeated=0.0)
    starts.records[0] = {start: (2.0, 1.0) for start in range(REMEMBERED)}
    starts.records[0][7] = (9.0, 9.0)
    everywhere(starts)
    everywhere(starts)
    assert len(starts.records[0]) == REMEMBERED
    assert 7 not in starts.records[0]


def test_numbers_stay_below_the_number_of_states() -> None:
    starts = make(envs=4, num_starts=3)
    assert {int(start) for _ in range(20) for start in everywhere(starts)} == {0, 1, 2}


def test_the_success_that_is_told_is_that_of_new_states() -> None:
    starts = make(envs=2, repeated=0.0)
    everywhere(starts)
    starts(torch.tensor([True, False]), torch.tensor([True, False]))
    assert "new_starts_success" not in starts.metrics()  # the first to end are the quick ones
    starts.repeated = 1.0
    everywhere(starts, torch.tensor([True, False]))
    assert starts.metrics() == {"known_starts": 3.0, "new_starts_success": pytest.approx(2 / 3)}
    everywhere(starts, torch.tensor([False, False]))
    assert starts.metrics()["new_starts_success"] == pytest.approx(2 / 3)


def test_a_resumed_curriculum_draws_what_it_would_have_drawn(tmp_path: Path) -> None:
    starts, random = make(envs=6, tasks=2), torch.Generator().manual_seed(3)
    for _ in range(9):
        everywhere(starts, torch.rand(6, generator=random) < 0.5)
    save_tree(tmp_path / "state", starts.state_dict())
    again = make(envs=6, tasks=2)
    again.load_state_dict(load_tree(tmp_path / "state"))
    again.generator.set_state(starts.generator.get_state())
    for _ in range(9):
        success = torch.rand(6, generator=random) < 0.5
        assert torch.equal(everywhere(starts, success), everywhere(again, success))
    assert starts.metrics() == again.metrics()


def test_ppo_begins_where_its_curriculum_says() -> None:
    env = Reach(8)
    policy = MLPConfig(hidden=[8]).build(env.contract)
    policy.fit(env.reset(), torch.zeros(1, 1))
    learner = PPOConfig(curriculum=0.9).build(policy, None, env, torch.Generator().manual_seed(0))
    collector = Collector(env, policy, torch.Generator().manual_seed(0), learner.starts)
    for _ in range(3):
        rollout = collector.collect(16)
        learner.update(rollout, 0.0)
    begun = {(env % 2, int(start)) for env in range(8) for start in rollout.start[:, env]}
    known = {(task, start) for task in range(2) for start in learner.starts.records[task]}
    assert len(begun & known) > 0.8 * len(begun)
    assert rollout.starts["known_starts"] == sum(map(len, learner.starts.records)) > 4
    again = PPOConfig(curriculum=0.9).build(policy, None, env, torch.Generator().manual_seed(1))
    resumed = Collector(env, policy, torch.Generator(), again.starts)
    resumed.load_state_dict(collector.state_dict())
    assert again.starts.records == learner.starts.records


def test_where_states_are_not_numbered_a_curriculum_is_refused() -> None:
    env = Nameless(8)
    policy = MLPConfig(hidden=[8]).build(env.contract)
    with pytest.raises(UserError, match=r"algorithm\.curriculum repeats initial states .*; use curriculum=0"):
        PPOConfig(curriculum=0.5).build(policy, None, env, torch.Generator())
    with pytest.raises(UserError, match=r"curriculum=1.5: expected a number of at least 0 and of at most 1"):
        PPOConfig(curriculum=1.5)


def test_separate_starts_draw_from_their_own_generator() -> None:
    """Collectors begin at different initial states and go on from different random numbers."""
    first, second = make(repeated=0.0), make(repeated=0.0)
    generator = torch.Generator().manual_seed(7)
    second.separate(generator)
    before = generator.get_state()
    assert not torch.equal(everywhere(first), everywhere(second))
    assert not torch.equal(generator.get_state(), before)
