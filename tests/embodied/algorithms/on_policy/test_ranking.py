"""Ranking learns from executed chunks which of its candidates are better, and resumes exactly."""

import copy
import math
from dataclasses import replace

import pytest
import torch

from embodied.algorithms.advantage import gae
from embodied.algorithms.imitation.self_imitation import SelfImitationConfig
from embodied.algorithms.imitation.sft import SFTConfig
from embodied.algorithms.on_policy.ranking import Ranking, RankingConfig
from embodied.networks.value_head import CriticHead, ValueHead
from embodied.rollout.rollout import Collector
from policies.encoders.base import EncoderKind
from policies.flow import FlowConfig
from policies.mlp import MLPConfig
from tests.embodied.algorithms.imitation.test_self_imitation import demonstrations
from tests.embodied.ranking_mlp import RankingMLP, RankingMLPConfig
from tests.embodied.reach import Reach


def make(
    seed: int = 0, rounds: int = 1, values: ValueHead | None = None, **settings
) -> tuple[RankingMLP, Ranking, Collector]:
    torch.manual_seed(seed)
    config = RankingMLPConfig(hidden=[32], initial_std=0.8, values=values or ValueHead())
    policy = config.build(Reach(1).contract)
    policy.fit(Reach(32).reset(starts=torch.arange(32)), torch.zeros(1, 1))
    sft = SFTConfig(steps=400, batch=64, learning_rate=5e-3, final_learning_rate=5e-3, average=0.9)
    imitation = SelfImitationConfig(rollout_length=8, gradient_steps=10, capacity=5000, rounds=rounds, sft=sft)
    config = RankingConfig(imitation, value_minibatch=256, minibatch=128, discount=0.9, learning_rate=3e-3, **settings)
    learner = config.build(policy, demonstrations(), Reach(64), torch.Generator().manual_seed(seed))
    return policy, learner, Collector(Reach(64), policy, torch.Generator().manual_seed(seed), learner.starts)


def test_ranking_alone_raises_the_success_of_the_same_proposals():
    policy, learner, collector = make(warmup=3)
    actor = copy.deepcopy(policy.actor.state_dict())
    shares = []
    for _ in range(8):
        rollout = collector.collect(8)
        shares.append(float(rollout.success.sum() / rollout.done.sum()))
        learner.update(rollout, 0.1)
    assert all(torch.equal(actor[name], value) for name, value in policy.actor.state_dict().items())
    assert sum(shares[:3]) / 3 < 0.5
    assert sum(shares[-3:]) / 3 > sum(shares[:3]) / 3 + 0.3


def test_ranking_begins_after_its_warmup():
    policy, learner, collector = make(warmup=3)
    ranks = []
    for _ in range(4):
        learner.update(collector.collect(2), 0.1)
        ranks.append(bool(policy.ranks))
    assert ranks == [False, False, True, True]


def test_targets_are_advantages_under_the_policy_that_collected():
    policy, learner, collector = make(warmup=6, gae_lambda=0.6, value_gae_lambda=0.9)
    for iteration in range(3):
        rollout = collector.collect(5)
        with torch.no_grad():
            value, following = (
                policy.value(seen.flatten(0, 1)).view(5, 64)
                for seen in (rollout.observation, rollout.next_observation())
            )
        endings = (rollout.reward, rollout.executed, rollout.terminated, rollout.truncated)
        advantage, _ = gae(*endings, value, following, discount=0.9, gae_lambda=0.6)
        _, expected = gae(*endings, value, following, discount=0.9, gae_lambda=0.9)
        torch.testing.assert_close(learner._targets(rollout, value, following)[0], expected)
        metrics = learner.update(rollout, 0.1)
        assert ("advantage_loss" in metrics) == (iteration == 2)  # the value learned alone for two iterations
    rows = learner.replay.decisions(torch.arange(5 * 64))
    torch.testing.assert_close(rows["advantage"], advantage.flatten())
    assert torch.equal(rows["chunk"], rollout.actions.flatten(0, 1))
    assert torch.equal(rows["observation", "position"], rollout.observation["position"].flatten(0, 1))


def test_categorical_values_and_advantages_have_ranges_that_belong_together():
    head = ValueHead(CriticHead.HL_GAUSS, bins=11, value_low=-0.25, value_high=1.0)
    _, learner, collector = make(values=head, value_learning_rate=1e-2)
    rollout = collector.collect(4)
    metrics = learner.update(rollout, 0.1)
    assert metrics["value_loss"] == pytest.approx(math.log(11), abs=0.3)
    assert metrics["clamped_targets"] == 0.0
    observation, returns = rollout.observation.flatten(0, 1), torch.full((4 * 64,), 0.7)
    losses = [learner._fit_value(observation, returns) for _ in range(8)]
    assert losses[-1] < losses[0]
    torch.testing.assert_close(learner.policy.value(observation), returns, atol=0.05, rtol=0.0)
    # learners of Q rank by values themselves
    assert ValueHead(CriticHead.HL_GAUSS, value_low=5.0, value_high=7.0).of_differences().limits == (-2.0, 7.0)
    flow = FlowConfig(width=8, hidden=8, values=head, encoder=EncoderKind.FLAT).build(Reach(1).contract)
    assert (flow.critic[-1].out_features, flow.advantage_head[-1].out_features) == (11, 11)
    observation, actions = Reach(4).reset(starts=torch.arange(4)), torch.zeros(4, 2, 1)
    flow.fit(observation, actions)
    # A = Q - V lies in [low - high, high - low]
    assert flow.advantage_values == replace(head, value_low=-1.25, value_high=1.25)
    features = torch.cat((flow.advantage_encoder(observation), torch.zeros(4, 2)), -1)
    target = flow.advantage_values.histogram(torch.full((4,), 0.5))
    expected = torch.nn.functional.cross_entropy(flow.advantage_head(features), target)
    torch.testing.assert_close(flow.advantage_loss(observation, actions, torch.full((4,), 0.5)), expected)


def test_what_a_person_achieves_is_no_merit_of_the_chunk_before():
    _, learner, collector = make(gae_lambda=0.6)
    rollout = collector.collect(3)
    going = torch.zeros_like(rollout.done)
    human = torch.zeros_like(rollout.executed)
    human[1] = True
    rollout = replace(
        rollout, terminated=going, truncated=going, executed=torch.ones_like(human), signals={"human": human}
    )
    value, following = torch.zeros(3, 64), torch.full((3, 64), 2.0)
    reward = torch.zeros_like(rollout.reward)
    reward[1, :, 0] = 5.0
    _, advantage = learner._targets(replace(rollout, reward=reward), value, following)
    # 2 after two steps; the reward and the same, and .6 of what the last decision is worth after two steps
    last = 0.9**2 * 2.0
    expected = torch.tensor([last, 5.0 + last + 0.9**2 * 0.6 * last, last])
    torch.testing.assert_close(advantage, expected.unsqueeze(1).expand(3, 64))


def test_only_the_last_iterations_are_replayed():
    _, learner, collector = make(warmup=0, window=2)
    for _ in range(3):
        last = collector.collect(8)
        learner.update(last, 0.1)
    assert len(learner.replay) == 2 * 8 * 64
    held = learner.replay.decisions(torch.arange(2 * 8 * 64))["observation", "position"].flatten().tolist()
    assert set(last.observation["position"].flatten().tolist()) <= set(held)


def test_imitation_renews_the_proposals_and_leaves_the_critics_alone():
    policy, learner, collector = make(warmup=0, rounds=2)
    learner.update(collector.collect(8), 0.3)
    actor, imitator = policy.actor[0].weight.clone(), learner.imitation.sft.policy
    learner.update(collector.collect(8), 0.4)
    assert torch.equal(policy.actor[0].weight, imitator.actor[0].weight)
    assert not torch.equal(policy.actor[0].weight, actor)
    assert not torch.equal(policy.ranker[0].weight, imitator.ranker[0].weight)
    assert bool(policy.ranks)


def test_the_last_part_of_a_run_keeps_the_proposals():
    policy, learner, collector = make(warmup=0, rounds=2, imitated=0.8)
    for progress in (0.4, 0.8):
        learner.update(collector.collect(8), progress)
    actor, ranker = policy.actor[0].weight.clone(), policy.ranker[0].weight.clone()
    learner.update(collector.collect(8), 1.0)
    assert torch.equal(policy.actor[0].weight, actor)
    assert not torch.equal(policy.ranker[0].weight, ranker)
    assert learner.imitation.gradient_steps == 20
    with pytest.raises(ValueError, match=r"imitated=.*: expected a number above 0"):
        RankingConfig(imitated=0.0)


def test_gradient_steps_of_all_networks_are_counted():
    _, learner, collector = make(warmup=0, gradient_steps=7, epochs=2)
    learner.update(collector.collect(8), 0.1)  # 512 rows are 2 minibatches of the value
    assert learner.gradient_steps == 10 + 7 + 2 * 2


def test_chunks_are_exchanged_as_imitation_says():
    policy, learner, collector = make()
    assert learner.collector(collector.env, policy, collector.generator, learner.starts).exchange == 0.0
    learner.imitation.config.exchange = 0.3
    assert learner.collector(collector.env, policy, collector.generator, learner.starts).exchange == 0.3


def test_a_policy_that_cannot_rank_is_refused():
    policy = MLPConfig(hidden=[8]).build(Reach(1).contract)
    with pytest.raises(ValueError, match="expected a policy that ranks candidates"):
        RankingConfig().build(policy, demonstrations(), Reach(2), torch.Generator())


@pytest.mark.parametrize("warmup", [1, 6])
def test_a_resumed_learner_takes_the_same_steps(warmup):
    policy, learner, collector = make(warmup=warmup, rounds=4)
    for iteration in range(3):
        learner.update(collector.collect(5), 0.1 * (iteration + 1))
    saved = copy.deepcopy({"learner": learner.state_dict(), "collector": collector.state_dict()})
    other_policy, other, other_collector = make(seed=3, warmup=warmup, rounds=4)
    other_policy.load_state_dict(policy.state_dict())
    first = [learner.update(collector.collect(5), 0.1 * (iteration + 4)) for iteration in range(2)]
    other.load_state_dict(saved["learner"])
    other_collector.load_state_dict(saved["collector"])
    assert [other.update(other_collector.collect(5), 0.1 * (iteration + 4)) for iteration in range(2)] == first
    assert all(torch.equal(value, other_policy.state_dict()[name]) for name, value in policy.state_dict().items())


def test_what_the_simulation_did_not_survive_is_not_learned_from():
    """Neither by the critic, whose returns there would be 1000, nor by the ranking."""
    _, learner, collector = make(warmup=1)
    rollout = collector.collect(4)
    broken = torch.zeros_like(rollout.done)
    broken[2, :3] = True
    reward = rollout.reward + 1000.0 * broken.unsqueeze(-1)
    rollout = replace(rollout, events={"diverged": broken}, terminated=rollout.terminated | broken, reward=reward)
    assert learner.update(rollout, 0.1)["value_loss"] < 100.0
    assert len(learner.replay) == 4 * 64 - 3
