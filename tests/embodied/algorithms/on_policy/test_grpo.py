"""GRPO's advantages by hand, the groups that it leaves out, and that it learns; also what it shares with PPO."""

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from embodied.algorithms.on_policy.grpo import GRPO, GRPOConfig, Outcome, compared
from embodied.errors import UserError
from embodied.policy import TrainablePolicy
from embodied.rollout.groups import WholeRollout
from embodied.rollout.rollout import Rollout
from embodied.training.loop import build, train
from embodied.world import ALONE
from policies.flow import FlowConfig, Sampler
from policies.mlp import MLPConfig
from policies.recurrent import RecurrentConfig
from tests.embodied.nameless import Nameless
from tests.embodied.reach import Reach

SMALL = {"group": 4, "minibatch": 10**6, "epochs": 1, "rollout_length": 4}


def make(envs: int = 16, policy: Any = None, seed: int = 0, **settings: Any) -> tuple[TrainablePolicy, GRPO, Any]:
    torch.manual_seed(seed)
    env = Reach(envs)
    policy = (policy or MLPConfig(hidden=[16], initial_std=0.5)).build(env.contract)
    policy.fit(Reach(32).reset(starts=torch.arange(32)), torch.tensor([[-0.25], [0.25]]))
    learner, collector = build(env, policy, GRPOConfig(**(SMALL | settings)), None, seed)
    return policy, learner, collector


def outcomes(rollout: Rollout, success: list[bool]) -> Rollout:
    """`rollout` of whole episodes, one for each environment, which succeed as told."""
    return replace(rollout, success=rollout.done & torch.tensor(success))


def whole(lengths: list[int], groups: list[int], frozen: int = 0) -> WholeRollout:
    """Episodes with `lengths` decisions, each in an environment of its own, which begin after `frozen` decisions."""
    episode = torch.full((frozen + max(lengths), len(lengths)), -1)
    for number, length in enumerate(lengths):
        episode[frozen : frozen + length, number] = number
    envs = torch.arange(len(lengths))
    last = (frozen + torch.tensor(lengths) - 1) * len(lengths) + envs
    return WholeRollout(episode, last, envs, torch.zeros_like(envs), torch.tensor(groups))


def test_advantages_are_those_of_the_group() -> None:
    outcome = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 7.0])
    episodes = whole([1, 1, 2, 2, 1, 2, 1], [0, 1, 0, 0, 0, 1, 2])
    found = compared(outcome, episodes, of_running=False, by_deviation=False)
    # group 0: 1, 0, 0, 1; group 1: 0, 1; group 2 is one alone
    first = [0.5, -0.5, -0.5, -0.5, 0.5, 0.5, 0.0]
    assert found.advantage.tolist() == [first, [0.0, 0.0, -0.5, -0.5, 0.0, 0.5, 0.0]]
    assert found.mean.tolist() == [0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 7.0]
    assert found.varied.tolist() == [True] * 6 + [False]
    scaled = compared(outcome, episodes, of_running=False, by_deviation=True)
    large, small = 0.5 / math.sqrt(4 * 0.25 / 3), 0.5 / math.sqrt(2 * 0.25)
    expected = torch.tensor([large, -small, -large, -large, large, small, 0.0])
    torch.testing.assert_close(scaled.advantage[0], expected)


@pytest.mark.parametrize("frozen", [0, 2])
def test_a_decision_is_compared_with_episodes_that_go_on_as_long(frozen: int) -> None:
    """Of one group the first succeeds after one decision, the second after three; two fail after three and four."""
    episodes = whole([1, 3, 3, 4, 2], [0, 0, 0, 0, 1], frozen)
    outcome = torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0])
    found = compared(outcome, episodes, of_running=True, by_deviation=False).advantage[frozen:]
    third = 1 / 3
    expected = [
        [0.5, 0.5, -0.5, -0.5, 0.0],
        [0.0, 1 - third, -third, -third, 0.0],
        [0.0, 1 - third, -third, -third, 0.0],
        [0.0, 0.0, 0.0, 0.0, 0.0],
    ]
    torch.testing.assert_close(found, torch.tensor(expected))
    scaled = compared(outcome, episodes, of_running=True, by_deviation=True).advantage[frozen:]
    torch.testing.assert_close(scaled, found / math.sqrt(4 * 0.25 / 3))


def test_of_running_episodes_the_mean_advantage_is_zero() -> None:
    """Also of several episodes one after the other in each environment; of all episodes it is not."""
    _, _, collector = make(rollout_length=12)
    rollout = collector.collect(12)
    within = (episodes := WholeRollout.of(rollout)).episode >= 0
    outcome = torch.rand(len(episodes), generator=torch.Generator().manual_seed(0)).round()
    lengths = torch.bincount(episodes.episode[within])
    assert lengths.min() < lengths.max()
    assert bool((episodes.decision[within] < lengths[episodes.episode[within]]).all())
    assert torch.equal((episodes.decision == 0)[within].sum(), torch.tensor(len(episodes)))
    for of_running, zero in ((True, True), (False, False)):
        advantage = compared(outcome, episodes, of_running, by_deviation=False).advantage
        assert (abs(float(advantage.sum())) < 1e-4) is zero
        assert not advantage[~within].any()


def prepared(learner: GRPO, rollout: Rollout) -> tuple[TensorDict, dict[str, float]]:
    """The decisions that are learned from, and metrics."""
    batch, metrics = learner._prepare(rollout, ALONE)
    return batch[batch["own"]], metrics


def test_groups_that_hardly_ever_or_almost_always_succeed_are_left_out_and_counted() -> None:
    """Eight environments of each task in two groups of four; 1, 3, 4 and 2 of four succeed."""
    _, learner, collector = make(lowest=0.3, highest=0.7, of_running=False)
    rollout = collector.collect(4)
    success = [False] * 16
    for env in (0, 8, 10, 12, 1, 3, 5, 7, 9, 11):  # task 0: environments 0, 2, ... 14; task 1: the others
        success[env] = True
    batch, metrics = prepared(learner, outcomes(rollout, success))
    kept = rollout.executed.any(-1)[:, [9, 11, 13, 15]]
    assert len(batch) == int(kept.sum())
    assert batch["own"].all()
    deviation = math.sqrt(4 * 0.25 / 3)
    assert sorted(set(batch["advantage"].tolist())) == pytest.approx([-0.5 / deviation, 0.5 / deviation])
    assert (batch["advantage"] > 0).sum() == kept[:, :2].sum()
    assert metrics == {"groups": 4.0, "kept_groups": 0.25, "uniform_groups": 0.25, "filtered_groups": 0.5}
    learner.config.minibatch = len(batch)
    assert learner.update(outcomes(rollout, success), 0.0)["minibatches"] == 1.0


def test_with_progress_groups_that_never_succeed_are_learned_from() -> None:
    """One success in one of four groups: failures of both groups of its task differ, those of the other task do not."""
    _, learner, collector = make(outcome=Outcome.PROGRESS)
    rollout = collector.collect(4)
    batch, metrics = prepared(learner, outcomes(rollout, [env == 0 for env in range(16)]))
    assert metrics == {"groups": 4.0, "kept_groups": 0.5, "uniform_groups": 0.5, "filtered_groups": 0.0}
    assert len(batch) == int(rollout.executed.any(-1)[:, ::2].sum())


def test_every_decision_weighs_the_same_however_long_its_episode_is() -> None:
    policy, learner, collector = make(epochs=1, clip=0.2)
    rollout = outcomes(collector.collect(4), [env % 4 < 2 for env in range(16)])
    batch, _ = prepared(learner, rollout)
    scores = policy.evaluate(batch["observation"], batch["sample"]).log_prob.squeeze(-1)
    expected = torch.autograd.grad(-(scores * batch["advantage"]).mean(), policy.actor_parameters())
    learner.config.max_gradient_norm = math.inf
    metrics = learner._step(batch)
    for gradient, parameter in zip(expected, policy.actor_parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["policy_loss"] == pytest.approx(-float(batch["advantage"].mean()), abs=1e-6)


def test_without_a_group_that_counts_no_step_is_taken() -> None:
    policy, learner, collector = make()
    before = copy.deepcopy(policy.state_dict())
    metrics = learner.update(outcomes(collector.collect(4), [True] * 16), 0.0)
    assert metrics == {"groups": 4.0, "kept_groups": 0.0, "uniform_groups": 1.0, "filtered_groups": 0.0}
    assert learner.gradient_steps == 0
    assert all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())


def test_returns_are_compared_where_they_are_asked_for_or_success_is_undefined() -> None:
    _, learner, collector = make(outcome=Outcome.RETURN, by_deviation=False)
    rollout = collector.collect(4)
    given = torch.zeros_like(rollout.episode_return)
    given[rollout.done] = torch.arange(16.0)[rollout.done.nonzero()[:, 1]]
    for has_success, outcome in ((True, Outcome.RETURN), (False, Outcome.SUCCESS)):
        learner.config.outcome = outcome
        batch, metrics = prepared(learner, replace(rollout, episode_return=given, has_success=has_success))
        assert metrics["kept_groups"] == 1.0
        assert sorted(set(batch["advantage"].tolist())) == [-3.0, -1.0, 1.0, 3.0]  # of 0, 2, 4, 6 and the like


def test_the_upper_clip_is_wider() -> None:
    _, learner, collector = make(clip=0.2, clip_high=0.5)
    batch, _ = prepared(learner, outcomes(collector.collect(4), [env % 4 < 2 for env in range(16)]))
    for ratio, far in ((1.4, 0.0), (1.6, 1.0), (0.85, 0.0), (0.7, 1.0)):
        moved = batch.clone().set("log_prob", batch["log_prob"] - math.log(ratio))
        _, sums = learner._losses(moved.set("advantage", torch.ones(len(batch))), 1.0)
        assert float(sums["clip_fraction"]) == far * len(batch)
        assert float(sums["policy_loss"]) == pytest.approx(-min(ratio, 1.5) * len(batch), rel=1e-4)


@pytest.mark.parametrize(
    "policy",
    [
        MLPConfig(hidden=[32], initial_std=0.5),
        RecurrentConfig(hidden=[32], encoder=16, memory=16, initial_std=0.5),
        FlowConfig(hidden=32, depth=1, initial_std=0.4, sampler=Sampler.FLOW_SDE),
    ],
)
def test_learns_to_reach_from_success_alone(policy: Any) -> None:
    rate = 3e-3 if not isinstance(policy, FlowConfig) else 1e-3
    settings = {"group": 8, "minibatch": 256, "epochs": 4, "learning_rate": rate, "target_kl": 1.0}
    _, learner, collector = make(64, policy, **settings)
    rates = []
    for _ in range(25):
        rollout = collector.collect(8)
        rates.append(float(rollout.success.sum() / rollout.done.sum()))
        learner.update(rollout, 0.0)
    assert rates[0] < 0.6
    assert rates[-1] > 0.9


def test_resumed_updates_equal_uninterrupted_ones() -> None:
    settings = {"minibatch": 20, "epochs": 2, "kl_coefficient": 0.1}
    policy, learner, collector = make(**settings)
    learner.update(collector.collect(4), 0.0)
    other_policy, other, other_collector = make(seed=1, **settings)
    other_policy.load_state_dict(policy.state_dict())
    other.load_state_dict(copy.deepcopy(learner.state_dict()))
    other_collector.load_state_dict(copy.deepcopy(collector.state_dict()))
    found = []
    for each, gather in ((learner, collector), (other, other_collector)):
        rollout = gather.collect(4)
        found.append((rollout.start, each.update(rollout, 0.0)))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
    for a, b in zip(policy.parameters(), other_policy.parameters(), strict=True):
        assert torch.equal(a, b)


def test_what_cannot_be_trained_is_one_line() -> None:
    with pytest.raises(UserError, match="does not number; use algorithm=ppo"):
        next(train(Nameless(8), MLPConfig(hidden=[8]).build(Nameless(8).contract), GRPOConfig(), env_steps=10))
    with pytest.raises(UserError, match=r"for algorithm=grpo; use policy\.sampler=flow_sde"):
        make(policy=FlowConfig(sampler=Sampler.ODE))
    with pytest.raises(UserError, match="group=1: expected a number of at least 2"):
        GRPOConfig(group=1)
    with pytest.raises(UserError, match=r"lowest <= highest, got 0\.9 and 0\.1"):
        GRPOConfig(lowest=0.9, highest=0.1)


def test_the_policy_at_the_start_pulls_back() -> None:
    policy, learner, collector = make(kl_coefficient=1.0, learning_rate=0.0)
    rollout = outcomes(collector.collect(4), [env % 4 < 2 for env in range(16)])
    batch, _ = prepared(learner, rollout)
    assert learner._step(batch)["reference_kl"] == pytest.approx(0.0, abs=1e-6)
    with torch.no_grad():
        for parameter in policy.actor_parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    batch.set("advantage", torch.zeros(len(batch)))
    score, old = (each.evaluate(batch["observation"], batch["sample"]).log_prob for each in (policy, learner.reference))
    behind = old.detach() - score
    expected = torch.autograd.grad((behind.exp() - 1 - behind).mean(), policy.actor_parameters())
    learner.config.max_gradient_norm = math.inf
    assert learner._step(batch)["reference_kl"] > 1e-3
    for gradient, parameter in zip(expected, policy.actor_parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-5)


def test_an_episode_that_diverged_is_worth_the_least_of_the_batch() -> None:
    _, learner, collector = make(envs=4, outcome=Outcome.RETURN)
    rollout = replace(collector.collect(4), has_success=False)
    cost = torch.tensor([-9.0, -4.0, -6.0, -1.0]).expand(rollout.done.shape)  # the last diverged early
    rollout = replace(rollout, episode_return=cost, events={"diverged": rollout.done & (torch.arange(4) == 3)})
    batch, _ = learner._prepare(rollout, ALONE)
    episodes = WholeRollout.of(rollout)
    first = {int(env): batch["advantage"][0, env] for env in episodes.env}
    assert first[3] < 0 < first[1]  # a group; -9 is the least
    assert not batch["own"][rollout.events["diverged"]].any()
