"""How policies of LeRobot's published weights act, score and learn, whichever model they are."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from tensordict import TensorDict

from embodied.algorithms.off_policy.dsrl import DSRLConfig
from embodied.algorithms.on_policy.ppo import PPOConfig
from embodied.networks.precision import Precision
from embodied.policy import INITIAL_NOISE, Steering
from policies.generation.steering import SteeringConfig
from policies.vla.groot.policy import GrootConfig
from policies.vla.pi0 import Pi0Policy, Sampler
from policies.vla.smolvla.policy import SmolVLAConfig
from tests.policies.vla.groot import files as groot_files
from tests.policies.vla.smolvla import files as smolvla_files
from tests.policies.vla.test_pi0 import SEEING, seen

KINDS: dict[str, tuple[type[GrootConfig] | type[SmolVLAConfig], ModuleType]] = {
    "groot": (GrootConfig, groot_files),
    "smolvla": (SmolVLAConfig, smolvla_files),
}
Policies = Callable[..., Pi0Policy]


@pytest.fixture(scope="module", params=KINDS)
def policy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Policies:
    """Makes policies of one kind, by default of a published folder, which tests only read."""
    config, files = KINDS[request.param]
    folder = files.save(tmp_path_factory.mktemp(request.param) / "pretrained_model")

    def made(**options: object) -> Pi0Policy:
        torch.manual_seed(0)
        return config(**{"weights": str(folder), "hidden": 16, **options}).build(SEEING)

    return made


@pytest.mark.parametrize("sampler", [Sampler.FLOW_SDE, Sampler.FLOW_NOISE, Sampler.REINFLOW])
def test_the_log_probability_is_that_with_which_it_acted(policy: Policies, sampler: Sampler) -> None:
    made, observation = policy(sampler=sampler), seen(6)
    decision = made.act(observation)
    assert decision.sample["path"].shape == (6, groot_files.STEPS + 1, 4, 32)
    scored = made.evaluate(observation, decision.sample)
    torch.testing.assert_close(scored.log_prob, decision.log_prob, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(scored.value, decision.value)
    rows = torch.tensor([4, 1])
    some = made.evaluate(observation[rows], decision.sample[rows])
    torch.testing.assert_close(some.log_prob, decision.log_prob[rows], atol=1e-4, rtol=1e-4)
    moved = decision.sample.clone()
    moved["path"][:, -1, 0, 3:] += 0.1  # padding of the last state is not scored
    torch.testing.assert_close(made.evaluate(observation, moved).log_prob, scored.log_prob)


@pytest.mark.parametrize("published", [False, True])
def test_state_words_and_cameras_are_read_but_nothing_privileged(policy: Policies, published: bool) -> None:
    made, before = policy(**({} if published else {"weights": None})), seen(2)
    made.fit(seen(16), torch.rand(16, 4, 3))
    first = made.act(before, generator=torch.Generator().manual_seed(0))
    changes = {"front": 0, "wrist": 0, "fingers": 3.0, "instruction": 0, "depth": 0, "cube": 9.0}
    for key, value in changes.items():
        after = before.clone()
        after[key][1] = value
        second = made.act(after, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(first.actions[0], second.actions[0], atol=1e-5, rtol=0.0)
        assert bool((first.actions[1] != second.actions[1]).any()) == (key not in ("depth", "cube")), key


def test_supervised_training_lowers_the_loss(policy: Policies) -> None:
    made = policy()
    observation, actions = seen(16), torch.rand(16, 4, 3) * torch.tensor([1.0, 2.0, 3.0])
    optimiser = torch.optim.Adam(made.actor_parameters(), 1e-3)

    def loss() -> torch.Tensor:
        torch.manual_seed(3)
        return made.loss(observation, actions, torch.ones(16, 4))

    first = loss().item()
    for _ in range(20):
        optimiser.zero_grad()
        loss().backward()
        optimiser.step()
    assert loss().item() < 0.5 * first


def test_one_update_of_ppo_makes_what_paid_more_likely(policy: Policies) -> None:
    made, observation = policy(), seen(8)
    decision = made.act(observation, generator=torch.Generator().manual_seed(4))
    advantage = torch.tensor([1.0, -1.0] * 4)
    ratio = (made.evaluate(observation, decision.sample).log_prob - decision.log_prob).exp()
    torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=1e-3, rtol=0.0)
    (-(ratio.squeeze(-1) * advantage).mean()).backward()
    with torch.no_grad():
        for weight in made.actor_parameters():
            if weight.grad is not None:
                weight -= 1e-4 * weight.grad
    after = made.evaluate(observation, decision.sample).log_prob.squeeze(-1) - decision.log_prob.squeeze(-1)
    assert (after.detach() * advantage).mean() > 0.0


def test_ppo_builds_and_its_default_model_is_small(policy: Policies) -> None:
    made = policy(weights=None)
    made.fit(seen(8), torch.rand(8, 4, 3))
    assert sum(weight.numel() for weight in made.model.parameters()) < 1_000_000
    assert PPOConfig().build(made, None, None, torch.Generator())
    assert made.act(seen(2)).actions.shape == (2, 4, 3)


@pytest.mark.parametrize("adapted", [False, True])
def test_recomputed_activations_change_no_gradient_and_bfloat16_little(policy: Policies, adapted: bool) -> None:
    ways = {"plain": {}, "recomputed": {"gradient_checkpointing": True}, "halved": {"precision": Precision.BFLOAT16}}
    gradients, losses = {}, {}
    for way, options in ways.items():
        made = policy(lora_rank=2 if adapted else 0, **options)
        torch.manual_seed(5)
        losses[way] = made.loss(seen(4), torch.rand(4, 4, 3), torch.ones(4, 4))
        losses[way].backward()
        gradients[way] = torch.cat([w.grad.flatten() for w in made.actor_parameters() if w.grad is not None])
    torch.testing.assert_close(gradients["recomputed"], gradients["plain"], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(losses["halved"], losses["plain"], atol=0.0, rtol=0.05)
    assert torch.cosine_similarity(gradients["halved"], gradients["plain"], 0) > 0.98


def test_a_small_actor_of_dsrl_chooses_the_noise_and_the_model_stays(policy: Policies) -> None:
    made = policy(denoising_steps=2, steering=SteeringConfig(Steering.NOISE, hidden=[8]))
    observation = seen(4)
    for weight in made.steering_parameters():  # whose last layer begins with zeros
        weight.data += 0.05 * torch.randn_like(weight)
    learner = DSRLConfig(hidden=[8], capacity=8, learning_rate=0.1).build(made, None, None, torch.Generator())
    decision = made.act(observation)
    assert decision.sample[INITIAL_NOISE].shape == (4, 4, 32)
    before = [weight.clone() for weight in made.parameters()]
    transitions = {"observation": observation, "actions": decision.actions, "next_observation": seen(4, seed=1)}
    transitions |= {"reward": torch.ones(4), "carry": torch.full((4,), 0.9)}
    learner._update_critics(TensorDict(transitions, [4]))
    learner._update_actor(observation)
    moved = {id(weight) for weight, old in zip(made.parameters(), before, strict=True) if not weight.equal(old)}
    assert moved == {id(weight) for weight in made.steering_parameters()}
    assert (made.act(observation).actions != decision.actions).any()


def test_values_of_noise_alone_are_learned_from_features_that_the_model_computed_once(
    policy: Policies, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = policy(denoising_steps=2, steering=SteeringConfig(Steering.NOISE, hidden=[8]))
    config = DSRLConfig(hidden=[8], capacity=8, aliasing=False)
    learner = config.build(made, None, None, torch.Generator())
    observation, after = seen(4), seen(4, seed=1)
    encoded, encoded_after = (made.encoded(each, generates=False) for each in (observation, after))
    assert not {key for key, value in encoded.items() if value.dtype == torch.uint8}
    assert made.encoded(observation, generates=True) is observation
    assert made.encoded(encoded, generates=False) is encoded
    noise = torch.randn(4, *made.steering_noise_shape)
    torch.testing.assert_close(made.initial_noise(encoded, noise), made.initial_noise(observation, noise))
    torch.testing.assert_close(made.features(encoded), made.features(observation))
    monkeypatch.setattr(made, "_prefix", None)  # which runs the model
    actions = torch.randn(4, 1, noise[0].numel()).clamp(-1.5, 1.5)
    transitions = {"observation": encoded, "actions": actions, "next_observation": encoded_after}
    transitions |= {"reward": torch.ones(4), "carry": torch.full((4,), 0.9)}
    assert learner._update_critics(TensorDict(transitions, [4]))["value_loss"] > 0.0
    assert learner._update_actor(encoded)["entropy"].isfinite()
