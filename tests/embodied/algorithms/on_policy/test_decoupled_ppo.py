"""PPO on rollouts of older policies: the clip is around the policy before the update, the old one only weighs."""

import math
from dataclasses import replace

import pytest
import torch

from embodied.algorithms.on_policy import ppo
from embodied.algorithms.on_policy.ppo import PPOConfig
from embodied.errors import UserError
from tests.embodied.algorithms.on_policy.test_ppo_by_hand import gradients, make
from tests.embodied.algorithms.on_policy.test_recurrent_ppo import make as make_recurrent


@pytest.mark.parametrize(("likelier", "importance", "truncated"), [(3.0, 2.0, 1.0), (1.5, 1.5, 0.0), (0.25, 0.25, 0.0)])
def test_an_old_sample_weighs_as_much_as_it_is_likelier_now_up_to_the_limit(
    likelier: float, importance: float, truncated: float
) -> None:
    """w min(r A, clip(r) A) with r = 1 at the first step: the gradient is w times that of a fresh rollout."""
    policy, learner, collector = make(importance_limit=2.0)
    rollout = collector.collect(3)
    fresh, _ = learner._prepare(rollout, ppo.ALONE)
    learner._step(fresh.flatten(0, 1))
    expected = importance * gradients(policy.actor_parameters())

    policy, learner, _ = make(importance_limit=2.0)
    old = replace(rollout, log_prob=rollout.log_prob - math.log(likelier))
    batch, told = learner._prepare(old, ppo.ALONE)
    metrics = learner._step(batch.flatten(0, 1))
    assert told["importance"] == pytest.approx(importance, rel=1e-4)
    assert told["importance_truncated"] == truncated
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-6)  # from the policy before the update
    assert metrics["clip_fraction"] == 0.0
    torch.testing.assert_close(gradients(policy.actor_parameters()), expected, rtol=1e-3, atol=1e-6)


def test_without_the_option_what_is_too_likely_already_is_clipped_away() -> None:
    policy, learner, collector = make()
    rollout = collector.collect(3)
    batch, _ = learner._prepare(replace(rollout, log_prob=rollout.log_prob - math.log(3.0)), ppo.ALONE)
    batch["advantage"] = torch.ones_like(batch["advantage"])
    assert learner._step(batch.flatten(0, 1))["clip_fraction"] == 1.0
    assert not gradients(policy.actor_parameters()).any()


def test_on_fresh_rollouts_both_objectives_take_the_same_steps() -> None:
    weights = []
    for limit in (None, 2.0):
        policy, learner, collector = make(minibatch=8, epochs=3, target_kl=1e6, importance_limit=limit)
        for _ in range(3):
            learner.update(collector.collect(4), 0.0)
        weights.append(torch.cat([each.detach().flatten() for each in policy.parameters()]))
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make_learner", [make, make_recurrent])
def test_every_decision_is_scored_by_the_policy_before_the_update(make_learner, monkeypatch) -> None:
    monkeypatch.setattr(ppo, "FIRST_ROWS", 7)  # several pieces
    policy, learner, collector = make_learner(envs=5, importance_limit=2.0)
    collector.collect(2)
    rollout = collector.collect(4)
    with torch.no_grad():
        for parameter in policy.actor_parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    batch, _ = learner._prepare(rollout, ppo.ALONE)
    expected = policy.evaluate(rollout.observation, rollout.sample).log_prob.detach()
    torch.testing.assert_close(batch["proximal"], expected)
    assert not torch.allclose(batch["proximal"], rollout.log_prob, atol=1e-3)
    torch.testing.assert_close(batch["importance"], (expected - rollout.log_prob).exp().clamp_max(2.0))


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(UserError, match=r"^importance_limit=.*: expected a number of at least 1, or inf"):
        PPOConfig(importance_limit=0.5)
