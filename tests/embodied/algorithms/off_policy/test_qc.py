"""Q-chunking: targets and losses by hand, learning in chunks, resuming, demonstrations."""

import copy
from dataclasses import replace

import pytest
import torch

from embodied import seeding
from embodied.algorithms.imitation.sft import SFTConfig
from embodied.algorithms.off_policy.qc import QC, QCConfig, QCFQLConfig
from embodied.data.episodes import FAILED, SUCCEEDED, Episodes
from embodied.errors import DivergedError, UserError
from embodied.policy import Steering
from embodied.rollout.rollout import Collector
from policies.flow import FlowConfig, FlowPolicy
from policies.generation.steering import SteeringConfig
from policies.mlp import MLPConfig
from tests.embodied.algorithms.off_policy.test_interventions import helped
from tests.embodied.algorithms.off_policy.test_sac import episodes
from tests.embodied.reach import Reach

CONFIGS = {"qc": QCConfig(), "qc_fql": QCFQLConfig(distillation=0.1)}


def make(
    name: str = "qc", seed: int = 0, demonstrations: Episodes | None = None, **settings
) -> tuple[FlowPolicy, QC, Collector]:
    torch.manual_seed(seed)
    env = Reach(32)
    kind = Steering.ONE_STEP if name == "qc_fql" else Steering.NONE
    steering = SteeringConfig(kind=kind, hidden=[32])
    config = FlowConfig(width=16, hidden=32, turn_rad=0.0, denoising_steps=2, steering=steering)
    policy = config.build(env.contract)
    policy.fit(env.reset(starts=torch.arange(32)), torch.tensor([[-0.2], [0.2]]))
    policy.start_critic()
    generator = torch.Generator().manual_seed(seed)
    small = {"hidden": [32, 32], "warmup": 300, "discount": 0.9, "minibatch": 64, "gradient_steps": 32}
    small["critic_warmup"] = 0
    rates = {"learning_rate": 3e-3, "value_learning_rate": 3e-3, "averaging": 0.02, "demonstration_share": 0.0}
    sft = SFTConfig(learning_rate=1e-3, average=0.95)
    learner = replace(CONFIGS[name], sft=sft, **small | rates | settings).build(policy, demonstrations, env, generator)
    return policy, learner, Collector(env, policy, generator)


def test_targets_are_values_of_the_best_candidate_by_hand() -> None:
    policy, learner, collector = make()
    for parameter in learner.q.targets.parameters():
        parameter.data += torch.randn_like(parameter)  # the trained networks have moved on
    policy.start_ranking()
    learner.replay.add(collector.collect(6))
    batch = learner.replay.transitions(learner.replay.draw(64, learner.generator), 1, 0.9)
    following = batch["next_observation"]
    draws = torch.Generator()
    draws.set_state(learner.generator.get_state())
    draws = seeding.child(draws)
    noise = torch.randn(64, 8, 2, 1, generator=draws)
    features = policy.encoder(following).repeat_interleave(8, 0)
    with torch.no_grad():
        chunks = policy.to_robot(policy._generate(noise.flatten(0, 1), features, False, draws)[0]).unflatten(0, (64, 8))
        best = policy.advantage(following, chunks).argmax(1)
        scaled = chunks[torch.arange(64), best] / 0.25
        values = learner.q.targets.values(torch.cat((policy.features(following), scaled.flatten(1)), -1))
    expected = batch["reward"] + batch["carry"] * values.mean(0)
    torch.testing.assert_close(learner._target(batch), expected)


def test_the_loss_of_the_one_step_actor_by_hand() -> None:
    policy, learner, collector = make("qc_fql", distillation=3.0)
    observation = collector.collect(1).last_observation
    draws = torch.Generator()
    draws.set_state(learner.generator.get_state())
    noise = torch.randn(32, 2, 1, generator=draws)
    chunk = policy.steering_actor.layers(torch.cat((policy.encoder(observation), noise.flatten(1)), -1)).view(32, 2, 1)
    behaviour = policy._generate(noise, policy.encoder(observation), True, None)[0]
    distance = (((chunk - behaviour) * policy.action_std / 0.25) ** 2).mean()
    actions = (chunk * policy.action_std + policy.action_mean).clamp(-0.25, 0.25)
    value = learner.q.values(observation, actions / 0.25).mean(0)
    expected = 3.0 * distance - value.mean() / value.abs().mean()
    encoded = []
    hook = policy.encoder.register_forward_hook(lambda *_: encoded.append(1))
    loss = learner._loss_of_one_step(policy, observation)
    hook.remove()
    assert len(encoded) == 1  # for the actor's chunk and the behaviour's
    torch.testing.assert_close(loss, expected)
    gradient, *_ = torch.autograd.grad(loss, policy.steering_parameters()[-1:])
    by_hand, *_ = torch.autograd.grad(
        3.0 * distance - value.mean() / value.abs().mean().detach(), policy.steering_parameters()[-1:]
    )
    torch.testing.assert_close(gradient, by_hand)


@pytest.mark.parametrize(("name", "iterations", "warmup"), [("qc", 8, 300), ("qc_fql", 18, 1000)])
def test_learns_to_reach_from_sparse_reward(name: str, iterations: int, warmup: int) -> None:
    _, learner, collector = make(name, seed=1, warmup=warmup)
    rates = []
    for _ in range(iterations):
        rollout = collector.collect(8)
        rates.append(float(rollout.success.sum() / rollout.done.sum()))
        learner.update(rollout, 0.0)
    assert sum(rates[:2]) / 2 < 0.6
    assert sum(rates[-3:]) / 3 > 0.9


@pytest.mark.parametrize("name", CONFIGS)
def test_the_policy_acts_by_values_after_the_warmup_of_the_critics(name: str) -> None:
    policy, learner, collector = make(name, warmup=1, critic_warmup=4, gradient_steps=2)
    acts_by_values = []
    for _ in range(3):
        learner.update(collector.collect(2), 0.0)
        acts_by_values.append(bool(policy.ranks or policy.steers))
    assert acts_by_values == [False, True, True]


@pytest.mark.parametrize("name", CONFIGS)
def test_resumed_updates_equal_uninterrupted_ones(name: str) -> None:
    policy, learner, collector = make(name, gradient_steps=4)
    for _ in range(3):
        learner.update(collector.collect(8), 0.0)
    rollout = collector.collect(8)
    other_policy, other, _ = make(name, seed=1, gradient_steps=4)
    other_policy.load_state_dict(policy.state_dict())
    other.load_state_dict(copy.deepcopy(learner.state_dict()))
    results = []
    for each in (learner, other):
        torch.manual_seed(0)  # the supervised loss draws from the global generator, whose state a run saves
        results.append(each.update(rollout, 0.0))
    assert results[0] == results[1]
    for a, b in zip(policy.parameters(), other_policy.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_behaviour_imitates_demonstrations_and_own_episodes() -> None:
    _, learner, collector = make(demonstrations=episodes(), demonstration_share=0.25)
    learner.replay.add(collector.collect(8))
    rows = learner.replay.draw(64, learner.generator)
    chunks = learner.replay.chunks(rows, 2)
    assert len(chunks) == 64
    demonstrated = chunks["observation", "position"][48:, 0].abs()
    assert torch.isin(demonstrated, torch.tensor([0.9, 0.65, 0.4, 0.15])).all()
    assert (chunks["actions"][48:].abs() == 0.25).all()
    assert not (chunks["actions"][:48].abs() == 0.25).all()
    # the last demonstrated action earns the reward of 1
    batch = learner.replay.transitions(rows, 1, 0.9)
    near = (demonstrated < 0.5).nonzero().squeeze(1) + 48
    earned = torch.where(demonstrated[near - 48] < 0.2, 1.0, 0.9)
    torch.testing.assert_close(batch["reward"][near], earned)
    assert (batch["carry"][near] == 0).all()


def test_the_behaviour_may_leave_out_what_failed() -> None:
    mixed = replace(episodes(), success=torch.tensor([SUCCEEDED, FAILED], dtype=torch.int8))
    _, learner, collector = make(demonstrations=mixed, demonstration_share=0.25, imitate_failures=False)
    learner.replay.add(helped(collector.collect(8), 0, 3))
    own, recorded = learner.replay.draw_imitable(4000, learner.generator, learner.replay.own_imitable())
    decisions = learner.replay.own.decisions(own)
    assert ((decisions["success"] == SUCCEEDED) | decisions["human"].any(-1)).all()
    assert set(own.unique().tolist()) == {
        *learner.replay.own.succeeded().tolist(),
        *learner.replay.interventions.tolist(),
    }
    assert len(own.unique()) < len(learner.replay)
    assert (learner.replay.demonstrations.decisions(recorded)["success"] == SUCCEEDED).all()
    assert len(own) / 4000 == pytest.approx(len(own.unique()) / (len(own.unique()) + 4), abs=0.03)


def test_what_the_behaviour_may_imitate_is_looked_up_once_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    _, learner, collector = make(warmup=1, gradient_steps=3, imitate_failures=False)
    looked_up, succeeded = [], learner.replay.own.succeeded
    monkeypatch.setattr(learner.replay.own, "succeeded", lambda: looked_up.append(1) or succeeded())
    learner.update(collector.collect(8), 0.0)
    assert learner.gradient_steps == 3
    assert len(looked_up) == 1


def test_a_behaviour_with_nothing_to_imitate_keeps_its_weights_while_critics_learn() -> None:
    policy, learner, collector = make(warmup=1, gradient_steps=2, imitate_failures=False)
    rollout = collector.collect(8)
    rollout.success[:] = False
    before = [part.clone() for part in policy.actor_parameters()]
    metrics = learner.update(rollout, 0.0)
    assert "behaviour_loss" not in metrics
    assert metrics["value_loss"] > 0.0
    assert all(torch.equal(old, new) for old, new in zip(before, policy.actor_parameters(), strict=True))
    assert "behaviour_loss" in learner.update(collector.collect(8), 0.0)


def test_other_policies_and_unknown_rewards_are_refused_and_the_advice_works() -> None:
    env = Reach(2)
    with pytest.raises(UserError, match=r"ranks candidates.*policy=flow"):
        QCConfig().build(MLPConfig(hidden=[8]).build(env.contract), None, env, torch.Generator())
    policy, *_ = make()
    with pytest.raises(UserError, match=r"policy\.steering\.kind=one_step"):
        QCFQLConfig().build(policy, None, env, torch.Generator())
    unknown = replace(episodes(), reward=torch.full((8,), torch.nan))
    with pytest.raises(
        UserError, match=r"rewards are unknown in 2 of 2 episodes of the demonstrations.*demonstration_share=0"
    ):
        make(demonstrations=unknown, demonstration_share=0.25)
    make(demonstrations=unknown, demonstration_share=0.0)


def test_no_weight_changes_by_what_is_not_finite() -> None:
    policy, learner, collector = make()
    rollout = collector.collect(16)
    rollout.reward[:] = torch.nan
    before = [part.clone() for part in policy.parameters()]
    with pytest.raises(DivergedError, match="value loss became nan"):
        learner.update(rollout, 0.0)
    assert all(torch.equal(old, new) for old, new in zip(before, policy.parameters(), strict=True))
