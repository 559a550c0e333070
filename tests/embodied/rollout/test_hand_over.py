"""The base acts alone first, then the residual: inside an episode, and over training."""

import copy

import pytest
import torch

from embodied.algorithms.imitation.self_imitation import SelfImitationConfig
from embodied.algorithms.off_policy.residual import ResidualConfig
from embodied.errors import UserError
from embodied.policy import BASE, Steering
from embodied.rollout.hand_over import HandOverCollector
from embodied.rollout.rollout import Collector, Rollout
from tests.embodied.algorithms.off_policy.test_sac import episodes
from tests.embodied.algorithms.off_policy.test_steering import steered
from tests.embodied.reach import Reach

ENVS = 400


def collector(envs: int = ENVS, step_limit: int = 400, *, hands_over: bool = True, **options: int) -> Collector:
    """Collector of a policy whose residual is never zero, and too small to succeed."""
    policy = steered(Steering.RESIDUAL, residual_scale=0.5)
    policy.action_std.fill_(1e-6)
    policy.action_mean.zero_()
    for parameter in policy.steering_parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    policy.steering_actor.config.residual_scale = 1e-4
    policy.start_steering()
    env, noise = Reach(envs, step_limit=step_limit), torch.Generator().manual_seed(0)
    return HandOverCollector(env, policy, noise, None, **options) if hands_over else Collector(env, policy, noise)


def corrected(rollout: Rollout) -> torch.Tensor:
    """Decisions in which the residual acted, [T, N]; in all others the executed actions are those of the base."""
    return (rollout.actions != rollout.sample[BASE]).any(-1).any(-1)


def test_the_base_acts_in_the_first_decisions_of_each_episode_then_the_residual():
    rollout = collector(base_decisions_high=3).collect(6)
    acts = corrected(rollout)
    count = (~acts).sum(0)
    assert (acts == (torch.arange(6).unsqueeze(1) >= count)).all()  # once it has taken over it keeps acting
    # uniform from 0 to 3: four standard deviations of 400 draws are 35
    assert (count.bincount(minlength=4) - ENVS / 4).abs().max() < 35
    assert len(count.bincount()) == 4


def test_each_episode_has_a_number_of_its_own():
    each = collector(base_decisions_high=3)
    each.env.step_limit = torch.where(torch.arange(ENVS) % 2 == 0, 8, 6)  # episodes of four decisions, and of three
    rollout = each.collect(8)
    acts = corrected(rollout)
    gives_back = acts[:-1] & ~acts[1:]
    assert not (gives_back & ~rollout.done[:-1]).any()
    # the residual acted last and the base acts first: P(n <= 3) P(n > 0), P(n <= 2) P(n > 0), to 4 standard deviations
    assert float(gives_back[3, ::2].float().mean()) == pytest.approx(3 / 4, abs=0.13)
    assert float(gives_back[2, 1::2].float().mean()) == pytest.approx(9 / 16, abs=0.14)
    counts = (~acts[:4, ::2]).sum(0), (~acts[4:, ::2]).sum(0)
    assert (counts[0] != counts[1]).float().mean() > 0.6


def test_the_share_of_the_residual_grows_linearly_with_control_steps():
    steps = 8 * ENVS * 2  # eight decisions of two actions in each environment
    each = collector(progressive_steps=steps)
    share = corrected(each.collect(5)).float().mean(1), corrected(each.collect(7)).float().mean(1)
    expected = (torch.arange(12) / 8).clamp(max=1.0)
    torch.testing.assert_close(torch.cat(share), expected, atol=0.1, rtol=0.0)  # 4 standard deviations
    assert share[0][0] == 0.0
    assert (share[1][3:] == 1.0).all()


def test_nothing_is_drawn_without_the_options_and_for_a_policy_without_a_residual():
    plain, own = collector(8, hands_over=False), collector(8)
    first = plain.collect(6).actions
    assert torch.equal(first, own.collect(6).actions)
    assert not torch.equal(first, collector(8, base_decisions_high=3).collect(6).actions)
    alone = [collector(8, progressive_steps=10**6), collector(8, hands_over=False)]
    for each in alone:
        each.policy.stop_steering()
    one, other = (each.collect(6) for each in alone)
    assert torch.equal(one.actions, other.actions)


def test_a_collector_goes_on_where_it_was_saved():
    options = {"base_decisions_high": 6, "progressive_steps": 20 * 64 * 2}
    whole = collector(64, step_limit=12, **options)
    whole.collect(3)
    state = copy.deepcopy(whole.state_dict())
    expected = whole.collect(6)
    again = collector(64, step_limit=12, **options)
    again.load_state_dict(state)
    actual = again.collect(6)
    assert torch.equal(expected.actions, actual.actions)
    assert not corrected(actual).all()


def test_learners_store_what_was_executed_and_refuse_a_policy_without_a_residual():
    policy = steered(Steering.RESIDUAL)
    generator = torch.Generator().manual_seed(0)
    config = ResidualConfig(hidden=[8], warmup=10**6, base_decisions_high=2, progressive_steps=100)
    learner = config.build(policy, None, Reach(16), generator)
    each = learner.collector(Reach(16), policy, generator, None)
    assert isinstance(each, HandOverCollector)
    assert (each.base_decisions_high, each.progressive_steps) == (2, 100)
    rollout = each.collect(3)
    assert not corrected(rollout).all()
    learner.update(rollout, 0.0)
    stored = learner.replay.own.decisions(torch.arange(3 * 16), "actions")["actions"]
    assert torch.equal(stored, rollout.actions.flatten(0, 1))
    imitation = SelfImitationConfig(base_decisions_high=4).build(policy, episodes(), Reach(16), generator)
    assert imitation.collector(Reach(16), policy, generator, None).base_decisions_high == 4
    with pytest.raises(UserError, match=r"base_decisions_high; use .*steering\.kind=residual"):
        SelfImitationConfig(base_decisions_high=4).build(steered(Steering.NOISE), episodes(), Reach(2), generator)
