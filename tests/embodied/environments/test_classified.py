"""Rewards and ends of a classifier of success, step by step, and what it takes for a success by mistake."""

from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict

from embodied.contract import TensorSpec
from embodied.environment import DifferentiableEnvironment, Transition, capability_notes
from embodied.environments.classified import (
    FALSE_NEGATIVE,
    FALSE_POSITIVE,
    SUCCESS,
    ClassifiedEnvironment,
    ClassifiedTask,
)
from embodied.environments.wrapping import WrappedEnvironment
from embodied.errors import UserError
from embodied.evaluation.evaluation import evaluate
from embodied.saving.tree import load_tree, save_tree
from tests.embodied.nameless import Nameless
from tests.embodied.reach import Reach
from tests.embodied.rollout.test_rollout import Constant
from tests.embodied.smooth_reach import SmoothReach
from tests.embodied.training.test_experiment import ReachTask


class Above:
    """A success is a position above `least`, in `frames` consecutive observations."""

    def __init__(self, least: float, frames: int = 1) -> None:
        contract = Reach(1).contract
        self.contract = replace(contract, observation={"position": contract.observation["position"]})
        self.threshold, self.frames, self.least = 0.5, frames, least

    def probability(self, observation: TensorDict) -> torch.Tensor:
        return (observation["position"][:, 0] > self.least).double()


def make(least: float, frames: int = 1, executed: int = 1, true: bool = False, **options) -> ClassifiedEnvironment:
    env = Reach(2, executed=executed, horizon=executed, **options)
    return ClassifiedEnvironment(env, Above(least, frames), true_success=true)


def played(env: ClassifiedEnvironment, moves: list[list[float]]) -> list[Transition]:
    """Transitions of environments 0, from x = 0.3 on, and 1, from x = -0.35 on, by `moves` of each."""
    env.reset(starts=torch.tensor([0, 1]))
    chunks = torch.tensor(moves).view(2, -1, env.contract.executed, 1)
    return [env.step(chunk.clone()) for chunk in chunks.unbind(1)]


def rows(steps: list[Transition], name: str, index: int = 0) -> list:
    return [getattr(step, name)[index].tolist() for step in steps]


def test_the_reward_is_1_at_the_first_detection_which_ends_the_episode():
    steps = played(make(0.5), [[0.1, 0.15, 0.2, 0.0], [0.0] * 4])  # 0.4, 0.55, then frozen
    assert rows(steps, "reward") == [[0.0], [1.0], [0.0], [0.0]]
    assert rows(steps, "executed") == [[True], [True], [False], [False]]
    assert rows(steps, "terminated") == [False, True, True, True]
    assert rows(steps, "truncated") == [False] * 4
    assert rows(steps, "success") == [False, True, True, True]
    positions = [step.observation["position"][0].item() for step in steps]
    assert positions == pytest.approx([0.4, 0.55, 0.55, 0.55])  # the simulator's point has moved on
    assert [step.events[FALSE_POSITIVE][0].item() for step in steps] == [False, True, True, True]
    assert rows(steps, "terminated", 1) == [False] * 4  # the other one goes on


def test_consecutive_frames_begin_again_after_one_below():
    steps = played(make(0.5, frames=2), [[0.25, -0.1, 0.1, 0.1], [0.0] * 4])  # 0.55, 0.45, 0.55, 0.65
    assert rows(steps, "reward") == [[0.0], [0.0], [0.0], [1.0]]
    assert rows(steps, "terminated") == [False, False, False, True]


def test_the_last_executed_action_of_a_chunk_has_the_reward():
    steps = played(make(0.5, executed=2), [[0.1, 0.15, 0.0, 0.0], [0.0] * 4])
    assert rows(steps, "reward") == [[0.0, 1.0], [0.0, 0.0]]
    short = played(make(0.5, executed=2, step_limit=3), [[0.1, 0.0, 0.2, 0.2], [0.0] * 4])
    assert rows(short, "reward") == [[0.0, 0.0], [1.0, 0.0]]  # the second chunk has one action left
    assert rows(short, "terminated") == [False, True]
    assert rows(short, "truncated") == [False, False]


def test_a_success_that_the_classifier_misses_is_cut_off_without_reward():
    steps = played(make(0.5), [[-0.25, 0.0], [0.0] * 2])  # 0.05: in the goal
    assert rows(steps, "reward") == [[0.0], [0.0]]
    assert rows(steps, "terminated") == [False, False]
    assert rows(steps, "truncated") == [True, True]
    assert rows(steps, "success") == [False, False]
    assert steps[-1].events[FALSE_NEGATIVE].tolist() == [True, False]
    assert steps[-1].events[SUCCESS].tolist() == [False, False]


def test_an_end_by_the_true_success_counts_for_all_consecutive_frames():
    steps = played(make(0.0, frames=3), [[-0.25, 0.0], [0.0] * 2])
    assert rows(steps, "reward") == [[1.0], [0.0]]
    assert rows(steps, "terminated") == [True, True]
    assert steps[-1].events[FALSE_POSITIVE].tolist() == [False, False]


class Priced(WrappedEnvironment):
    """Environments in which every control step costs 1."""

    def step(self, actions: torch.Tensor) -> Transition:
        transition = self.env.step(actions)
        return replace(transition, signals={"cost": torch.ones_like(transition.reward)})


def test_an_episode_that_the_classifier_has_ended_costs_nothing_more():
    env = ClassifiedEnvironment(Priced(Reach(2, executed=1, horizon=1)), Above(0.5), true_success=False)
    steps = played(env, [[0.1, 0.15, 0.2, 0.0], [0.0] * 4])
    assert [step.signals["cost"].squeeze(1).tolist() for step in steps] == [[1.0, 1.0]] * 2 + [[0.0, 1.0]] * 2


def test_the_time_limit_remains():
    steps = played(make(9.0, step_limit=2), [[0.1, 0.1, 0.0], [0.0] * 3])
    assert rows(steps, "truncated") == [False, True, True]
    assert steps[-1].events[FALSE_NEGATIVE].tolist() == [False, False]


def test_evaluations_count_the_true_success_beside_the_classifiers():
    env = make(0.5, true=True)
    steps = played(env, [[0.25, 0.0], [0.25, 0.1]])  # 0.55; -0.1 and 0.0
    assert rows(steps, "success") == [False, False]
    assert rows(steps, "success", 1) == [False, True]
    assert steps[-1].metrics[FALSE_POSITIVE].tolist() == [1.0, 0.0]
    assert steps[-1].metrics[FALSE_NEGATIVE].tolist() == [0.0, 1.0]
    assert steps[-1].metrics[SUCCESS].tolist() == [1.0, 0.0]
    assert FALSE_POSITIVE not in steps[-1].events
    # moves away from both sides: all from the right are false positives
    result = evaluate(make(0.5, true=True), Constant(env, 0.2), starts_per_task=4)
    row = result.summary()
    assert row["success"] == 0.5  # those from the left pass the goal
    assert (row[SUCCESS], row[FALSE_POSITIVE], row[FALSE_NEGATIVE]) == (0.5, 0.5, 0.5)
    assert result.repeatable


def test_reset_begins_again_in_one_environment_alone():
    env = make(0.5, frames=2)
    played(env, [[0.25, 0.1], [0.0, 0.0]])
    env.reset(torch.tensor([True, False]), torch.tensor([0, 0]))
    step = env.step(torch.tensor([[[0.25]], [[0.0]]]))
    assert not step.done.any()  # one frame of two, after the reset
    assert step.executed.tolist() == [[True], [True]]
    assert env.step(torch.zeros(2, 1, 1)).terminated.tolist() == [True, False]


def test_a_restored_environment_goes_on_in_the_same_way(tmp_path):
    def rest(env: ClassifiedEnvironment) -> list[Transition]:
        return [env.step(torch.tensor([[[0.02]], [[0.3]]])) for _ in range(4)]

    one, other = make(0.5, frames=2), make(0.5, frames=2)
    played(one, [[0.25], [0.0]])
    save_tree(tmp_path / "state", one.state_dict())
    observation = other.load_state_dict(load_tree(tmp_path / "state"))
    assert observation["position"].flatten().tolist() == pytest.approx([0.55, -0.35])
    for first, second in zip(rest(one), rest(other), strict=True):
        for name in ("reward", "executed", "terminated", "truncated", "success"):
            assert torch.equal(getattr(first, name), getattr(second, name)), name
        assert torch.equal(first.observation["position"], second.observation["position"])
    save_tree(tmp_path / "later", one.state_dict())  # with an episode that has ended
    again = make(0.5, frames=2)
    later = again.load_state_dict(load_tree(tmp_path / "later"))
    assert later["position"][0].item() == first.observation["position"][0].item()  # of the end, not the simulator's
    last = again.step(torch.zeros(2, 1, 1))
    assert last.terminated[0]
    assert last.events[SUCCESS][0]


def test_it_switches_between_training_and_evaluation():
    class Switchable(Reach):
        def switch(self, distribution: str, split: str) -> None:
            self.split = split

    env = ClassifiedEnvironment(Switchable(2, executed=1, horizon=1), Above(0.5), true_success=False)
    assert env.true_success is False
    env.switch("wide", "eval")
    assert (env.true_success, env.env.split) == (True, "eval")
    env.switch("wide", "train")
    assert env.true_success is False
    assert not hasattr(make(0.5), "switch")


def test_a_task_has_true_success_in_evaluations_alone():
    task = ClassifiedTask(ReachTask(), Above(0.5))
    assert task.environment(2, "wide", "eval").true_success
    assert not task.environment(2, "wide", "train").true_success
    assert "Rewards and ends of episodes are those of a success classifier" in "".join(
        capability_notes(task.environment(2, "wide", "train"))
    )


def test_what_it_cannot_wrap_is_refused():
    lacking = Above(0.5)
    lacking.contract = replace(lacking.contract, observation={"wrist": TensorSpec((8, 8, 3), "uint8")})
    with pytest.raises(UserError, match=r"observation 'wrist': missing\); train it with the same task"):
        ClassifiedEnvironment(Reach(2), lacking, true_success=False)
    other = Above(0.5)
    other.contract = replace(other.contract, observation={"position": TensorSpec((1,), unit="cm")})
    with pytest.raises(UserError, match="observation 'position' unit"):
        ClassifiedEnvironment(Reach(2), other, true_success=False)
    env = Reach(2)
    named = TensorSpec((1,), unit="m", names=("x",))
    env.contract = replace(env.contract, observation=env.contract.observation | {"position": named})
    with pytest.raises(UserError, match="observation 'position' order"):
        ClassifiedEnvironment(env, Above(0.5), true_success=False)
    shared = Reach(4)
    shared.group = 2
    with pytest.raises(UserError, match="share a world"):
        ClassifiedEnvironment(shared, Above(0.5), true_success=False)


def test_its_reward_has_no_gradient_and_it_needs_no_numbered_starts():
    smooth = ClassifiedEnvironment(SmoothReach(2), Above(0.5), true_success=False)
    assert isinstance(SmoothReach(2), DifferentiableEnvironment)
    assert not isinstance(smooth, DifferentiableEnvironment)
    env = ClassifiedEnvironment(Nameless(4), Above(0.5), true_success=False)
    env.reset()
    assert env.step(torch.zeros(4, env.contract.executed, 1)).reward.sum() == 0.0
