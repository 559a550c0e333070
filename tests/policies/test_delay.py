"""Flow policies under a delay: the action prefix is read without noise, is not learned, and has no likelihood."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict

from embodied.contract import ACTION_PREFIX
from embodied.errors import UserError
from embodied.policy import EXECUTED, Steering
from policies.encoders.base import EncoderKind
from policies.flow import FlowConfig, FlowPolicy, Sampler
from policies.generation.base import Aggregate
from policies.generation.chunk_networks import NetworkKind
from policies.generation.steering import SteeringConfig
from policies.vla.pi0 import Pi0Config, Pi0Policy
from policies.vla.smolvla.policy import SmolVLAConfig
from tests.policies.observations import contract, observations
from tests.policies.test_flow import FLAT, SCENE, SCORED, driving
from tests.policies.vla.test_pi0 import SEEING, seen

DELAY = 2


def flow(sampler: Sampler = Sampler.FLOW_SDE, **settings: object) -> FlowPolicy:
    """Policy of objects with chunks of H = 4 actions, K = 3 of them executed, after a prefix of two."""
    torch.manual_seed(0)
    config = FlowConfig(width=32, hidden=32, sampler=sampler, noise_level=0.5, turn_rad=0.0, **settings)
    policy = config.build(contract().delayed(DELAY))
    policy.fit(late(64), torch.randn(64, 4, 2) * 0.3 + 0.1)
    return policy


def late(count: int, seed: int = 0) -> TensorDict:
    prefix = torch.rand(count, DELAY, 2, generator=torch.Generator().manual_seed(seed)) - 0.5
    return observations(count, seed).set(ACTION_PREFIX, prefix)


def pi0(**settings: object) -> Pi0Policy:
    torch.manual_seed(0)
    made = Pi0Config(**{"hidden": 16, **settings}).build(SEEING.delayed(DELAY))
    for parameter in made.parameters():  # so that no layer has its special initial weights
        parameter.data += 0.05 * torch.randn_like(parameter)
    made.fit(late_pictures(16), torch.rand(16, 4, 3) * torch.tensor([1.0, 2.0, 3.0]))
    return made


def late_pictures(count: int, seed: int = 0) -> TensorDict:
    return seen(count, seed).set(ACTION_PREFIX, torch.rand(count, DELAY, 3))


def test_the_likelihood_is_that_of_the_executed_actions_after_the_prefix() -> None:
    policy, observation = flow(), late(6, seed=1)
    decision = policy.act(observation)
    path = decision.sample["path"]
    given = (observation[ACTION_PREFIX] - policy.action_mean) / policy.action_std
    assert path.shape == (6, 5, 6, 2)
    assert (path[:, :, :DELAY] == given.unsqueeze(1)).all()  # in all of the four steps
    for row in range(6):
        step = int(decision.sample["noisy"][row])
        x, following = path[row, step], path[row, step + 1]
        t = 1.0 - step / 4
        times = torch.tensor([[0.0, 0.0, t, t, t, t]])  # 0 is the action, without noise
        features = policy.encoder(policy.encoder.read(observation[row : row + 1]))
        v = policy.velocity(x[None], times, features)[0].detach()
        sigma = 0.5 * math.sqrt(t / (0.25 if step == 0 else 1.0 - t))
        mean = x - 0.25 * v - sigma**2 * 0.25 / (2 * t) * (x + (1 - t) * v)
        std = 0.5 * sigma
        total = sum(
            -0.5 * ((float(following[i, d]) - float(mean[i, d])) / std) ** 2
            - math.log(std)
            - 0.5 * math.log(2 * math.pi)
            for i in range(2, 5)  # K = 3 of the actions after the prefix
            for d in range(2)
        )
        assert decision.log_prob[row].item() == pytest.approx(total, rel=1e-4)
    torch.testing.assert_close(decision.actions, policy.to_robot(path[:, -1, DELAY:]))


@pytest.mark.parametrize("aggregate", [Aggregate.SUM, Aggregate.MEAN])
@pytest.mark.parametrize("sampler", SCORED)
def test_evaluate_equals_act_and_actions_that_did_not_run_do_not_count(sampler: Sampler, aggregate: Aggregate) -> None:
    policy, observation = flow(sampler, aggregate=aggregate), late(20, seed=1)
    decision = policy.act(observation)
    evaluation = policy.evaluate(observation, decision.sample)
    torch.testing.assert_close(evaluation.log_prob, decision.log_prob, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(evaluation.value, policy.value(observation))
    first = decision.sample.copy().set(EXECUTED, torch.tensor([[True, False, False]]).expand(20, 3))
    shorter = policy.evaluate(observation, first).log_prob
    torch.testing.assert_close(shorter, decision.log_prob_terms[:, :1].sum(1), rtol=1e-5, atol=1e-5)


def test_the_likelihood_has_gradients_from_the_chunk_alone() -> None:
    policy, observation = flow(Sampler.FLOW_NOISE), late(8)
    policy.evaluate(observation, policy.act(observation).sample).log_prob.sum().backward()
    rows = policy.noise[2].weight.grad.view(6, 2, -1).abs().sum((1, 2))
    assert (rows > 0.0).tolist() == [False, False, True, True, True, False]  # prefix, executed, not executed


@pytest.mark.parametrize("network", [NetworkKind.MLP, NetworkKind.DIT])
def test_the_loss_is_that_of_flow_matching_after_the_prefix(network: NetworkKind) -> None:
    policy, observation = flow(network=network), late(500)
    actions, calls = torch.rand(500, 4, 2) - 0.5, []
    policy.velocity.register_forward_hook(lambda _, given, velocity: calls.append((*given[:2], velocity)))
    loss = policy.loss(observation, actions, torch.ones(500, 4, dtype=torch.bool))
    x, times, velocity = calls[0]
    assert (times[:, :DELAY] == 0.0).all()
    assert (times[:, DELAY:] == times[:, -1:]).all()
    torch.testing.assert_close(x[:, :DELAY], policy.normalised(observation[ACTION_PREFIX]))
    t, target = times[:, DELAY:].unsqueeze(-1), policy.normalised(actions)
    noise = (x[:, DELAY:] - (1.0 - t) * target) / t
    torch.testing.assert_close(loss, (velocity[:, DELAY:] - (noise - target)).square().mean(), rtol=1e-3, atol=0.0)


def test_actor_and_critics_see_the_prefix() -> None:
    policy, observation = flow(), late(12)
    other = observation.copy().set(ACTION_PREFIX, -observation[ACTION_PREFIX])
    assert ACTION_PREFIX in policy.actor_keys
    for read in (policy.value, lambda seen: policy.act(seen, deterministic=True).actions):
        assert not torch.equal(read(observation), read(other))
    chunks = torch.rand(12, 3, 4, 2)
    assert not torch.equal(policy.advantage(observation, chunks), policy.advantage(other, chunks))
    policy.start_ranking()
    assert policy.act(observation).sample["path"].shape == (12, 5, 6, 2)


def test_chunks_from_other_noise_continue_the_prefix_too() -> None:
    for policy, observation in ((flow(), late(5)), (pi0(), late_pictures(5))):
        read = observation if isinstance(policy, Pi0Policy) else policy.encoder.read(observation)
        noise = policy._noise(read, True, None).reshape(5, 6, -1)
        noise[:, :DELAY] = 9.0  # in place of which the prefix is read
        expected = policy.act(observation, deterministic=True).actions
        with torch.no_grad():
            torch.testing.assert_close(policy.generate(read, noise), expected, rtol=1e-4, atol=1e-5)


def test_a_flat_encoder_reads_the_prefix_once() -> None:
    late_flat = FLAT.delayed(DELAY)
    policy = FlowConfig(width=16, hidden=32, encoder=EncoderKind.FLAT).build(late_flat)
    policy.fit(driving(32).set(ACTION_PREFIX, torch.rand(32, DELAY, 2)), torch.rand(32, 1, 2))
    assert policy.feature_size == 32
    assert list(policy.actor_keys).count(ACTION_PREFIX) == 1


def test_scenes_turn_with_their_prefix() -> None:
    torch.manual_seed(0)
    policy = FlowConfig(width=32, hidden=32, hidden_words=0.0, hidden_distractors=0.0).build(SCENE.delayed(1))
    actions = torch.rand(16, 4, 7) - 0.5
    observation = observations(16).set(ACTION_PREFIX, actions[:, :1])
    policy.fit(observation, actions)
    changed, turned = policy._augmented(observation, actions)
    assert not torch.equal(turned, actions)
    torch.testing.assert_close(changed[ACTION_PREFIX], turned[:, :1])
    assert torch.equal(observation[ACTION_PREFIX], actions[:, :1])


def test_exported_candidates_continue_the_prefix() -> None:
    policy, observation = flow(), late(5)
    network = policy.deployable()
    assert ACTION_PREFIX in network.contract.observation
    read = policy.encoder.read(observation)
    noise = policy._noise(read, True, None)
    inputs = [read[key] for key in network.contract.observation]
    expected = policy.act(observation, deterministic=True).actions[:, :3]
    torch.testing.assert_close(network(*inputs, noise), expected)
    assert ACTION_PREFIX in network.example(3, 2, 0)


def test_options_that_exclude_a_delay_are_refused() -> None:
    for name, options in {
        "trained_delay": {"trained_delay": 1},
        "steering": {"steering": SteeringConfig(kind=Steering.NOISE)},
        "shortcut": {"shortcut": 0.25},
    }.items():
        with pytest.raises(UserError, match=rf"delay=2 .* leave out policy\.{name}"):
            flow(**options)
    with pytest.raises(UserError, match=r"delay=2 .* leave out policy\.trained_delay"):
        pi0(trained_delay=1)


def test_pi0_scores_and_learns_what_follows_the_prefix() -> None:
    policy, observation = pi0(), late_pictures(4, seed=1)
    decision = policy.act(observation)
    path = decision.sample["path"]
    given = (observation[ACTION_PREFIX] - policy.action_mean) / policy.action_std
    assert path.shape == (4, 5, 6, 32)
    torch.testing.assert_close(path[:, :, :DELAY, :3], given.unsqueeze(1).expand(-1, 5, -1, -1))
    assert decision.actions.shape == (4, 4, 3)
    torch.testing.assert_close(decision.actions, policy.to_robot(path[:, -1, DELAY:]))
    evaluation = policy.evaluate(observation, decision.sample)
    torch.testing.assert_close(evaluation.log_prob, decision.log_prob, rtol=1e-4, atol=1e-4)
    moved = observation.copy().set(ACTION_PREFIX, 1.0 - observation[ACTION_PREFIX])
    assert not torch.equal(policy.value(observation), policy.value(moved))
    assert not torch.equal(
        policy.act(moved, deterministic=True).actions, policy.act(observation, deterministic=True).actions
    )
    calls = []
    velocity = policy._velocity

    def watched(state, prefix, x, times):
        calls.append((x, times))
        return velocity(state, prefix, x, times)

    policy._velocity = watched
    actions = torch.rand(4, 4, 3)
    torch.manual_seed(3)
    loss = policy.loss(observation, actions, torch.ones(4, 4, dtype=torch.bool))
    (x, times), target = calls[0], policy._normalised(actions, observation)
    assert (times[:, :DELAY] == 0.0).all()
    torch.testing.assert_close(x[:, :DELAY, :3], given)
    t = times[:, DELAY:].unsqueeze(-1)
    noise = (x[:, DELAY:] - (1.0 - t) * target) / t
    predicted = velocity(policy._state(observation), policy._prefix(observation), x, times)[0][:, DELAY:]
    expected = (predicted - (noise - target))[..., :3].square().mean()
    torch.testing.assert_close(loss, expected, rtol=1e-3, atol=1e-5)


def test_the_prefix_is_no_state_of_a_vision_language_action_model() -> None:
    for config in (Pi0Config(hidden=16), SmolVLAConfig(hidden=16)):
        policy = config.build(SEEING.delayed(DELAY))
        assert policy.inputs.state_size == 2
        assert ACTION_PREFIX in policy.actor_keys
        assert policy.generated == 6
    assert replace(SEEING, horizon=4).delayed(0) == SEEING
