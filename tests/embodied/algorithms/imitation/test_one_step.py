"""One-step actors: their loss by hand, ranking of their candidates, learning, resumption, refusals."""

import copy
from dataclasses import replace

import pytest
import torch

from embodied.algorithms.imitation.one_step import OfflineOneStepConfig, OnlineOneStep, OnlineOneStepConfig
from embodied.errors import DivergedError, UserError
from embodied.export.network import Network
from embodied.policy import Steering
from embodied.rollout.rollout import Collector
from policies.generation.base import GenerativePolicy
from policies.generation.steering import SteeringConfig
from real_robot.firmware.generator import Generator
from tests.embodied.algorithms.off_policy.test_steering import count_encoded, observations_of, steered
from tests.embodied.reach import Reach
from tests.embodied.recorded_reach import recorded
from tests.embodied.saving.test_tree import same

SMALL = OnlineOneStepConfig(batch=64, learning_rate=3e-3, rollout_length=8, gradient_steps=120, warmup=240)


def make(seed: int = 0, *, diffusion: bool = False, **settings) -> tuple[GenerativePolicy, OnlineOneStep, Collector]:
    policy = steered(Steering.ONE_STEP, seed, diffusion=diffusion)
    env = Reach(16)
    generator = torch.Generator().manual_seed(seed)
    learner = replace(SMALL, **settings).build(policy, None, env, generator)
    return policy, learner, Collector(env, policy, generator)


def distance(policy: GenerativePolicy) -> float:
    """Mean distance of the actor's chunks from the denoised ones, in squared half ranges."""
    torch.manual_seed(1)
    observation = Reach(64).reset(starts=torch.arange(64))
    noise = torch.randn(64, 2, 1)
    with torch.no_grad():
        chunks = policy.steered(observation, noise)[0]
    return float(((chunks - policy.generate(observation, noise).detach()) / 0.25).square().mean())


@pytest.mark.parametrize("diffusion", [False, True])
def test_the_actor_generates_the_chunks_of_the_policy_which_stays_as_it_was(diffusion: bool) -> None:
    policy, learner, collector = make(diffusion=diffusion)
    frozen = [part.clone() for part in policy.actor_parameters()]
    before, acts = distance(policy), []
    for iteration in range(4):
        learner.update(collector.collect(8), iteration / 3)
        acts.append(bool(policy.steers))
    assert acts == [False, True, True, True]
    assert distance(policy) < 0.05 * before
    assert all(torch.equal(old, new) for old, new in zip(frozen, policy.actor_parameters(), strict=True))


def test_the_policy_encodes_each_observation_once() -> None:
    policy, learner, collector = make(gradient_steps=4)
    rollouts = [collector.collect(8) for _ in range(2)]
    encoded = count_encoded(policy)
    for rollout in rollouts:
        learner.update(rollout, 0.0)
    assert sum(encoded) == sum(map(observations_of, rollouts))


def test_the_loss_by_hand() -> None:
    policy, learner, _ = make(batch=16)
    observation = Reach(16).reset(starts=torch.arange(16))
    noise = torch.randn(16, 2, 1, generator=torch.Generator().manual_seed(0))
    features = policy.encoder(observation)
    chunk = policy.steering_actor.layers(torch.cat((features, noise.flatten(1)), -1)).view(16, 2, 1)
    generated = policy._generate(noise, features, True, None)[0]
    expected = ((chunk - generated) * policy.action_std / 0.25).square().mean()
    torch.testing.assert_close(learner.step(observation, 0.5), expected.detach())
    assert learner.optimiser.param_groups[0]["lr"] == pytest.approx(3e-3 * 0.51)


def test_a_policy_that_ranks_ranks_the_chunks_of_one_step() -> None:
    policy, *_ = make()
    for parameter in policy.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    policy.start_ranking()
    policy.start_steering(keep_ranking=True)
    assert policy.ranks
    encoder = copy.deepcopy(policy.advantage_encoder)
    policy.start_critic()  # as the stage rl does
    assert all(map(torch.equal, policy.advantage_encoder.parameters(), encoder.parameters()))
    observation = Reach(8).reset(starts=torch.arange(8))
    noise = policy._noise(observation, True, None)
    features = policy.encoder(observation).repeat_interleave(32, 0)
    chunks = policy.steering_actor.chunk(features, noise.flatten(0, 1))
    candidates = policy.to_robot(chunks).unflatten(0, (8, 32))
    best = policy.advantage(observation, candidates).argmax(1)
    assert best.unique().numel() > 1
    expected = candidates[torch.arange(8), best]
    torch.testing.assert_close(policy.act(observation, deterministic=True).actions, expected)
    network = policy.deployable()
    torch.testing.assert_close(network(*network.inputs.of(observation).values()), expected)
    assert not policy.scores


@pytest.mark.parametrize("hidden", [[32, 16], []])
def test_with_shared_noise_it_is_a_network_of_dense_layers(hidden: list[int]) -> None:
    policy = steered(Steering.ONE_STEP, hidden=hidden, shared_noise=True, horizon=3)
    policy.fit(Reach(32).reset(starts=torch.arange(32)), torch.tensor([[-0.2], [0.1], [0.25]]))
    for parameter in policy.steering_parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    policy.start_steering()
    observation = Reach(8).reset(starts=torch.arange(8))
    expected = policy.act(observation, deterministic=True).actions[:, :2]
    assert (expected.abs() < 0.25).any()
    noise = torch.randn(1, 3, 1, generator=torch.Generator().manual_seed(0)).expand(8, -1, -1)
    torch.testing.assert_close(policy.steered(observation, noise)[0][:, :2], expected)
    network = policy.deployable()
    assert isinstance(network, Network)
    flat = torch.cat([observation[key] for key in network.contract.observation], -1)
    torch.testing.assert_close(network(flat).view(8, 2, 1), expected)
    Generator(network)  # C has a kernel for each layer
    policy.start_ranking()
    policy.start_steering(keep_ranking=True)
    ranked = policy.deployable()
    torch.testing.assert_close(
        ranked(*ranked.inputs.of(observation).values()), policy.act(observation, deterministic=True).actions[:, :2]
    )
    with pytest.raises(UserError, match=r"shared_noise needs policy\.steering\.kind=one_step"):
        SteeringConfig(kind=Steering.NOISE, shared_noise=True)


def test_recorded_episodes_are_states_too() -> None:
    policy = steered(Steering.ONE_STEP)
    before = distance(policy)
    config = OfflineOneStepConfig(steps=300, batch=64, learning_rate=3e-3)
    learner = config.build(policy, torch.Generator().manual_seed(0))
    assert policy.steers
    learner.fit(recorded(), 300)
    assert learner.gradient_steps == 300
    assert distance(policy) < 0.05 * before


def test_resumed_updates_equal_uninterrupted_ones() -> None:
    policy, learner, collector = make(gradient_steps=3)
    learner.update(collector.collect(4), 0.0)
    rollout = collector.collect(4)
    other_policy, other, _ = make(seed=1, gradient_steps=3)
    other_policy.load_state_dict(policy.state_dict())
    other.load_state_dict(copy.deepcopy(learner.state_dict()))
    assert same(other.state_dict(), learner.state_dict())
    assert learner.update(rollout, 0.5) == other.update(rollout, 0.5)
    assert same(dict(other_policy.state_dict()), dict(policy.state_dict()))


def test_other_policies_and_numbers_that_are_not_finite_are_refused() -> None:
    other = steered(Steering.NOISE)
    with pytest.raises(UserError, match=r"algorithm=one_step; use policy=flow policy\.steering\.kind=one_step"):
        SMALL.build(other, None, Reach(2), torch.Generator())
    with pytest.raises(UserError, match=r"offline=one_step; use policy=flow policy\.steering\.kind=one_step"):
        OfflineOneStepConfig().build(other, torch.Generator())
    policy, learner, _ = make(batch=16)
    observation = Reach(16).reset(starts=torch.arange(16))
    observation["position"][0] = torch.nan
    before = [part.clone() for part in policy.parameters()]
    with pytest.raises(DivergedError, match="distance became nan"):
        learner.step(observation, 0.0)
    assert all(torch.equal(old, new) for old, new in zip(before, policy.parameters(), strict=True))
