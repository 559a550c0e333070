"""Chunks cut in simulation: which actions run, what the transition says, and a state that continues bit for bit."""

import math
from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict

from embodied.data.recording import record_episodes
from embodied.environment import NumberedStarts, Restorable
from embodied.environments.reflex import CUT, STEPS, ReflexEnvironment, ReflexTask, in_steps, with_reflex
from embodied.errors import UserError
from embodied.execution.reflex import Reflex
from embodied.training.reflex import Stepwise
from policies.mlp import MLPConfig
from sims.vehicle.task import NavigateTask
from tests.embodied.reach import Reach


def fast(observation: TensorDict, actions: torch.Tensor) -> torch.Tensor:
    """Risk of `Reach`: being above 0.5, and moving up."""
    return ((observation["position"] > 0.5) & (actions > 0.0)).float().squeeze(1)


def make(
    num_envs: int = 2, executed: int = 4, risk=fast, threshold: float = 0.5, step_limit: int = 50
) -> ReflexEnvironment:
    env = Reach(num_envs, executed=1, horizon=1, step_limit=step_limit)
    return ReflexEnvironment(env, Reflex(risk, env.contract, threshold, (0.0,)), executed, executed)


def test_a_chunk_is_cut_where_its_risk_is_too_high():
    env = make()
    start = env.reset(starts=torch.tensor([0, 1]))["position"].squeeze(1)
    assert start.tolist() == pytest.approx([0.3, -0.35])
    transition = env.step(torch.tensor([0.15, 0.12, 0.2, 0.2]).view(1, 4, 1).expand(2, -1, -1))
    # 0.3 -> 0.45 -> 0.57, where the third action is cut, and the fourth dropped; the other one goes on
    assert transition.observation["position"][0].item() == pytest.approx(0.57)
    assert transition.actions[0].squeeze(1).tolist() == pytest.approx([0.15, 0.12, 0.0, 0.0])
    assert transition.signals[STEPS][0].tolist() == [0, 0, 1, 1]
    assert transition.events[CUT].tolist() == [True, False]
    assert transition.executed[0].tolist() == [True] * 4
    assert transition.executed[1].tolist() == [True, True, False, False]  # at the goal
    assert transition.signals[STEPS][1].tolist() == [0, 0, 0, 0]
    assert transition.reward.tolist() == [[0, 0, 0, 0], [0, 1, 0, 0]]
    assert transition.terminated.tolist() == [False, True]


def test_the_rest_of_a_cut_chunk_is_dropped_where_it_would_be_harmless():
    env = make(1)
    env.reset(starts=torch.tensor([0]))
    transition = env.step(torch.tensor([0.22, 0.1, -0.1, -0.1]).view(1, 4, 1))
    assert transition.actions.flatten().tolist() == pytest.approx([0.22, 0.0, 0.0, 0.0])
    assert transition.signals[STEPS].tolist() == [[0, 1, 1, 1]]


def test_the_next_decision_begins_uncut():
    env = make()
    env.reset(starts=torch.tensor([0, 0]))
    env.step(torch.full((2, 4, 1), 0.15))
    transition = env.step(torch.full((2, 4, 1), -0.1))
    assert not transition.events[CUT].any()
    assert transition.observation["position"][0].item() == pytest.approx(0.3 + 2 * 0.15 - 4 * 0.1)


def test_without_risk_it_is_the_environment_itself():
    def none(observation: TensorDict, actions: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(actions))

    checked, plain = make(3, risk=none), Reach(3, executed=4, horizon=4, step_limit=6)
    checked.env.step_limit = 6
    generator = torch.Generator().manual_seed(0)
    assert torch.equal(checked.reset()["position"], plain.reset()["position"])
    for _ in range(3):
        actions = torch.rand(3, 4, 1, generator=generator) * 0.5 - 0.25
        own, other = checked.step(actions.clone()), plain.step(actions.clone())
        for name in ("reward", "executed", "terminated", "truncated", "success"):
            assert torch.equal(getattr(own, name), getattr(other, name)), name
        assert torch.equal(own.observation["position"], other.observation["position"])


def test_an_unknown_risk_stops_the_robot():
    env = make(risk=lambda observation, actions: torch.full((len(actions),), math.nan), threshold=1.0)
    env.reset(starts=torch.tensor([0, 1]))
    transition = env.step(torch.full((2, 4, 1), 0.2))
    assert transition.observation["position"].squeeze(1).tolist() == pytest.approx([0.3, -0.35])
    assert transition.events[CUT].all()


class Overwriting(Reach):
    """A simulator that writes every reward into the same tensor."""

    def step(self, actions: torch.Tensor):
        transition = super().step(actions)
        self.buffer = getattr(self, "buffer", transition.reward)
        self.buffer.copy_(transition.reward)
        return replace(transition, reward=self.buffer)


def test_rewards_of_earlier_steps_stay_where_the_simulator_overwrites_them():
    env = Overwriting(1, executed=1, horizon=1, step_limit=50)
    checked = ReflexEnvironment(env, Reflex(fast, env.contract, 0.5, (0.0,)), 3, 3)
    checked.reset(starts=torch.tensor([0]))
    assert checked.step(torch.full((1, 3, 1), -0.25)).reward.tolist() == [[1.0, 0.0, 0.0]]


def test_gradients_pass_where_the_policy_acts():
    env = make()
    env.reset(starts=torch.tensor([0, 0]))
    actions = torch.full((2, 4, 1), 0.01)
    actions[0] = 0.22
    actions.requires_grad_(True)
    env.step(actions).actions.sum().backward()
    # 0.3 -> 0.52, where the second action is cut
    assert actions.grad.squeeze(2).tolist() == [[1, 0, 0, 0], [1, 1, 1, 1]]


def test_a_restored_environment_continues_with_its_measurement():
    env = make()
    assert isinstance(env, NumberedStarts)
    assert isinstance(env, Restorable)
    env.reset(starts=torch.tensor([2, 4]))
    env.step(torch.full((2, 4, 1), 0.05))
    state = env.state_dict()
    expected = env.step(torch.full((2, 4, 1), 0.1))
    other = make()
    other.load_state_dict(state)
    again = other.step(torch.full((2, 4, 1), 0.1))
    assert torch.equal(again.actions, expected.actions)
    assert torch.equal(again.observation["position"], expected.observation["position"])
    assert expected.events[CUT].any()


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_actions_that_are_not_finite_are_the_environments_error(broken: float):
    env = make()
    env.reset()
    with pytest.raises(ValueError, match="finite"):
        env.step(torch.full((2, 4, 1), broken))
    with pytest.raises(ValueError, match="shape"):
        env.step(torch.zeros(2, 3, 1))
    with pytest.raises(ValueError, match="finite actions after a reset"):
        make().step(torch.zeros(2, 4, 1))


def test_a_reflex_of_another_task_and_chunks_are_refused():
    env = Reach(2, executed=2, horizon=2)
    with pytest.raises(UserError, match="every action"):
        ReflexEnvironment(env, Reflex(fast, env.contract, 0.5, (0.0,)), 2, 2)
    steps = Reach(2, executed=1, horizon=1)
    other = NavigateTask(guard=False).contract("rooms")
    with pytest.raises(UserError, match="another task"):
        ReflexEnvironment(steps, Reflex(fast, other, 0.5, (0.0, 0.0)), 2, 2)


def test_a_task_with_a_reflex_has_its_own_contract_and_chunks_of_one_action_inside():
    task = NavigateTask(guard=False, executed=5)
    reflex = Reflex(
        lambda observation, actions: torch.zeros(len(actions)), in_steps(task).contract("rooms"), 0.5, (0, 0)
    )
    checked = with_reflex(task, reflex, lambda each: each)
    assert isinstance(checked, ReflexTask)
    assert checked.contract("rooms") == task.contract("rooms")
    env = checked.environment(2, "rooms", "eval")
    assert (env.contract.executed, env.env.contract.executed) == (5, 1)
    plain = task.environment(2, "rooms", "eval")
    starts = torch.tensor([0, 1])
    assert torch.equal(env.reset(starts=starts)["lidar"], plain.reset(starts=starts)["lidar"])
    actions = torch.tensor([0.5, 0.2]).expand(2, 5, 2)
    own, other = env.step(actions.clone()), plain.step(actions.clone())
    assert torch.equal(own.observation["lidar"], other.observation["lidar"])
    assert torch.equal(own.reward, other.reward)
    assert with_reflex(task, None, lambda each: each) is task


def test_recorded_actions_are_those_that_were_executed():
    task = replace(NavigateTask(guard=False, executed=5), step_limit=10)
    env = task.environment(2, "rooms", "train")
    reflex = Reflex(
        lambda observation, actions: torch.ones(len(actions)), in_steps(task).contract("rooms"), 0.5, (0, 0)
    )
    checked = with_reflex(task, reflex, lambda each: each).environment(2, "rooms", "train")
    policy = MLPConfig(hidden=[8]).build(env.contract)
    policy.fit(env.reset(), torch.zeros(2, 2))
    episodes = record_episodes(checked, policy, torch.Generator().manual_seed(0))
    assert episodes.steps == 20
    assert (episodes.actions == 0.0).all()


def test_chunks_are_recorded_step_by_step_and_some_are_slowed_down():
    task = NavigateTask(guard=False, executed=5)
    steps = in_steps(task)
    policy = MLPConfig(hidden=[8]).build(task.contract("rooms"))
    reflex = Reflex(lambda observation, actions: torch.zeros(len(actions)), steps.contract("rooms"), 0.5, (0.0, 0.0))
    env = steps.environment(16, "rooms", "train")
    observation = env.reset()
    policy.fit(observation, torch.zeros(16, 2))

    def acted(varied: float) -> torch.Tensor:
        actor = Stepwise(policy, reflex, varied)
        generator = torch.Generator().manual_seed(0)
        return torch.cat([actor.act(observation, generator=generator).actions for _ in range(5)], 1)

    chunk = policy.act(observation, generator=torch.Generator().manual_seed(0)).actions
    assert torch.allclose(acted(0.0), chunk)
    varied = acted(1.0)
    slower = (varied / chunk - (varied / chunk)[:, :1, :1]).abs().amax((1, 2)) < 1e-4  # one factor a chunk
    constant = (varied - varied[:, :1]).abs().amax((1, 2)) == 0.0
    assert (slower | constant).all()
    assert 0 < int(constant.sum()) < len(constant)
    assert ((varied / chunk)[slower] < 1.0).all()
