"""Guarantees of the engine for every simulator, tested with the smallest one."""

import logging

import pytest
import torch

from embodied.environment import Environment, NumberedStarts, Restorable
from embodied.environments.engine import STARTS_PER_SEED, EpisodeEngine, RestorableEngine, rank
from embodied.errors import UserError
from tests.embodied.counter import ABYSS, BLOWN, GOAL, HOME, Counter


def chunk(*moves: float, second: tuple[float, ...] = (0.0, 0.0)) -> torch.Tensor:
    """The first action of each environment, then `second`: [N, 3, 1]."""
    return torch.tensor([[move, *second] for move in moves]).unsqueeze(-1)


def only(env: EpisodeEngine, *rows: int) -> torch.Tensor:
    return torch.zeros(env.num_envs, dtype=torch.bool).index_fill(0, torch.tensor(rows, dtype=torch.long), True)


def test_it_is_what_the_protocols_ask_for() -> None:
    env = Counter()
    assert all(isinstance(env, kind) for kind in (Environment, NumberedStarts, Restorable))
    assert (env.task_names, env.instructions, env.num_starts) == (("task 0", "task 1"), ("task 0", "task 1"), None)
    assert env.task_index.tolist() == [0, 1, 0, 1]
    assert env.start.tolist() == [-1] * 4
    assert Counter(instructions=("one", "two")).instructions == ("one", "two")


@pytest.mark.parametrize("sizes", [{"num_envs": 0}, {"step_limit": 0}, {"tasks": 0}])
def test_sizes_that_nothing_can_be_done_with_are_refused(sizes: dict) -> None:
    with pytest.raises(UserError, match="expected at least one task, one environment and one step, got"):
        Counter(**sizes)


def test_impossible_seeds_are_refused() -> None:
    for seed in (-1, 1 << 31):
        with pytest.raises(UserError, match=rf"expected a seed in \[0, 2\^31\), got {seed}"):
            Counter(seed=seed)
    assert int(Counter(1, seed=(1 << 31) - 1, tasks=1).next_starts(torch.tensor([0]))) == ((1 << 31) - 1) << 24


def test_every_task_has_a_stream_of_its_own_that_goes_on() -> None:
    env = Counter(5, seed=3)
    env.reset()
    first = 3 * STARTS_PER_SEED
    assert env.begun == [([0, 1, 2, 3, 4], [first, first, first + 1, first + 1, first + 2])]
    env.reset(only(env, 1, 4))
    assert env.begun[1] == ([1, 4], [first + 2, first + 3])
    assert (env.start - first).tolist() == [0, 2, 1, 1, 3]


def test_of_few_initial_states_the_first_follows_the_last() -> None:
    env = Counter(7, tasks=2, num_starts=3, seed=2)
    env.reset()
    assert env.start.tolist() == [2, 2, 0, 0, 1, 1, 2]


def test_named_initial_states_are_taken_and_use_up_none_of_the_stream() -> None:
    env = Counter()
    env.reset(only(env, 1, 2), starts=torch.tensor([-1, 8, 7, -1]))
    assert env.begun == [([1, 2], [8, 7])]
    assert env.start.tolist() == [-1, 8, 7, -1]
    env.reset()
    assert env.start.tolist() == [0, 0, 1, 1]


def test_a_reset_of_no_environment_only_observes() -> None:
    env = Counter()
    env.reset()
    assert env.reset(only(env))["x"].tolist() == [[0.0]] * 4
    assert len(env.begun) == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mask": torch.ones(3, dtype=torch.bool)}, r"expected mask of shape \(4,\), got \(3,\)"),
        ({"starts": torch.zeros(4, 1)}, r"expected starts of shape \(4,\), got \(4, 1\)"),
        ({"starts": torch.tensor([0, 0, -1, 0])}, r"expected initial states >= 0, got \[0, 0, -1, 0\]"),
    ],
)
def test_other_shapes_and_numbers_are_refused(given: dict, message: str) -> None:
    env = Counter()
    with pytest.raises(ValueError, match=message):
        env.reset(**given)
    assert not env.begun
    assert env.start.tolist() == [-1] * 4


def test_environments_of_a_world_begin_together() -> None:
    env = Counter(6, group=2, tasks=1)
    env.reset(only(env, 2, 3))
    assert env.begun == [([2, 3], [0, 1])]
    with pytest.raises(ValueError, match=r"the 2 environments of a world begin together; .* parts of \[0, 2\]"):
        env.reset(only(env, 1, 2, 3, 4))
    assert len(env.begun) == 1


def test_a_chunk_runs_to_the_limit_and_no_further() -> None:
    env = Counter(2, step_limit=4)
    env.reset()
    assert not env.step(chunk(0.1, 0.1)).done.any()
    env.reset(only(env, 1))
    ended = env.step(chunk(0.1, 0.1))
    assert env.remaining_steps == [[3, 3], [1, 3]]
    assert ended.executed.tolist() == [[True, False, False], [True] * 3]
    assert ended.truncated.tolist() == [True, False]
    assert not ended.terminated.any()
    assert env.steps.tolist() == [4, 3]
    later = env.step(chunk(1.0, 0.1))
    assert env.remaining_steps[2] == [0, 1]
    assert later.executed.tolist() == [[False] * 3, [True, False, False]]
    assert later.observation["x"][0] == ended.observation["x"][0]
    assert later.truncated.all()
    assert env.steps.tolist() == [4, 4]


def test_what_ended_stays_as_it_ended_until_its_reset() -> None:
    env = Counter(3, tasks=1)
    env.reset()
    env.step(chunk(GOAL, ABYSS, HOME))
    env.x += 1.0  # results of frozen environments are ignored
    later = env.step(chunk(0.0, 0.0, 0.0))
    assert (later.terminated.tolist(), later.truncated.tolist()) == ([True, True, False], [False, False, True])
    assert later.success.tolist() == [True, False, False]
    assert env.steps.tolist() == [1, 1, 1]
    env.reset(only(env, 0, 2))
    assert env.done.tolist() == [False, True, False]
    assert not env.success.any()
    assert env.steps.tolist() == [0, 1, 0]


def test_an_ending_of_the_frozen_changes_nothing() -> None:
    env = Counter(3, tasks=1)
    env.reset()
    env.step(chunk(HOME, ABYSS, HOME))
    env.x = torch.tensor([GOAL, GOAL, BLOWN])
    later = env.step(chunk(0.0, 0.0, 0.0))
    assert (later.terminated.tolist(), later.truncated.tolist()) == ([False, True, False], [True, False, True])
    assert not later.success.any()
    assert not later.events["diverged"].any()


def test_an_end_at_the_limit_is_the_tasks_own() -> None:
    env = Counter(3, step_limit=1, tasks=1)
    env.reset()
    ended = env.step(chunk(GOAL, ABYSS, 0.1))
    assert (ended.terminated.tolist(), ended.truncated.tolist()) == ([True, True, False], [False, False, True])
    assert ended.success.tolist() == [True, False, False]


def test_what_blew_up_has_failed_and_is_reported_once(caplog) -> None:
    env = Counter(2, tasks=1, step_limit=2)
    env.reset(starts=torch.tensor([8, 9]))
    env.step(chunk(0.1, 0.1, second=(0.0, 0.0))[:, :3])
    env.reset(only(env, 1), starts=torch.tensor([8, 9]))
    with caplog.at_level(logging.WARNING):
        ended = env.step(chunk(0.1, BLOWN))
        later = env.step(chunk(0.0, 0.0))
    assert caplog.messages == [
        "the simulation diverged in task 0, initial state 9, control step 1: counted as a failure"
    ]
    for each in (ended, later):
        assert each.terminated.tolist() == [False, True]
        assert each.events["diverged"].tolist() == [False, True]
        assert not each.success.any()
        assert not (each.terminated & each.truncated).any()
    env.reset()
    assert not env.diverged.any()


def test_the_transition_is_made_after_the_flags_are_updated() -> None:
    env = Counter(1, tasks=1)
    seen = []
    env.observe = lambda: seen.append((env.done.tolist(), env.steps.tolist())) or Counter.observe(env)
    env.reset()
    transition = env.step(chunk(GOAL))
    assert seen == [([False], [0]), ([True], [1])]
    assert transition.observation["x"].item() == GOAL
    assert transition.metrics["x"].item() == GOAL


def test_an_earlier_transition_is_not_changed_by_a_later_one() -> None:
    env = Counter(2, tasks=1)
    env.reset()
    first = env.step(chunk(GOAL, 0.1))
    start, steps = env.start, env.steps
    before = start.clone(), steps.clone()
    second = env.step(chunk(0.0, ABYSS))
    flags_of = lambda each: {"terminated": each.terminated, "truncated": each.truncated, "success": each.success}  # noqa: E731
    kept = [{name: flag.clone() for name, flag in (flags_of(each) | each.events).items()} for each in (first, second)]
    env.reset()
    for each, flags in zip((first, second), kept, strict=True):
        assert all(torch.equal((flags_of(each) | each.events)[name], value) for name, value in flags.items())
    assert first.terminated.tolist() == [True, False]
    assert torch.equal(start, before[0])
    assert torch.equal(steps, before[1])


@pytest.mark.parametrize("shape", [(4, 2, 1), (3, 3, 1), (4, 3), (4, 3, 2)])
def test_chunks_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    env = Counter()
    env.reset()
    with pytest.raises(ValueError, match=r"expected actions of shape \(4, 3, 1\), got"):
        env.step(torch.zeros(shape))


def test_actions_that_are_not_finite_are_refused_by_name() -> None:
    env = Counter()
    env.reset()
    broken = torch.zeros(4, 3, 1)
    broken[1, 2], broken[3, 0] = torch.inf, -torch.inf  # whose sum is not a number
    with pytest.raises(ValueError, match=r"actions of environments \[1, 3\] are not finite"):
        env.step(broken)
    assert not env.remaining_steps
    env.step(torch.full((4, 3, 1), 3e38))  # their sum alone is not


def test_a_step_before_every_environment_has_an_episode_is_refused() -> None:
    env = Counter()
    env.reset(only(env, 0, 1, 2))
    with pytest.raises(ValueError, match=r"no episode yet; call reset\(\)"):
        env.step(torch.zeros(4, 3, 1))
    env.reset(only(env, 3))
    env.step(torch.zeros(4, 3, 1))


def test_a_saved_state_holds_books_streams_and_simulator() -> None:
    env, other = Counter(seed=1), Counter(seed=5)
    env.reset()
    env.step(chunk(GOAL, BLOWN, HOME, 0.1))
    state = env.state_dict()
    expected = env.observe()["x"]
    other.reset()
    assert torch.equal(other.load_state_dict(state)["x"], expected)
    env.step(chunk(0.0, 0.0, 0.0, 1.0))
    env.reset()
    assert other.seed == 1  # nor do later steps change the loaded state
    assert other.steps.tolist() == [1, 1, 1, 3]
    for name, flags in (
        ("terminated", [True, True, False, False]),
        ("truncated", [False, False, True, False]),
        ("success", [True, False, False, False]),
        ("diverged", [False, True, False, False]),
    ):
        assert getattr(other, name).tolist() == flags
    assert (other.start - STARTS_PER_SEED).tolist() == [0, 0, 1, 1]
    other.reset()
    assert (other.start - STARTS_PER_SEED).tolist() == [2, 2, 3, 3]
    assert torch.equal(state["taken"], torch.tensor([2, 2]))
    assert torch.equal(state["simulator"]["x"], expected.squeeze(1))


def test_a_state_from_before_the_first_reset_has_no_episodes() -> None:
    fresh, env = Counter().state_dict(), Counter()
    env.reset()
    env.step(torch.zeros(4, 3, 1))
    env.load_state_dict(fresh)
    with pytest.raises(ValueError, match="no episode yet"):
        env.step(torch.zeros(4, 3, 1))


def test_a_state_of_others_is_refused_before_anything_is_taken_up() -> None:
    env = Counter()
    env.reset()
    with pytest.raises(UserError, match=r"the saved state has num_envs=2, got 4"):
        env.load_state_dict(Counter(2).state_dict())
    with pytest.raises(UserError, match=r"the saved taken has shape \(3,\), expected \(2,\); use the options"):
        env.load_state_dict(Counter(tasks=3).state_dict())
    state = Counter().state_dict()
    state["simulator"]["x"] = torch.zeros(4, 2)
    with pytest.raises(UserError, match=r"the saved x has shape \(4, 2\), expected \(4,\)"):
        env.load_state_dict(state)
    assert env.start.tolist() == [0, 0, 1, 1]


def test_a_state_that_lacks_something_is_refused_in_one_line() -> None:
    env, state = Counter(), Counter().state_dict()
    env.save = lambda: {"x": env.x.clone(), "inside": {"y": torch.zeros(2)}}
    with pytest.raises(UserError, match="the saved state has no inside; use the options that it was saved with"):
        env.load_state_dict(state)


def test_who_supplies_too_little_is_no_engine() -> None:
    class Less(EpisodeEngine):
        pass

    class Forgetful(RestorableEngine):
        begin = advance = observe = Counter.observe

    for kind in (Less, Forgetful):
        with pytest.raises(TypeError, match="abstract"):
            kind(None, 1, 1, task_names=("a",))


def test_rank_counts_equals_before() -> None:
    assert rank(torch.tensor([2, 0, 2, 2, 0, 1])).tolist() == [0, 0, 1, 2, 1, 0]
    assert rank(torch.empty(0, dtype=torch.int64)).tolist() == []
