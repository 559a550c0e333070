"""A rotated or mirrored scene has the rotated or mirrored action."""

import math
from dataclasses import replace

import torch
from torch import nn

from embodied.contract import TensorSpec
from embodied.networks.words import hash_words
from policies.encoders.augmentation import CARTESIAN, hide, image, random_image
from policies.encoders.libero import INSTRUCTION_WORDS, NAME_WORDS, ObjectEncoder, mention, rotation_matrix
from policies.squashed import SquashedConfig
from tests.policies import observations as given


def observations(count: int):
    """As augmentations get them: read."""
    return ObjectEncoder(32).read(given.observations(count))


def transformed(angle: float, side: float):
    observation = observations(3)
    observation["gripper_position"] = torch.tensor([[0.03, -0.01]]).expand(3, 2)
    actions = torch.tensor([[[1.0, 0.0, 0.5, 0.1, 0.0, 0.2, -1.0]]]).expand(3, 1, 7)
    return observation, actions, *image(observation, actions, torch.full((3,), angle), torch.full((3,), side))


def test_a_quarter_turn_by_hand() -> None:
    observation, _, turned, actions = transformed(math.pi / 2, 1.0)
    torch.testing.assert_close(actions[0, 0], torch.tensor([0.0, 1.0, 0.5, 0.0, 0.1, 0.2, -1.0]))
    x, y, z = observation["object_position"].unbind(-1)
    torch.testing.assert_close(turned["object_position"], torch.stack((-y, x, z), -1))
    assert torch.equal(turned["gripper_position"], observation["gripper_position"])


def test_mirroring_by_hand() -> None:
    observation, _, mirrored, actions = transformed(0.0, -1.0)
    # turning right-handed about x and z becomes left-handed; about y it stays
    torch.testing.assert_close(actions[0, 0], torch.tensor([1.0, 0.0, 0.5, -0.1, 0.0, -0.2, -1.0]))
    x, y, z = observation["object_position"].unbind(-1)
    torch.testing.assert_close(mirrored["object_position"], torch.stack((x, -y, z), -1))
    torch.testing.assert_close(mirrored["gripper_position"][0], torch.tensor([0.01, -0.03]))


def test_images_of_rotations_are_rotations_and_mirroring_twice_is_nothing() -> None:
    observation, actions, once, mirrored = transformed(0.0, -1.0)
    for key in ("end_effector_rotation", "object_rotation"):
        matrices = rotation_matrix(once[key])
        identity = torch.eye(3).expand_as(matrices)
        torch.testing.assert_close(matrices @ matrices.transpose(-1, -2), identity, atol=1e-5, rtol=0)
    twice, again = image(once, mirrored, torch.zeros(3), -torch.ones(3))
    torch.testing.assert_close(again, actions)
    for key in observation.keys():  # noqa: SIM118 - a TensorDict iterates over rows
        torch.testing.assert_close(twice[key], observation[key])


def test_distances_and_the_given_observation_stay() -> None:
    observation, actions = observations(50), torch.randn(50, 4, 7)
    before = observation.clone()
    turned, moved = random_image(observation, actions, 0.8)
    assert (observation == before).all()
    torch.testing.assert_close(moved[..., :3].norm(dim=-1), actions[..., :3].norm(dim=-1))
    offset = observation["object_position"] - observation["end_effector_position"].unsqueeze(1)
    image_offset = turned["object_position"] - turned["end_effector_position"].unsqueeze(1)
    torch.testing.assert_close(image_offset.norm(dim=-1), offset.norm(dim=-1))


def test_what_the_instruction_mentions_is_never_hidden() -> None:
    torch.manual_seed(0)
    observation = observations(400)  # milk and basket are mentioned, the alphabet soup is not
    seen = hide(observation, distractors=0.2)["object_mask"]
    assert seen[:, [0, 2]].all()
    assert 0.7 < seen[:, 1].float().mean() < 0.9
    assert observation["object_mask"].all()
    observation["object_mask"][:, 1] = False
    assert not hide(observation, distractors=0.0)["object_mask"][:, 1].any()


def test_where_nothing_in_sight_is_mentioned_nothing_is_hidden() -> None:
    observation = observations(100)
    observation["instruction"][:50] = 0
    observation["object_mask"][50:, [0, 2]] = False  # mentioned objects
    seen = hide(observation, distractors=1.0)["object_mask"]
    assert torch.equal(seen, observation["object_mask"])


def test_words_are_hidden_unless_they_name_something() -> None:
    torch.manual_seed(0)
    observation = observations(400)  # "pick the milk and place it in the basket", padded
    seen = hide(observation, words=0.3)["instruction"]
    assert torch.equal(seen[:, [2, 8]], observation["instruction"][:, [2, 8]])
    assert 0.25 < (seen[:, [0, 1, 3, 4, 5, 6, 7]] == 0).float().mean() < 0.35
    names = observation["object_names"]
    assert torch.equal(mention(names, seen), mention(names, observation["instruction"]))
    assert torch.equal(hide(observation, words=0.0)["instruction"], observation["instruction"])


def test_all_that_tells_two_of_a_kind_apart_stays() -> None:
    torch.manual_seed(0)
    observation = observations(200)
    observation["object_names"][:, 1] = observation["object_names"][:, 0]  # two milks, and a basket near one of them
    observation["instruction"] = torch.tensor([hash_words("pick the milk over there", 20)]).expand(200, -1).clone()
    assert hide(observation, distractors=1.0)["object_mask"].all()
    assert torch.equal(hide(observation, words=1.0)["instruction"], observation["instruction"])
    observation["object_mask"][:100, 1] = False  # one of them is not there
    seen = hide(observation, words=1.0)["instruction"]
    assert (seen[:100, 0] == 0).all()
    assert torch.equal(seen[100:], observation["instruction"][100:])


def test_ids_without_padding_are_hidden_and_encoded_as_those_with_it():
    """`read` leaves out what all texts lack; exported graphs are given the whole width."""
    encoder = ObjectEncoder(32)
    short = encoder.read(given.observations(50))
    names, said = short["object_names"], short["instruction"]
    assert names.shape[-1] < NAME_WORDS
    assert said.shape[-1] < INSTRUCTION_WORDS
    whole = short.clone()
    whole["object_names"] = nn.functional.pad(names, (0, NAME_WORDS - names.shape[-1]))
    whole["instruction"] = nn.functional.pad(said, (0, INSTRUCTION_WORDS - said.shape[-1]))
    hidden = []
    for each in (short, whole):
        torch.manual_seed(3)
        hidden.append(hide(each, words=0.5, distractors=0.5))
    encoder.fit(whole)
    assert torch.equal(hidden[0]["object_mask"], hidden[1]["object_mask"])
    assert torch.equal(hidden[0]["instruction"], hidden[1]["instruction"][:, : said.shape[-1]])
    assert not torch.equal(hidden[0]["instruction"], said)
    torch.testing.assert_close(encoder(hidden[0]), encoder(hidden[1]))


def test_the_supervised_loss_of_a_squashed_policy_changes_scenes() -> None:
    spec = TensorSpec((7,), names=(*CARTESIAN, "gripper"), low=(-1.0,) * 7, high=(1.0,) * 7)
    contract = replace(given.contract(), action=spec)
    observation, actions = given.observations(4), torch.rand(4, 4, 7) - 0.5
    losses = {}
    for turn_rad in (0.0, 0.8):
        config = SquashedConfig(width=16, turn_rad=turn_rad, hidden_distractors=0.0, hidden_words=0.0)
        policy = config.build(contract)
        policy.fit(observation, actions)
        losses[turn_rad] = [float(policy.loss(observation, actions, torch.ones(4, 4))) for _ in range(2)]
    assert losses[0.0][0] == losses[0.0][1]
    assert losses[0.8][0] != losses[0.8][1]
