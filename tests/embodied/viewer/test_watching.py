"""What is watched gives the numbers that it gives unwatched; pushes and episodes are counted as they are."""

import logging
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from embodied.algorithms.on_policy.ppo import PPOConfig
from embodied.contract import Contract
from embodied.environment import DifferentiableEnvironment, NumberedStarts, Restorable
from embodied.errors import UserError
from embodied.evaluation.evaluation import evaluate
from embodied.policy import Decision
from embodied.rollout.rollout import Collector
from embodied.scene.viewable import view
from embodied.training.loop import train
from embodied.viewer.options import ViewerOptions, viewing
from embodied.viewer.watching import Push, Score, WatchedEnvironment, WatchedTask
from policies.mlp import MLPConfig
from sims.gym.task import GymTask
from sims.quadrotor.task import HoverTask
from tests.embodied.reach import Reach
from tests.embodied.viewer.rail import Rail

AWAY = Push("point", np.array([0.5, 0.0, 0.0]))


class Script:
    """A screen that looks at everything and asks for pushes at numbered steps."""

    def __init__(self, pushes: dict[int, list[Push]] | None = None, row: int = 0) -> None:
        self.row, self.pushes, self.told = row, pushes or {}, []

    def before(self, watched: WatchedEnvironment) -> list[Push]:
        watched.env_view.scene(self.row), watched.env_view.poses(self.row)
        self.told.append((watched.observation.clone(), watched.actions, watched.value))
        return self.pushes.get(len(self.told), [])

    def after(self, watched: WatchedEnvironment, seconds: float) -> None:
        self.told[-1] += (watched.env_view.poses(self.row), seconds, int(watched.score.episodes))


def watched(env: Rail, screen: Script) -> WatchedEnvironment:
    return WatchedEnvironment(env, env.view(), screen, "here")


class Home:
    """A policy that goes slowly towards the origin."""

    def __init__(self, contract: Contract) -> None:
        self.contract = contract

    def act(self, observation: TensorDict, *, deterministic: bool = False, generator: object = None) -> Decision:
        actions = (-observation["position"]).clamp(-0.05, 0.05).unsqueeze(1).expand(-1, self.contract.horizon, -1)
        count = len(actions)
        return Decision(actions, TensorDict({}, [count]), torch.zeros(count, 2, 1))


def trained(env) -> tuple[dict, list]:
    torch.manual_seed(0)
    policy = MLPConfig(hidden=[8]).build(env.contract)
    steps = list(train(env, policy, PPOConfig(rollout_length=8, minibatch=32), env_steps=200, seed=3))
    return policy.state_dict(), [(step.env_steps, step.ended, step.metrics) for step in steps]


def test_training_gives_the_same_numbers_watched():
    (alone, told), screen = trained(Rail(8)), Script(row=3)
    seen, retold = trained(watched(Rail(8), screen))
    assert all(torch.equal(alone[name], seen[name]) for name in alone)
    assert told == retold
    assert any(value is not None for _, _, value, *_ in screen.told)
    assert screen.told[-1][-1] > 0


def test_analytic_gradients_take_the_fast_way_watched_too():
    env = HoverTask().environment(4, "disturbed", "train")
    seen = WatchedEnvironment(env, env.view(), Script(), "here")
    for capability in (DifferentiableEnvironment, NumberedStarts, Restorable):
        assert isinstance(seen, capability)
    assert all(hasattr(seen, name) for name in ("unroll", "show_values", "view"))
    assert not hasattr(WatchedEnvironment(Rail(2), Rail(2).view(), Script(), ""), "unroll")
    assert not hasattr(env, "show_values")


def test_an_evaluation_gives_the_same_numbers_and_only_its_episodes_are_counted():
    policy = Home(Rail(8).contract)
    alone = evaluate(Rail(8), policy, starts_per_task=3)
    env = watched(Rail(8), Script())
    seen = evaluate(env, policy, starts_per_task=3)
    assert torch.equal(alone.success, seen.success)
    assert alone.summary() == seen.summary()
    assert env.score.episodes == alone.success.numel()
    assert env.score.successes == int(alone.success.sum())
    assert env.score.curve[-1][1] == env.score.curve[-1][2] == float(alone.success.double().mean())  # 1 for a success
    short = watched(Rail(8, step_limit=1), Script())  # environments without an episode to count end with the others
    evaluate(short, policy, starts_per_task=3)
    assert short.score.episodes == alone.success.numel() == 6


def test_what_is_told_is_what_the_policy_was_given():
    env = watched(Rail(4), screen := Script(row=1))
    first = env.reset()
    action = torch.full((4, 2, 1), 0.05)
    env.show_values(torch.arange(4.0), None)
    transition = env.step(action)
    observation, actions, value, poses, seconds, _ = screen.told[0]
    assert torch.equal(observation["position"], first["position"])
    assert torch.equal(actions, action)
    assert value.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert poses[0, 0] == pytest.approx(float(transition.observation["position"][1]))
    assert seconds == pytest.approx(0.2)


def test_a_push_is_told_with_the_results_and_in_the_log(caplog):
    caplog.set_level(logging.INFO)
    policy = Home(Rail(2).contract)
    env = watched(Rail(2, step_limit=20), Script({3: [AWAY]}))
    result = evaluate(env, policy, starts_per_task=2)
    assert result.count("pushed") == 1
    assert result.summary()["pushed"] == 1
    assert "point of environment 0 (here, start 0) pushed by (0.5, 0, 0) m/s at control step 4" in caplog.text
    assert "pushed" not in evaluate(watched(Rail(2), Script()), policy, starts_per_task=2).summary()


def test_a_rollout_counts_pushed_episodes_when_they_end():
    env = watched(Rail(2, step_limit=8), Script({2: [AWAY]}))
    collector = Collector(env, Home(env.contract), torch.Generator())
    assert [collector.collect(decisions).odd_episodes()["pushed"] for decisions in (3, 3, 6)] == [0, 1, 0]


def test_an_episode_that_has_ended_is_not_pushed(caplog):
    caplog.set_level(logging.INFO)
    env = watched(Rail(2, step_limit=2), Script({2: [AWAY]}))
    env.reset()
    env.step(torch.zeros(2, 2, 1))
    before = env.env.position.clone()
    assert not env.step(torch.zeros(2, 2, 1)).events["pushed"].any()
    assert torch.equal(env.env.position, before)
    assert "was not pushed" in caplog.text


def test_a_score_is_of_the_latest_episodes_and_its_curve_stays_short():
    score = Score()
    for number in range(3000):
        score.add(torch.tensor([number >= 2900]), torch.tensor([float(number)]))
    assert (score.episodes, score.successes) == (3000, 100)
    assert score.curve[-1] == (3000, 1.0, pytest.approx(2949.5))
    assert score.curve[0][0] == 1
    assert len(score.curve) <= 500


def test_what_cannot_be_viewed_is_told_in_a_line_with_what_can():
    task = WatchedTask(GymTask(), Script(), "rails and roads")
    with pytest.raises(UserError, match=r"viewer=true cannot show these environments of .*; it shows rails and roads"):
        task.environment(2, task.distributions[0], "train")


def test_off_it_is_not_there():
    task = HoverTask()
    with viewing(ViewerOptions(), "all") as viewed:
        assert viewed(task) is task
    assert view(Reach(2)) is None
    for program in ("train.py", "evaluate.py"):
        code = (Path(__file__).parents[3] / program).read_text()
        assert re.findall(r"embodied\.viewer\.(\w+)", code) == ["options"]  # which imports nothing else of the viewer
