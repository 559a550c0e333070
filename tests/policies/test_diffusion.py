"""Diffusion policies: kernels against diffusers' schedulers, scores, deterministic acting, learning."""

import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler

from embodied.errors import UserError
from policies.diffusion import DiffusionConfig, DiffusionPolicy
from policies.generation.base import Aggregate
from policies.generation.chunk_networks import ChunkUNet, NetworkKind, chunk_network
from policies.kernels.diffusion import NoiseTable, Prediction, ddim_step, denoised, noised, target
from policies.kernels.flow import gaussian_log_prob
from tests.policies.observations import contract, observations

SCHEDULE = "squaredcos_cap_v2"


def make(**settings) -> DiffusionPolicy:
    torch.manual_seed(0)
    sizes = {"width": 32, "hidden": 32, "turn_rad": 0.0, "train_steps": 20, "denoising_steps": 5, "tuned_steps": 3}
    policy = DiffusionConfig(**(sizes | settings)).build(contract())
    policy.fit(observations(64), torch.randn(64, 4, 2) * 0.3)
    return policy


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("prediction", Prediction)
def test_ddpm_is_that_of_diffusers(prediction: Prediction) -> None:
    table = NoiseTable(50, 50, SCHEDULE)
    theirs = DDPMScheduler(50, beta_schedule=SCHEDULE, prediction_type=prediction.value, clip_sample=False)
    x, predicted = normal(1, 4, 2), normal(1, 4, 2, seed=1)
    for index in (0, 25, 48, 49):
        before, after = table.before[[index]], table.after[[index]]
        mean, std = ddim_step(x, denoised(x, predicted, before, prediction), before, after, eta=1.0)
        time = int(table.times[index])
        drawn = theirs.step(predicted, time, x, generator=torch.Generator().manual_seed(2)).prev_sample
        noise = normal(1, 4, 2, seed=2) if time > 0 else 0.0
        torch.testing.assert_close(mean + std * noise, drawn, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("eta", [0.0, 0.7])
def test_ddim_is_that_of_diffusers(eta: float) -> None:
    table = NoiseTable(50, 10, SCHEDULE)
    theirs = DDIMScheduler(50, beta_schedule=SCHEDULE, clip_sample=False)
    theirs.set_timesteps(10)
    assert theirs.timesteps.tolist() == table.times.tolist()
    x, predicted = normal(1, 4, 2), normal(1, 4, 2, seed=1)
    for index in (0, 4, 9):
        before, after = table.before[[index]], table.after[[index]]
        mean, std = ddim_step(x, denoised(x, predicted, before, Prediction.EPSILON), before, after, eta)
        noise = normal(1, 4, 2, seed=2)
        time = int(table.times[index])
        drawn = theirs.step(predicted, time, x, eta=eta, variance_noise=noise).prev_sample
        torch.testing.assert_close(mean + std * noise, drawn, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("prediction", Prediction)
def test_a_perfect_network_finds_the_action(prediction: Prediction) -> None:
    action, noise, level = normal(6, 4, 2), normal(6, 4, 2, seed=1), torch.tensor([0.05, 0.2, 0.5, 0.7, 0.9, 0.99])
    x = noised(action, noise, level)
    found = denoised(x, target(action, noise, level, prediction), level, prediction)
    torch.testing.assert_close(found, action, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("network", NetworkKind)
@pytest.mark.parametrize("aggregate", Aggregate)
def test_every_part_is_the_log_probability_of_its_step(network: NetworkKind, aggregate: Aggregate) -> None:
    policy, observation = make(network=network, aggregate=aggregate), observations(6, seed=1)
    decision = policy.act(observation)
    evaluation = policy.evaluate(observation, decision.sample)
    torch.testing.assert_close(evaluation.log_prob, decision.log_prob, atol=2e-5, rtol=2e-5)
    features, path = policy.encoder(policy.encoder.read(observation)), decision.sample["path"]
    for part in range(3):
        mean, std = policy._kernel(path[:, part], torch.full((6,), 2 + part), features, deterministic=False)
        parts = gaussian_log_prob(path[:, part + 1], mean, std)[:, : policy.contract.executed].flatten(1)
        expected = parts.mean(1) if aggregate is Aggregate.MEAN else parts.sum(1)  # steps stay apart
        torch.testing.assert_close(evaluation.log_prob[:, part], expected, atol=2e-5, rtol=2e-5)
    assert (
        torch.stack([policy._kernel(path[:, 0], torch.full((6,), i), features, False)[1] for i in (2, 4)]) >= 0.1
    ).all()


def test_deterministic_chunks_repeat_and_exploring_ones_vary() -> None:
    policy, observation = make(), observations(4)
    first, again = (policy.act(observation, deterministic=True) for _ in range(2))
    assert torch.equal(first.actions, again.actions)
    assert (first.log_prob == 0.0).all()
    assert not torch.equal(policy.act(observation).actions, policy.act(observation).actions)
    low, high = policy.action_low, policy.action_high
    assert ((first.actions >= low) & (first.actions <= high)).all()


@pytest.mark.parametrize("prediction", Prediction)
def test_it_learns_both_of_two_actions(prediction: Prediction) -> None:
    """A chunk is all -0.6 or all 0.6: their mean is wrong."""
    policy = make(prediction=prediction, train_steps=50, denoising_steps=10, hidden=64)
    observation = observations(256)
    side = torch.where(normal(256, seed=3) > 0.0, 0.6, -0.6)
    actions = side.view(-1, 1, 1).expand(-1, 4, 2).clone()
    policy.fit(observation, actions)
    optimiser = torch.optim.Adam(policy.actor_parameters(), 4e-3)
    same = observations(1).expand(256)
    for _ in range(600):
        optimiser.zero_grad()
        policy.loss(same, actions, torch.ones(256, 4)).backward()
        optimiser.step()
    with torch.no_grad():
        found = policy._generate(normal(200, 4, 2), policy.encoder(policy.encoder.read(same[:200])), True, None)[0]
    chunks = policy.to_robot(found)
    assert (chunks.abs().sub(0.6).abs() < 0.15).float().mean() > 0.85
    assert 0.25 < (chunks[:, 0, 0] > 0.0).float().mean() < 0.75
    assert (chunks.amax((1, 2)) - chunks.amin((1, 2)) < 0.3).float().mean() > 0.85  # one side a chunk


def test_a_chunk_of_any_length_passes_the_unet() -> None:
    network = ChunkUNet(2, 7, [16, 32, 64], ticks=20)
    for horizon in (1, 4, 5, 16):
        assert network(normal(3, horizon, 2), torch.rand(3), normal(3, 7)).shape == (3, horizon, 2)


@pytest.mark.parametrize("kind", NetworkKind)
def test_networks_use_time_and_features(kind: NetworkKind) -> None:
    torch.manual_seed(0)
    network, x = chunk_network(kind, 4, 2, 7, 32, 2), normal(3, 4, 2)
    for parameter in network.parameters():  # gates of a new DiT are shut
        parameter.data += 0.1 * torch.randn_like(parameter)
    plain = network(x, torch.full((3,), 0.2), torch.zeros(3, 7))
    assert not torch.allclose(network(x, torch.full((3,), 0.8), torch.zeros(3, 7)), plain)
    assert not torch.allclose(network(x, torch.full((3,), 0.2), torch.ones(3, 7)), plain)
    assert torch.allclose(network(x[:1], torch.full((1,), 0.2), torch.zeros(1, 7)), plain[:1], atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tuned_steps": 6}, "expected policy.tuned_steps <= denoising_steps <= train_steps, got 6, 5 and 20"),
        ({"denoising_steps": 21, "train_steps": 20}, "<= train_steps, got 3, 21 and 20"),
        ({"smallest_std": 0.0}, "smallest_std=0: expected a number above 0"),
        ({"network": NetworkKind.UNET, "hidden": 30}, "policy.hidden in multiples of 8 with network=unet, got 30"),
        ({"network": NetworkKind.DIT, "hidden": 40}, "policy.hidden in multiples of 32 with network=dit, got 40"),
    ],
)
def test_impossible_sizes_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make(**settings)
