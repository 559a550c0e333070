"""Critics beside vision-language-action models: what they read, and what they leave alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict

from embodied.contract import Contract, TensorSpec
from embodied.errors import UserError
from policies.vla.critic import Reads
from policies.vla.pi0 import Pi0Config, Pi0Policy
from policies.vla.tokens import TokensConfig, TokensPolicy
from tests.policies import observations
from tests.policies.vla.test_pi0 import SEEING

OBJECTS = ("object_position", "object_rotation", "object_names", "object_mask")
CAMERA = TensorSpec((16, 16, 3), "uint8", camera="front", frame="world")


def knowing() -> Contract:
    """A contract with a camera, whose objects are privileged."""
    given = observations.contract(4, 2)
    specs = {key: replace(spec, privileged=key in OBJECTS) for key, spec in given.observation.items()}
    return replace(given, observation=specs | {"front": CAMERA})


def looking(count: int, seed: int = 0) -> TensorDict:
    seen = observations.observations(count, seed)
    seen["front"] = torch.randint(256, (count, 16, 16, 3), dtype=torch.uint8)
    return seen


def policy(config: type[Pi0Config] | type[TokensConfig], **options: object) -> Pi0Policy | TokensPolicy:
    torch.manual_seed(0)
    made = config(hidden=16, **options).build(knowing())
    for parameter in made.model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    actions = knowing().action.shape[-1]
    made.fit(looking(16), torch.rand(16, 4, actions))
    return made


@pytest.mark.parametrize("config", [Pi0Config, TokensConfig])
def test_objects_are_read_where_a_simulator_knows_them_and_by_the_critic_alone(
    config: type[Pi0Config] | type[TokensConfig],
) -> None:
    made, seen = policy(config), looking(3)
    moved = seen.clone()
    moved["object_position"] = moved["object_position"] + 0.3
    moved["front"] = 255 - moved["front"]
    generator = torch.Generator()
    first, second = (made.act(each, generator=generator.manual_seed(0)) for each in (seen, moved))
    assert (first.value != second.value).all()
    assert (first.actions != second.actions).any()
    only_objects = seen.clone()
    only_objects["object_position"] = moved["object_position"]
    third = made.act(only_objects, generator=generator.manual_seed(0))
    assert torch.equal(third.value, second.value)  # the picture does not reach the critic
    assert torch.equal(third.actions, first.actions)  # objects do not reach the actor
    torch.testing.assert_close(made.value(seen), first.value)
    torch.testing.assert_close(made.evaluate(seen, first.sample).value, first.value)


@pytest.mark.parametrize("config", [Pi0Config, TokensConfig])
def test_the_model_does_not_learn_from_the_critic(config: type[Pi0Config] | type[TokensConfig]) -> None:
    for reads in Reads:
        made, seen = policy(config, critic=reads), looking(3)
        made.evaluate(seen, made.act(seen).sample).value.sum().backward()
        assert all(weight.grad is None or not weight.grad.any() for weight in made.actor_parameters())
        assert any(weight.grad is not None and weight.grad.any() for weight in made.critic_parameters())


def test_hidden_states_are_read_where_asked_for_and_where_objects_are_not_known() -> None:
    made, seen = policy(Pi0Config, critic=Reads.HIDDEN), looking(3)
    moved = seen.clone()
    moved["object_position"] = moved["object_position"] + 0.3
    assert torch.equal(made.value(seen), made.value(moved))
    moved["front"] = 255 - moved["front"]
    assert (made.value(seen) != made.value(moved)).all()
    assert Pi0Config(hidden=16).build(SEEING).critic.objects is None
    with pytest.raises(UserError, match=r"critic=objects reads .*object_position.*; use critic=hidden"):
        Pi0Config(hidden=16, critic=Reads.OBJECTS).build(SEEING)


@pytest.mark.parametrize("config", [Pi0Config, TokensConfig])
def test_features_are_the_pooled_hidden_states_or_the_objects_that_the_value_head_reads(
    config: type[Pi0Config] | type[TokensConfig],
) -> None:
    seen = looking(3)
    for reads in (Reads.HIDDEN, Reads.OBJECTS):
        made = policy(config, critic=reads)
        features = made.features(seen)
        assert features.shape == (3, made.feature_size)
        assert features.requires_grad == (reads is Reads.OBJECTS)  # by the encoder that belongs to the critic
        torch.testing.assert_close(made.critic(features).squeeze(-1), made.value(seen))
        if reads is Reads.HIDDEN:
            state = made.inputs.standardised_state(seen)
            torch.testing.assert_close(features[:, -state.shape[1] :], state)


def test_objects_that_are_missing_when_statistics_are_computed_are_named() -> None:
    made = policy(Pi0Config)
    with pytest.raises(UserError, match="add object_position, object_rotation"):
        made.fit(looking(16).exclude("object_position", "object_rotation"), torch.rand(16, 4, 2))
