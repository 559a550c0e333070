"""Analytic gradients: the objective and its gradient by hand, learning, resuming, and refusal without gradients."""

from dataclasses import replace

import pytest
import torch

from embodied.algorithms.advantage import values
from embodied.algorithms.on_policy.bptt import BPTT, BPTTConfig
from embodied.errors import DivergedError
from embodied.networks.value_head import CriticHead, ValueHead
from embodied.rollout.differentiable import DifferentiableCollector
from policies.flow import FlowConfig
from policies.mlp import MLPConfig, MLPPolicy
from tests.embodied.reach import Reach
from tests.embodied.smooth_reach import SmoothReach


def make(
    seed: int = 0, envs: int = 16, values: ValueHead | None = None, **settings
) -> tuple[MLPPolicy, BPTT, DifferentiableCollector]:
    torch.manual_seed(seed)
    env = SmoothReach(envs)
    policy = MLPConfig(hidden=[16], values=values or ValueHead()).build(env.contract)
    policy.fit(env.reset(starts=torch.arange(envs)), torch.zeros(1, 1))
    generator = torch.Generator().manual_seed(seed)
    learner = BPTTConfig(rollout_length=5, **settings).build(policy, None, env, generator)
    return policy, learner, learner.collector(env, policy, generator, None)


def test_objective_by_hand() -> None:
    _, learner, collector = make(envs=2, terminal_weight=3.0, discount=0.5)
    rollout = collector.collect(4)
    x = rollout.next_observation()["position"].squeeze(-1).detach()
    assert rollout.executed.all()  # an untrained policy does not succeed in four steps
    weights = torch.tensor([1.0, 0.5, 0.25, 0.125 + 2.0]).unsqueeze(1)
    torch.testing.assert_close(learner._objective(rollout).detach(), -(weights * x.square()).sum(0).mean() / 4)


def test_with_a_critic_the_value_stands_for_the_rest() -> None:
    policy, learner, collector = make(envs=2, critic=True, discount=0.5)
    rollout = collector.collect(4)
    x = rollout.next_observation()["position"].squeeze(-1).detach()
    weights = torch.tensor([1.0, 0.5, 0.25, 0.125]).unsqueeze(1)
    rest = 0.5**4 * policy.value(rollout.next_observation()[-1])
    expected = (rest - (weights * x.square()).sum(0)).mean() / 4
    torch.testing.assert_close(learner._objective(rollout), expected)


def test_the_critic_learns_from_what_was_executed_alone() -> None:
    policy, learner, collector = make(envs=4, critic=True, discount=0.5, value_epochs=1)
    collector.collect(5)
    rollout = collector.collect(5)  # the step limit is 7
    ran = rollout.executed.any(-1)
    assert ran.sum(0).tolist() == [2] * 4
    assert rollout.done.sum(0).tolist() == [1] * 4  # an episode ends once, however long it is frozen
    x = rollout.next_observation()["position"].squeeze(-1).detach()[:2]
    value = values(policy, rollout.observation)[:2]
    final = values(policy, rollout.next_observation()[:2])[1]
    returns = torch.stack((-x[0].square() + 0.5 * (-x[1].square() + 0.5 * final), -x[1].square() + 0.5 * final))
    returns[0] += 0.5 * 0.05 * (value[1] - returns[1])  # lambda is 0.95
    expected = float((value - returns).square().mean())
    assert learner._fit_value(rollout) == {"value_loss": pytest.approx(expected, rel=1e-4)}
    head = ValueHead(CriticHead.HL_GAUSS, value_low=float(returns.median()), value_high=1.0)
    _, learner, _ = make(envs=4, critic=True, discount=0.5, value_epochs=1, values=head)
    assert learner._fit_value(rollout)["clamped_targets"] > 0.0


def test_gradients_are_clipped() -> None:
    _, learner, collector = make(max_gradient_norm=1e-4)
    assert learner.update(collector.collect(5), 0.0)["gradient_norm"] > 1e-3
    norm = torch.stack([parameter.grad.norm() for parameter in learner.parameters]).norm()
    assert float(norm) == pytest.approx(1e-4, rel=1e-3)


@pytest.mark.parametrize("fused", [True, False])
def test_gradients_by_actions_are_limited_on_their_way_back(fused: bool) -> None:
    policy, learner, collector = make(envs=2, terminal_weight=1.0, max_action_gradient=1.5)
    if not fused:
        collector.env.unroll = None
    with torch.no_grad():
        policy.actor[0].weight.zero_()  # no action depends on a position: gradients are sums over later ones
    rollout = collector.collect(3)
    assert rollout.executed.all()
    x = rollout.next_observation()["position"].squeeze(-1).detach()
    by_action = (-2.0 * x).flip(0).cumsum(0).flip(0)
    assert (by_action.abs() > 1.5).any()
    assert (by_action.abs() < 1.5).any()
    (slope,) = torch.autograd.grad(learner._objective(rollout), policy.actor[-2].bias)
    by_bias = 0.25 - rollout.actions[0, 0, 0].detach().square() / 0.25  # an action is 0.25 tanh(bias)
    torch.testing.assert_close(slope, (by_action.clamp(-1.5, 1.5).sum() / 6 * by_bias).expand(1))


def test_nothing_follows_an_episode_that_terminated_within_the_horizon() -> None:
    policy, learner, collector = make(envs=2, critic=True, discount=0.5)
    rollout = collector.collect(4)
    ended = replace(rollout, terminated=torch.tensor([[False, False], [True, False], [False, False], [False, False]]))
    value = policy.value(rollout.next_observation()[-1])
    difference = learner._objective(rollout) - learner._objective(ended)
    torch.testing.assert_close(difference, 0.5**4 * value[0] / 2 / 4)
    assert abs(float(value[0].detach())) > 1e-4


def test_the_gradient_is_that_of_finite_differences() -> None:
    policy, learner, collector = make()
    policy.double()
    weight = policy.actor[0].weight
    env = collector.env
    env.reset(starts=torch.arange(16))
    saved = env.state_dict()

    def objective() -> torch.Tensor:
        env.load_state_dict({key: value.double() if key == "position" else value for key, value in saved.items()})
        collector.observation, collector.finished = env._observation(), torch.zeros(16, dtype=torch.bool)
        return learner._objective(collector.collect(5))

    (slope,) = torch.autograd.grad(objective(), weight)
    with torch.no_grad():
        weight[3, 0] += 1e-6
        above = objective()
        weight[3, 0] -= 2e-6
        below = objective()
    assert float((above - below) / 2e-6) == pytest.approx(float(slope[3, 0]), rel=1e-4)
    assert abs(float(slope[3, 0])) > 1e-6


@pytest.mark.parametrize("critic", [False, True])
def test_learns_to_reach(critic: bool) -> None:
    _, learner, collector = make(envs=64, learning_rate=1e-2, critic=critic, discount=0.9)
    rewards, done, success = [], 0, 0
    for iteration in range(60):
        rollout = collector.collect(5)
        rewards.append(float(rollout.reward.detach().sum() / rollout.executed.sum()))
        learner.update(rollout, iteration / 60)
        if iteration >= 50:
            done, success = done + int(rollout.done.sum()), success + int(rollout.success.sum())
    assert sum(rewards[-10:]) > 0.6 * sum(rewards[:10])  # rewards are negative
    assert success / done > 0.95


def test_step_by_step_a_rollout_is_the_same() -> None:
    _, learner, fused = make()
    _, _, stepped = make()
    stepped.env.unroll = None
    for _ in range(3):  # some episodes end in between
        one, other = fused.collect(4), stepped.collect(4)
        for field in ("reward", "executed", "terminated", "truncated", "success", "actions", "start", "task_index"):
            torch.testing.assert_close(getattr(one, field), getattr(other, field))
        for seen in ((one.observation, other.observation), (one.last_observation, other.last_observation)):
            for key in one.observation.keys():  # noqa: SIM118 - a TensorDict iterates over its batch
                torch.testing.assert_close(*(each[key] for each in seen))
    slopes = [
        torch.autograd.grad(learner._objective(rollout), collector.policy.mean_parameters())
        for rollout, collector in ((one, fused), (other, stepped))
    ]
    torch.testing.assert_close(*slopes)
    assert all(slope.abs().max() > 0 for slope in slopes[0])


def test_gradients_end_where_a_rollout_begins() -> None:
    _, _, collector = make()
    collector.env.unroll = None
    collector.collect(4)
    assert not collector.env.position.requires_grad
    assert not collector.observation["position"].requires_grad


def test_frozen_environments_contribute_nothing() -> None:
    _, _, collector = make()
    env = collector.env
    env.reset(starts=torch.zeros(16, dtype=torch.long))
    env.position[:8] = 0.11  # ends within one step to the left
    rollout = env.unroll([(torch.zeros(1, 2), torch.tensor([-0.2]))], 3)
    assert rollout.executed[1:, :8].sum() == 0
    assert (rollout.reward[1:, :8] == 0).all()
    assert rollout.executed[:, 8:].all()


@pytest.mark.parametrize(
    ("env", "policy", "message"),
    [
        (Reach(2, executed=1, horizon=1), MLPConfig(), "differentiable simulator"),
        (SmoothReach(2), FlowConfig(width=8, hidden=8, turn_rad=0.0), "deterministic actions"),
    ],
)
def test_what_has_no_gradients_is_refused(env, policy, message) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        BPTTConfig().build(policy.build(env.contract), None, env, torch.Generator())
    assert "\n" not in str(caught.value)


def test_a_critic_needs_a_discount() -> None:
    with pytest.raises(ValueError, match="discount below 1"):
        BPTTConfig(critic=True)


def weights(policy: MLPPolicy) -> dict[str, torch.Tensor]:
    return {name: part.clone() for name, part in policy.state_dict().items()}


def root(rewards: torch.Tensor) -> torch.Tensor:
    """Zero, whose gradient is not finite."""
    return (0.0 * rewards).sqrt()


@pytest.mark.parametrize("critic", [False, True])
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda rewards: rewards + torch.nan, "objective became nan at gradient step 1"),
        (lambda rewards: rewards + root(-rewards), "the gradient through the simulator became nan at gradient step 1"),
    ],
)
def test_no_weight_changes_by_what_is_not_finite(fault, message, critic: bool) -> None:
    policy, learner, collector = make(critic=critic, discount=0.9)
    rollout, before = collector.collect(5), weights(policy)
    with pytest.raises(DivergedError, match=message):
        learner.update(replace(rollout, reward=fault(rollout.reward)), 0.0)
    for name, part in weights(policy).items():
        assert torch.equal(part, before[name]), name


def test_the_critic_does_not_learn_from_what_is_not_finite() -> None:
    policy, learner, collector = make(critic=True, discount=0.9)
    rollout = collector.collect(5)
    rollout.reward.data[0, 0] = torch.nan
    before = weights(policy)
    with pytest.raises(DivergedError, match="value loss became nan"):
        learner._fit_value(rollout)
    for name, part in weights(policy).items():
        assert torch.equal(part, before[name]), name
