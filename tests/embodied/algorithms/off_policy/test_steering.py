"""Small actors that steer a frozen policy: DSRL and residuals, and the policy that acts by them."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch

from embodied.algorithms.imitation.self_imitation import SelfImitationConfig
from embodied.algorithms.imitation.sft import SFTConfig
from embodied.algorithms.off_policy.dsrl import DSRL, DSRLConfig
from embodied.algorithms.off_policy.replay import MixedReplay
from embodied.algorithms.off_policy.residual import ResidualConfig
from embodied.algorithms.off_policy.sac import SAC, SACConfig
from embodied.algorithms.on_policy.ppo import PPOConfig
from embodied.errors import UserError
from embodied.evaluation.evaluation import evaluate
from embodied.execution.chunking import Running
from embodied.networks.value_head import CriticHead
from embodied.policy import INITIAL_NOISE, Steering
from embodied.rollout.rollout import Collector, Rollout
from policies.diffusion import DiffusionConfig
from policies.flow import FlowConfig
from policies.generation.base import GenerativePolicy
from policies.generation.steering import ENCODED, SteeringConfig
from tests.embodied.algorithms.off_policy.test_sac import episodes
from tests.embodied.reach import Reach

CONFIGS: dict[str, tuple[Steering, SACConfig]] = {
    "dsrl": (Steering.NOISE, DSRLConfig(initial_temperature=0.1)),
    "dsrl, without aliasing": (Steering.NOISE, DSRLConfig(initial_temperature=0.1, aliasing=False)),
    "residual": (Steering.RESIDUAL, ResidualConfig()),
}

IMITATION = SFTConfig(batch=64, learning_rate=3e-3, average=0.95)


def steered(
    kind: Steering, seed: int = 0, *, horizon: int = 2, diffusion: bool = False, **steering
) -> GenerativePolicy:
    torch.manual_seed(seed)
    actor = SteeringConfig(kind=kind, **{"hidden": [32]} | steering)
    sizes = {"width": 16, "hidden": 32, "turn_rad": 0.0, "denoising_steps": 2, "steering": actor}
    config = DiffusionConfig(tuned_steps=1, **sizes) if diffusion else FlowConfig(**sizes)
    policy = config.build(Reach(1, horizon=horizon).contract)
    policy.fit(Reach(32).reset(starts=torch.arange(32)), torch.tensor([[-0.2], [0.2]]))
    policy.start_critic()
    return policy


def make(name: str, seed: int = 0, **settings) -> tuple[GenerativePolicy, SAC, Collector]:
    kind, config = CONFIGS[name]
    policy = steered(kind, seed, residual_scale=1.0)
    env = Reach(32)
    small = {"hidden": [32, 32], "warmup": 300, "discount": 0.9, "minibatch": 64, "updates": 0.125}
    rates = {"learning_rate": 3e-3, "value_learning_rate": 3e-3, "averaging": 0.02}
    generator = torch.Generator().manual_seed(seed)
    learner = replace(config, **small | rates | settings).build(policy, None, env, generator)
    return policy, learner, Collector(env, policy, generator)


@pytest.mark.parametrize("name", ["dsrl", "residual"])
def test_the_small_actor_learns_to_reach_beside_a_frozen_policy(name: str) -> None:
    policy, learner, collector = make(name)
    frozen = [part.clone() for part in policy.actor_parameters()]
    rates = []
    for _ in range(11):
        rollout = collector.collect(8)
        rates.append(float(rollout.success.sum() / rollout.done.sum()))
        learner.update(rollout, 0.0)
    assert sum(rates[:2]) / 2 < 0.65
    assert sum(rates[-4:]) / 4 > 0.85
    assert all(torch.equal(old, new) for old, new in zip(frozen, policy.actor_parameters(), strict=True))
    # Probe, Learn, Distill: imitation of the steered policy's successes
    alone = copy.deepcopy(policy)
    alone.stop_steering()
    assert success(alone) < 0.5
    hands_over = name == "residual"  # from states that the base reaches
    imitation = SelfImitationConfig(rounds=1, gradient_steps=150, demonstration_share=0.0, sft=IMITATION)
    imitation.base_decisions_high = 1 if hands_over else 0
    distilled = imitation.build(policy, episodes(), Reach(32), learner.generator)
    collector = distilled.collector(Reach(32), policy, learner.generator, distilled.starts)
    for progress in (0.5, 1.0):
        assert policy.steers
        distilled.update(collector.collect(8), progress)
    assert not policy.steers
    assert success(policy) > 0.85


def success(policy: GenerativePolicy) -> float:
    return float(evaluate(Reach(44), policy, starts_per_task=22).success.float().mean())


@pytest.mark.parametrize("name", CONFIGS)
def test_resumed_updates_equal_uninterrupted_ones(name: str) -> None:
    policy, learner, collector = make(name, updates=0.02)
    for _ in range(3):
        learner.update(collector.collect(8), 0.0)
    rollout = collector.collect(8)
    other_policy, other, _ = make(name, seed=1, updates=0.02)
    other_policy.load_state_dict(policy.state_dict())
    other.load_state_dict(copy.deepcopy(learner.state_dict()))
    metrics = learner.update(rollout, 0.0)
    assert metrics["value_loss"] > 0.0
    assert metrics == other.update(rollout, 0.0)
    for a, b in zip(policy.parameters(), other_policy.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_frozen_policy_encodes_each_observation_once(name: str) -> None:
    policy, learner, collector = make(name, updates=0.05, demonstration_share=0.0)
    rollouts = [collector.collect(8) for _ in range(3)]
    encoded = count_encoded(policy)
    metrics = [learner.update(rollout, 0.0) for rollout in rollouts]
    assert metrics[-1]["value_loss"] > 0.0
    assert sum(encoded) == sum(map(observations_of, rollouts))


def count_encoded(policy: GenerativePolicy) -> list[int]:
    """Numbers of observations that the encoder of `policy` reads from now on, one of each call."""
    counts = []
    policy.encoder.register_forward_hook(lambda _, inputs, __: counts.append(len(inputs[0])))
    return counts


def observations_of(rollout: Rollout) -> int:
    """Number of observations in `rollout`, with those that follow its last decisions and ends of episodes."""
    steps, environments = rollout.done.shape
    ends = 0 if rollout.final_observation is None else len(rollout.final_observation)
    return (steps + 1) * environments + ends


def test_features_of_a_batch_are_those_of_its_observations_demonstrations_too() -> None:
    policy, learner, collector = make("residual")
    replay = MixedReplay(policy, 500, 0.5, episodes(), encode=partial(policy.encoded, generates=True))
    replay.add(collector.collect(8))
    batch = replay.transitions(replay.draw(64, learner.generator), 1, 0.9)
    for name in ("observation", "next_observation"):
        torch.testing.assert_close(batch[name][ENCODED], policy.actor_features(batch[name]).detach())


def test_a_replay_of_observations_as_they_were_observed_is_resumed() -> None:
    policy, _, collector = make("residual")
    rollouts = [collector.collect(8) for _ in range(3)]
    states = []
    for encode in (None, partial(policy.encoded, generates=True)):
        replay = MixedReplay(policy, 500, encode=encode)
        for rollout in rollouts[:2]:
            replay.add(rollout)
        states.append(copy.deepcopy(replay.state_dict()))
    drawn = []
    for state in states:
        replay = MixedReplay(policy, 500, encode=partial(policy.encoded, generates=True))
        replay.load_state_dict(state)
        replay.add(rollouts[2])
        rows = replay.draw(64, torch.Generator().manual_seed(0))
        drawn.append(replay.transitions(rows, 2, 0.9))
    assert ENCODED in drawn[0]["next_observation"].keys()  # noqa: SIM118 - a TensorDict
    torch.testing.assert_close(drawn[0], drawn[1])


@pytest.mark.parametrize("options", [{}, {"entropy_in_target": True}])
def test_values_of_noise_are_those_of_its_actions_by_hand(options: dict[str, bool]) -> None:
    policy, learner, collector = make("dsrl", initial_temperature=0.3, **options)
    assert isinstance(learner, DSRL)
    assert learner.executed is not None
    for parameter in (*policy.steering_parameters(), *learner.executed.targets.parameters()):
        parameter.data += 0.3 * torch.randn_like(parameter)
    learner.replay.add(collector.collect(6))
    batch = learner._batch()
    draws = torch.Generator()
    draws.set_state(learner.generator.get_state())
    noise = torch.randn(64, 2, 1, generator=draws)
    following = batch["next_observation"]
    initial, log_prob = policy.initial_noise(following, noise)
    assert (initial.abs() <= 1.5).all()
    actions = policy.generate(following, initial)
    inputs = torch.cat((policy.features(following), (actions / 0.25).flatten(1)), -1)
    values = learner.executed.targets.values(inputs).amin(0)
    if options:
        values = values - 0.3 * log_prob.squeeze(1)
    torch.testing.assert_close(learner._target(batch), (batch["reward"] + batch["carry"] * values).detach())
    # critics of noise: Q_W(s, w) <- Q_A(s, generate(s, w)), w ~ N(0, I) in the first half and the actor's in the other
    seen = {}
    learner.q.step = lambda taught, target, step: seen.update(batch=taught, target=target) or {"value_loss": target}
    learner.executed.step = lambda batch, target, step: {}
    draws.set_state(learner.generator.get_state())
    learner._update_critics(batch)
    torch.randn(64, 2, 1, generator=draws)  # of the target
    noise = torch.randn(64, 2, 1, generator=draws)
    noise[32:] = policy.initial_noise(batch["observation"][32:], noise[32:])[0].detach()
    torch.testing.assert_close(seen["batch"]["actions"], noise.flatten(1).unsqueeze(1))
    actions = policy.generate(batch["observation"], noise)
    inputs = torch.cat((policy.features(batch["observation"]), (actions / 0.25).flatten(1)), -1)
    torch.testing.assert_close(seen["target"], learner.executed.critics.values(inputs).detach())
    _, learner, _ = make("dsrl", head=CriticHead.C51, bins=11, value_low=0.0, value_high=1.0)
    assert learner._target(batch).shape == (1, 64, 11)  # distributions of returns


def test_all_learning_rates_of_dsrl_decay_to_zero() -> None:
    policy = steered(Steering.NOISE)
    learner = DSRLConfig(warmup=1, updates=0.01, learning_rate=2e-3, value_learning_rate=4e-3).build(
        policy, None, Reach(32), torch.Generator().manual_seed(0)
    )
    assert isinstance(learner, DSRL)
    assert learner.executed is not None
    rollout = Collector(Reach(32), policy, torch.Generator().manual_seed(0)).collect(8)
    for progress in (0.75, 1.0):
        learner.update(rollout, progress)
        optimisers = learner.actor_optimiser, learner.q.optimiser, learner.executed.optimiser
        rates = [optimiser.param_groups[0]["lr"] for optimiser in optimisers]
        assert rates == pytest.approx([(1.0 - progress) * rate for rate in (2e-3, 4e-3, 4e-3)])


def test_without_aliasing_noise_is_the_action_and_a_person_has_none() -> None:
    policy, learner, collector = make("dsrl, without aliasing")
    rollout = collector.collect(4)
    learner.update(rollout, 0.0)
    batch = learner.replay.own.decisions(torch.arange(4 * 32), "observation", "actions")
    torch.testing.assert_close(batch["actions"].view(4, 32, 2, 1), rollout.sample[INITIAL_NOISE])
    actions = policy.generate(batch["observation"], batch["actions"].view(-1, 2, 1))
    torch.testing.assert_close(actions, rollout.actions.flatten(0, 1))
    human = torch.zeros_like(rollout.executed)
    human[1] = True
    with pytest.raises(UserError, match="aliasing=true"):
        learner.update(replace(rollout, signals={"human": human}), 0.0)


def test_a_residual_corrects_executed_actions_within_its_scale_by_hand() -> None:
    policy = steered(Steering.RESIDUAL, horizon=3, residual_scale=0.4)
    for parameter in policy.steering_parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    observation = Reach(32).reset(starts=torch.arange(32))
    noise = torch.randn(32, 3 + 2, 1)
    actions, log_prob, initial = policy.steered(observation, noise)
    assert torch.equal(initial, noise[:, :3])
    base = policy.generate(observation, noise[:, :3])
    inputs = torch.cat((policy.encoder(observation), base[:, :2].flatten(1) / 0.25), -1)
    mean, log_std = policy.steering_actor.layers(inputs).view(32, 2, 2).unbind(1)
    u = (mean + log_std.exp() * noise[:, 3:, 0]).tanh()
    expected = (base[:, :2, 0] + 0.4 * 0.25 * u).clamp(-0.25, 0.25)
    torch.testing.assert_close(actions[:, :2, 0], expected)
    assert torch.equal(actions[:, 2], base[:, 2])
    normal = torch.distributions.Normal(mean, log_std.exp())
    slope = (1.0 - u.square()).log()
    torch.testing.assert_close(log_prob[:, 0], (normal.log_prob(u.atanh()) - slope).sum(1), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("diffusion", [False, True])
@pytest.mark.parametrize("kind", [Steering.NOISE, Steering.RESIDUAL, Steering.ONE_STEP])
def test_a_steered_policy_acts_exports_and_keeps_what_it_was(kind: Steering, diffusion: bool) -> None:
    policy = steered(kind, diffusion=diffusion, residual_scale=0.5)
    observation = Reach(8).reset(starts=torch.arange(8))
    alone = steered(Steering.NONE, diffusion=diffusion)
    policy.load_state_dict(alone.state_dict())  # of the policy before there was a small actor
    before = policy.act(observation, deterministic=True).actions
    torch.testing.assert_close(before, alone.act(observation, deterministic=True).actions)
    for parameter in policy.steering_parameters():
        parameter.data += 0.5 * torch.randn_like(parameter)
    policy.start_ranking()
    policy.start_steering()
    assert not policy.ranks
    after = policy.act(observation, deterministic=True).actions
    assert ((after - before).abs() > 1e-3).any()
    assert torch.equal(after, policy.act(observation, deterministic=True).actions)
    saved = steered(kind, seed=1, diffusion=diffusion, residual_scale=0.5)
    saved.load_state_dict(policy.state_dict())
    assert torch.equal(after, saved.act(observation, deterministic=True).actions)
    network = policy.deployable()
    inputs = network.inputs.of(observation)
    torch.testing.assert_close(network(*inputs.values()), after[:, :2])
    with pytest.raises(UserError, match="log-probability"):
        PPOConfig().build(policy, None, Reach(8), torch.Generator())
    if not diffusion:
        alike = copy.deepcopy(policy)
        alike.start_ranking()
        assert not alike.steers
        with pytest.raises(UserError, match="execution=blend"):
            policy.inpaint(observation, Running(after, torch.ones(8), torch.ones(8)))


@pytest.mark.parametrize(("config", "kind"), [(DSRLConfig(), "noise"), (ResidualConfig(), "residual")])
def test_a_policy_without_the_small_actor_is_refused_in_one_line(config: SACConfig, kind: str) -> None:
    with pytest.raises(UserError, match=f"policy=flow policy.steering.kind={kind}"):
        config.build(steered(Steering.ONE_STEP), None, Reach(2), torch.Generator())
