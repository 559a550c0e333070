"""Offline learners: losses by hand, learning from mostly failed episodes, resumption."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict

from embodied import seeding
from embodied.algorithms.critics import CriticConfig
from embodied.algorithms.imitation.sft import SFTConfig
from embodied.algorithms.micro_batch import saved_bytes
from embodied.algorithms.off_policy.qc import QCConfig
from embodied.algorithms.off_policy.sac import WSRLConfig
from embodied.algorithms.offline.calql import CalQL, CalQLConfig
from embodied.algorithms.offline.co_rft import CoRFTConfig
from embodied.algorithms.offline.fql import FQLConfig, OfflineQCConfig
from embodied.algorithms.offline.iql import IQL, Extraction, FamO2OConfig, FDVLConfig, IQLConfig, ValueLoss
from embodied.algorithms.offline.rebrac import ReBRAC, ReBRACConfig, TD3BCConfig
from embodied.algorithms.offline.recap import RECAPConfig
from embodied.algorithms.passes import MetaValues, Passes, on_meta
from embodied.data.transitions import Transitions
from embodied.errors import UserError
from embodied.evaluation.evaluation import evaluate
from embodied.policy import Steering, TrainablePolicy
from embodied.task import OfflineLearner, OfflineLearnerConfig
from embodied.world import ALONE, OneProcess
from policies.encoders.base import EncoderKind
from policies.flow import FlowConfig
from policies.generation.steering import SteeringConfig
from policies.mlp import MLPConfig
from policies.squashed import SquashedConfig
from tests.embodied.reach import Reach
from tests.embodied.recorded_reach import recorded
from tests.embodied.saving.test_tree import same

CRITICS = CriticConfig(hidden=[32, 32], layer_norm=True)
SMALL = {"steps": 300, "batch": 64, "discount": 0.9, "averaging": 0.02}
NEAR = SMALL | {"hidden": [32, 32], "learning_rate": 3e-3}
IMPLICIT = SMALL | {"critics": CRITICS, "value_learning_rate": 1e-3}
LEARNERS = {
    "iql": IQLConfig(**IMPLICIT),
    "iql with ddpg_bc": IQLConfig(**IMPLICIT, extraction=Extraction.DDPG_BC),
    "f_dvl": FDVLConfig(**IMPLICIT),
    "famo2o with chi_square": FamO2OConfig(**IMPLICIT, value_loss=ValueLoss.CHI_SQUARE),
    "rebrac": ReBRACConfig(**NEAR),
    "rebrac of a squashed policy": ReBRACConfig(**NEAR),
    "td3_bc": TD3BCConfig(**NEAR),
    "recap": RECAPConfig(steps=8, batch=64, hidden=[32]),
    "calql": CalQLConfig(**NEAR, value_learning_rate=3e-3, sampled_actions=4, initial_temperature=0.1),
    "qc": OfflineQCConfig(**NEAR, value_learning_rate=3e-3),
    "fql": FQLConfig(**NEAR, value_learning_rate=3e-3, distillation=0.1),
    "co_rft": CoRFTConfig(**NEAR, value_learning_rate=3e-3, distillation=0.1, conservatism=0.01),
}
FLOW = FlowConfig(width=16, hidden=32, turn_rad=0.0, denoising_steps=2)
ONE_STEP = replace(FLOW, steering=SteeringConfig(kind=Steering.ONE_STEP, hidden=[32]))
POLICIES = {
    "calql": SquashedConfig(hidden=[32]),
    "rebrac of a squashed policy": SquashedConfig(hidden=[32]),
    "recap": FlowConfig(width=8, hidden=8, turn_rad=0.0, advantage_guidance=1.5),
    "qc": FLOW,
    "fql": ONE_STEP,
    "co_rft": ONE_STEP,
}


def make(config: OfflineLearnerConfig, seed: int = 0, policy: object = None) -> tuple[TrainablePolicy, OfflineLearner]:
    torch.manual_seed(seed)
    built = (policy or MLPConfig(hidden=[32])).build(Reach(1).contract)
    built.fit(*recorded().by_weight())
    return built, config.build(built, torch.Generator().manual_seed(seed))


def batch_of(learner: IQL | ReBRAC | CalQL, rows: torch.Tensor) -> TensorDict:
    contract = learner.policy.contract
    return Transitions(recorded(), contract.executed, learner.config.discount).take(rows, contract.horizon)


def success(policy: TrainablePolicy) -> float:
    return float(evaluate(Reach(44), policy, starts_per_task=22).success.float().mean())


@pytest.mark.parametrize(
    "name",
    [
        "iql",
        "iql with ddpg_bc",
        "famo2o with chi_square",
        "rebrac",
        "rebrac of a squashed policy",
        "calql",
        "qc",
        "co_rft",
    ],
)
def test_learns_from_episodes_of_which_most_failed(name: str) -> None:
    policy, learner = make(LEARNERS[name], policy=POLICIES.get(name))
    steps = {"co_rft": 500, "rebrac of a squashed policy": 900}.get(name, 300)
    learner.fit(recorded(), steps)
    assert learner.gradient_steps == steps
    assert success(policy) > 0.9  # imitation of the successful quarter comes to 0.5


def test_imitation_does_not() -> None:
    policy, learner = make(SFTConfig(steps=300, batch=64))
    learner.fit(recorded(), 300)
    assert success(policy) < 0.7


@pytest.mark.parametrize("name", LEARNERS)
def test_a_resumed_learner_has_the_weights_of_an_uninterrupted_one(name: str) -> None:
    policy, learner = make(LEARNERS[name], policy=POLICIES.get(name))
    learner.fit(recorded(), 3)
    other_policy, other = make(LEARNERS[name], seed=1, policy=POLICIES.get(name))
    other_policy.load_state_dict(copy.deepcopy(policy.state_dict()))
    other.load_state_dict(copy.deepcopy(learner.state_dict()))
    assert same(other.state_dict(), learner.state_dict())
    metrics = []
    for each in (learner, other):
        torch.manual_seed(0)  # of the noise in a supervised loss
        metrics.append(each.fit(recorded(), 3))
    assert metrics[0] == metrics[1]
    assert same(dict(other_policy.state_dict()), dict(policy.state_dict()))


def test_targets_and_losses_of_co_rft_by_hand() -> None:
    policy, learner = make(LEARNERS["co_rft"], policy=ONE_STEP)
    for parameter in learner.q.targets.parameters():
        parameter.data += torch.randn_like(parameter)  # the trained networks have moved on
    learner.fit(recorded(), 0)
    batch = learner._batch(learner.transitions)
    observation, actions, prefixes = batch["observation"], batch["actions"] / 0.25, batch["prefixes"]
    one, ones = torch.zeros(64, 2, 1), torch.ones(64, 2, 1)
    one[:, 0] = 1.0
    inputs = [torch.cat((actions * marks, marks), -1).flatten(1) for marks in (one, ones)]
    inputs = [torch.cat((policy.features(observation), each), -1) for each in inputs]
    is_known, draws = prefixes["is_known"], torch.Generator()
    draws.set_state(learner.generator.get_state())
    noise = torch.randn(int(is_known.sum()), 1, 2, 1, generator=seeding.child(draws))
    following = prefixes["next_observation"][is_known]
    expected = torch.zeros(64, 2)
    with torch.no_grad():
        own, *_ = policy.steered(following, noise[:, 0])
        own = torch.cat((own / 0.25, torch.ones(len(own), 2, 1)), -1).flatten(1)
        values = learner.q.targets.values(torch.cat((policy.features(following), own), -1)).mean(0)
    expected[is_known] = prefixes["reward"][is_known] + prefixes["carry"][is_known] * values
    target = learner._target(batch)
    assert 64 < int(is_known.sum()) < 128
    torch.testing.assert_close(target, expected[is_known])
    errors = torch.stack([learner.q.critics.values(each) for each in inputs], -1) - expected
    torch.testing.assert_close(learner.q.loss(batch, target), errors.square()[:, is_known].mean(-1).sum())
    draws.set_state(learner.generator.get_state())
    whole = is_known[:, 1]
    own, *_ = policy.steered(observation[whole], torch.randn(int(whole.sum()), 2, 1, generator=draws))
    own = torch.cat((policy.features(observation[whole]), own.flatten(1) / 0.25), -1)
    own = torch.stack((own[:, -2], torch.ones(len(own)), own[:, -1], torch.ones(len(own))), -1)
    own = learner.q.critics.values(torch.cat((policy.features(observation[whole]), own), -1))
    data = learner.q.critics.values(inputs[1][whole])
    gap = (own.maximum(batch["returns"][whole]) - data).mean(-1).sum()
    torch.testing.assert_close(learner._penalty(batch), gap)
    assert float(learner._penalty(batch[~whole]).detach()) == 0.0  # no chunk is whole
    assert learner.values() is None


@pytest.mark.parametrize("name", ["iql", "calql"])
def test_critics_go_on_with_values_in_the_unit_of_rewards(name: str) -> None:
    policy, learner = make(LEARNERS[name], policy=SquashedConfig(hidden=[32]))
    learner.fit(recorded(), 2)
    saved = copy.deepcopy(learner.state_dict())
    _, resumed = make(LEARNERS[name], seed=1, policy=SquashedConfig(hidden=[32]))
    resumed.load_state_dict(saved)
    assert resumed.values() is not None
    critics = {"hidden": [32, 32], "layer_norm": True}
    online = WSRLConfig(**critics).build(policy, None, Reach(1), torch.Generator())
    online.continue_values(resumed.values())
    batch = batch_of(learner, torch.arange(64))
    actions = learner.q.scaled(batch["actions"])
    scale = Transitions(recorded(), 2, 0.9).scale
    assert scale != 1.0
    for network in ("critics", "targets"):
        inputs = learner.q.inputs(batch["observation"], actions)
        expected = getattr(learner.q, network).values(inputs) * scale
        torch.testing.assert_close(getattr(online.q, network).values(inputs), expected)
    for change in ({"hidden": [32]}, {"ensemble": 3}, {"layer_norm": False}):
        other = WSRLConfig(**critics | change).build(policy, None, Reach(1), torch.Generator())
        with pytest.raises(UserError, match=r"critics of the stage offline have other layers; use the same hidden"):
            other.continue_values(resumed.values())
    with pytest.raises(UserError, match=r"use stages=\[offline,rl\] offline=calql"):
        online.continue_values(None)


def test_qc_goes_on_with_the_critics_and_the_head_of_the_stage_offline() -> None:
    policy, learner = make(LEARNERS["qc"], policy=FLOW)
    learner.fit(recorded(), 2)
    values = learner.values()
    batch = batch_of(learner, torch.arange(64))
    expected = learner.q.values(batch["observation"], learner.q.scaled(batch["actions"])) * learner.q.unit
    advantage = policy.advantage(batch["observation"], batch["actions"].unsqueeze(1))
    policy.start_critic()  # as the stage rl does
    online = QCConfig(hidden=[32, 32], demonstration_share=0.0).build(policy, None, Reach(1), torch.Generator())
    online.continue_values(values)
    scaled = online.q.scaled(batch["actions"])
    torch.testing.assert_close(online.q.values(batch["observation"], scaled), expected)
    assert torch.equal(policy.advantage(batch["observation"], batch["actions"].unsqueeze(1)), advantage)
    online.continue_values(None)  # there was no stage offline
    one_step, _ = make(LEARNERS["fql"], policy=ONE_STEP)
    assert not one_step.scores  # so that stages=[offline,rl] algorithm=ppo are refused before the stage offline


def test_learners_of_one_process_are_refused_in_several() -> None:
    for name in ("calql", "qc"):
        _, learner = make(LEARNERS[name], policy=POLICIES[name])
        with pytest.raises(UserError, match="in one process; use offline=iql in several"):
            learner.fit(recorded(), 1, OneProcess(size=2))


def test_losses_of_iql_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, learner = make(IQLConfig(**IMPLICIT, max_weight=0.1))
    batch, imitated = batch_of(learner, torch.arange(64)), []
    q = learner.q.targets.values(
        torch.cat((policy.features(batch["observation"]), batch["actions"][..., 0] / 0.25), -1)
    )
    v, following = (
        learner.critics.v.values(policy.features(batch[name]))[0] for name in ("observation", "next_observation")
    )
    advantage = q.amin(0) - v
    target = batch["reward"] + batch["carry"] * following
    inputs = torch.cat((policy.features(batch["observation"]), batch["actions"][..., 0] / 0.25), -1)
    q_loss = (learner.q.critics.values(inputs) - target).square().mean(1).sum()
    monkeypatch.setattr(learner, "step", lambda each, *_: imitated.append(each["valid"]) or 0.0)
    encoded, features = [], policy.features
    monkeypatch.setattr(policy, "features", lambda each: encoded.append(torch.is_grad_enabled()) or features(each))
    metrics = learner._learn(batch, ALONE)
    assert encoded == [False, False, True]  # s of the advantage, s' of the target, s that Q's loss differentiates
    v_loss = torch.where(advantage > 0, 0.9, 0.1) * advantage.square()
    assert metrics["state_value_loss"] == pytest.approx(float(v_loss.mean().detach()), rel=1e-5)
    assert metrics["value_loss"] == pytest.approx(float(q_loss.detach()), rel=1e-5)
    weight = (10.0 * advantage).exp().clamp(max=0.1)
    assert 0 < int((weight == 0.1).sum()) < 64
    torch.testing.assert_close(imitated[0], batch["valid"] * (weight / weight.mean()).unsqueeze(1).detach())


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (ValueLoss.TOTAL_VARIATION, (0.75 * (1.0 + 4.0) - 0.25 * (1.0 + 4.0 - 6.0)) / 3),
        (ValueLoss.CHI_SQUARE, (0.75 * (1.0 + 0.25 + 4.0 + 4.0) - 0.25 * (1.0 + 4.0 - 6.0)) / 3),
    ],
)
def test_conjugates_of_f_divergences_by_hand(kind: ValueLoss, expected: float) -> None:
    _, learner = make(FDVLConfig(**IMPLICIT, value_loss=kind, conjugate_weight=0.75))
    assert float(learner.critics.state_value_loss(torch.tensor([1.0, 4.0, -6.0]))) == pytest.approx(expected)
    # V of equal actions is their Q: the loss grows to both sides of it
    at, above, below = (float(learner.critics.state_value_loss(torch.tensor([x]))) for x in (0.0, -0.1, 0.1))
    assert at == 0.0
    assert min(above, below) > 0.0


def test_the_family_of_famo2o_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, learner = make(FamO2OConfig(**IMPLICIT, max_weight=3.0))
    family = learner.family
    batch, advantage, drawn = batch_of(learner, torch.arange(64)), torch.linspace(-1, 1, 64), torch.linspace(-1, 1, 64)
    features = policy.features(batch["observation"])
    actions = family.members(torch.cat((features, drawn[:, None]), 1)).unflatten(1, (2, 1))
    weight = ((11.0 + 3.0 * drawn) * advantage).exp().clamp(max=3.0)
    error = (actions - batch["actions"] / 0.25).square()[..., 0] * batch["valid"]
    imitation = torch.autograd.grad((weight[:, None] * error).mean(), list(family.members.parameters()))
    place = family.choice(features)
    best = family.members(torch.cat((features, place), 1))
    values = learner.q.critics.values(torch.cat((features, best), 1)).amin(0)
    choice = torch.autograd.grad(-values.mean(), list(family.choice.parameters()))
    monkeypatch.setattr(family.optimiser, "step", lambda: None)  # leaves the gradients
    temperature = family.step(batch, advantage, drawn, 1)
    torch.testing.assert_close(temperature, (11.0 + 3.0 * place.squeeze(1)).detach())
    parameters = [*family.members.parameters(), *family.choice.parameters()]
    for parameter, own in zip(parameters, (*imitation, *choice), strict=True):
        torch.testing.assert_close(parameter.grad, own)
    assert all(parameter.grad is None for parameter in learner.q.critics.parameters())
    # the policy imitates with the temperature of each state
    imitated = []
    monkeypatch.setattr(learner, "step", lambda each, *_: imitated.append(each["valid"]) or 0.0)
    learner._extract(batch, advantage, temperature, 0.0, ALONE)
    weight = (temperature * advantage).exp().clamp(max=3.0)
    torch.testing.assert_close(imitated[0], batch["valid"] * (weight / weight.mean()).unsqueeze(1))


def test_temperatures_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(UserError, match=r"highest_inverse_temperature > inverse_temperature, got 14 and 20"):
        FamO2OConfig(inverse_temperature=20.0)
    with pytest.raises(UserError, match=r"option of offline\.extraction=awr; leave it out"):
        IQLConfig(highest_inverse_temperature=20.0, extraction=Extraction.DDPG_BC)
    IQLConfig(extraction=Extraction.DDPG_BC)  # the advice


def test_iql_with_equal_weights_is_supervised_fine_tuning() -> None:
    policy, learner = make(
        IQLConfig(**IMPLICIT, inverse_temperature=0.0), policy=FlowConfig(width=8, hidden=8, turn_rad=0.0)
    )
    other, imitation = make(SFTConfig(steps=300, batch=64), policy=FlowConfig(width=8, hidden=8, turn_rad=0.0))
    batch = batch_of(learner, torch.arange(64))
    torch.manual_seed(0)
    learner._learn(batch, ALONE)
    torch.manual_seed(0)
    imitation.step(batch, 0.0)
    for a, b in zip(policy.actor_parameters(), other.actor_parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_targets_and_actor_loss_of_rebrac_by_hand() -> None:
    policy, learner = make(ReBRACConfig(**NEAR, actor_bc=0.3, critic_bc=0.7, target_noise=0.5, noise_clip=0.3))
    for parameter in (*learner.target_policy.parameters(), *learner.q.targets.parameters()):
        parameter.data += torch.randn_like(parameter)  # the trained networks have moved on
    batch = batch_of(learner, torch.arange(64))
    noise = learner._noise(batch, ALONE)
    assert noise.abs().max() == pytest.approx(0.3)
    following = batch["next_observation"]
    actions = (learner.target_policy.actions(following) / 0.25 + noise).clamp(-1.0, 1.0)
    values = learner.q.targets.values(torch.cat((policy.features(following), actions.flatten(1)), -1)).amin(0)
    count = batch["next_valid"].sum(1)
    assert count.unique().tolist() == [0, 1, 2]  # one action is left of some episodes, two of others
    error = (actions - batch["next_actions"] / 0.25).square()[..., 0]
    distance = torch.where(count == 0, 0.0, error[:, 0] + torch.where(count == 2, error[:, 1], 0.0))
    expected = batch["reward"] + batch["carry"] * (values - 0.7 * distance)
    torch.testing.assert_close(learner._target(batch, noise), expected.detach())
    own = policy.actions(batch["observation"])
    inputs = torch.cat((policy.features(batch["observation"]), own.flatten(1) / 0.25), -1)
    q = learner.q.critics.values(inputs).amin(0)
    error = (((own - batch["actions"]) / 0.25).square().sum(-1))[batch["valid"]].mean()
    learner._update_actor(batch, ALONE)
    assert learner.actor_loss == pytest.approx(float((-q.mean() / q.abs().mean() + 0.3 * error).detach()), rel=1e-4)


@pytest.mark.parametrize("name", ["rebrac", "iql with ddpg_bc"])
def test_the_actors_loss_does_not_differentiate_the_critics_and_their_features(name: str) -> None:
    policy, learner = make(LEARNERS[name], policy=SquashedConfig(hidden=[32], encoder=EncoderKind.FLAT))
    assert len(list(policy.value_encoder.parameters()))  # features are learned
    batch = batch_of(learner, torch.arange(64))
    if isinstance(learner, ReBRAC):
        learner._update_actor(batch, ALONE)
    else:
        learner._extract(batch, torch.zeros(64), 1.0, 0.0, ALONE)
    assert all(each.grad is None for each in (*policy.critic_parameters(), *learner.q.critics.parameters()))
    assert any(each.grad is not None for each in getattr(learner, "trained", policy).actor_parameters())


def test_the_penalty_of_calql_by_hand() -> None:
    policy, learner = make(LEARNERS["calql"], policy=POLICIES["calql"])
    batch, sampled = batch_of(learner, torch.arange(64)), []
    draw = learner._candidates
    learner._candidates = lambda *arguments: sampled.append(draw(*arguments)) or sampled[-1]
    encoded = []
    hook = policy.encoder.register_forward_hook(lambda _, __, output: encoded.append(len(output)))
    penalty, gap = learner._penalty(batch)
    hook.remove()
    assert encoded == [64, 64]  # observations and following ones, not once for each of four sampled actions
    features = policy.features(batch["observation"])
    terms = []
    for (actions, log_density), floor in zip(sampled, (None, batch["returns"], batch["returns"]), strict=True):
        for k in range(4):
            values = learner.q.critics.values(torch.cat((features, actions[k::4].flatten(1)), -1))
            values = values if floor is None else values.maximum(floor)
            terms.append((values - log_density[k::4]).exp())
    assert sampled[0][1].unique().tolist() == pytest.approx([2 * math.log(0.5)])  # two actions of one element
    data = learner.q.values(batch["observation"], batch["actions"] / 0.25)
    expected = torch.stack(terms).sum(0).log() - data
    torch.testing.assert_close(penalty, expected.mean(-1).sum())
    torch.testing.assert_close(gap, expected.mean().detach())
    lowered = replace(LEARNERS["calql"], calibrated=False)
    _, other = make(lowered, policy=POLICIES["calql"])
    assert other._penalty(batch)[0].item() < penalty.item()


def test_the_memory_that_calql_plans_is_what_a_gradient_step_stores() -> None:
    config = SquashedConfig(width=256, hidden=[32], encoder=EncoderKind.FLAT)
    _, learner = make(LEARNERS["calql"], policy=config)
    learner.fit(recorded(), 1)
    batch = learner._batch()
    stored = saved_bytes(lambda: learner.q.loss(batch, learner._target(batch)) + learner._penalty(batch)[0])
    with MetaValues():
        policy = on_meta(lambda: config.build(Reach(1).contract))
        planned = LEARNERS["calql"].build(policy, torch.Generator()).largest_pass(Passes(policy, 1, 1))
    assert planned == pytest.approx(stored, rel=0.02)  # 13 actions, and features once, of each observation


def test_the_temperature_of_calql_reaches_what_the_wished_deviation_needs() -> None:
    config = CalQLConfig()
    # Q = -k a^2 has the deviation 1 of returns over actions in [-1, 1] if k = sqrt(45 / 4). The best normal policy has
    # the variance alpha / (2 k), so that one decision on one element needs alpha = 2 k sigma^2, ...
    one = 2.0 * math.sqrt(45.0 / 4.0) * config.target_std**2
    assert one == pytest.approx(0.393, abs=1e-3)
    # ... and each of 15 decisions on 35 elements, which share the variance of the returns, 1 / sqrt(15 * 35) of it
    each = one / math.sqrt(15 * 35)
    assert config.temperature_learning_rate is not None
    for needed, steps in ((each, 3_000), (one, config.steps)):
        # Adam moves log alpha by at most its learning rate in a step
        assert abs(math.log(needed / config.initial_temperature)) < 0.5 * config.temperature_learning_rate * steps
    _, learner = make(replace(config, hidden=[32], batch=64), policy=SquashedConfig(hidden=[32]))
    learner.fit(recorded(), 1)  # a new policy deviates by more than the wish
    assert float(learner.temperature) == pytest.approx(0.01 * math.exp(-1e-3), rel=1e-6)


UNFIT = [ReBRACConfig(), IQLConfig(extraction=Extraction.DDPG_BC), CalQLConfig(), FQLConfig()]


@pytest.mark.parametrize("config", UNFIT)
def test_policies_that_a_learner_cannot_train_are_refused(config: OfflineLearnerConfig) -> None:
    with pytest.raises(UserError, match=r"(deterministic actions|reparameterised samples|small actor for .*fql); use"):
        make(config, policy=FlowConfig(width=8, hidden=8, turn_rad=0.0))


def test_episodes_without_what_critics_read_are_refused() -> None:
    _, learner = make(LEARNERS["iql"])
    episodes = recorded()
    with pytest.raises(UserError, match="read task, which the episodes lack"):
        learner.fit(replace(episodes, observation=episodes.observation.exclude("task")), 1)
