"""Features of object names; padding and order of objects do not matter."""

import math

import pytest
import torch
from tensordict import TensorDict

from embodied.errors import UserError
from embodied.networks.precision import Precision
from embodied.networks.words import hash_words
from policies.encoders.libero import NEAR_M, RELATION_WIDTH, ObjectEncoder, mention, object_poses, offsets
from tests.policies.observations import observations, text


def read(count: int):
    """Observations with ids of words."""
    return ObjectEncoder(32).read(observations(count))


def test_mention_by_hand() -> None:
    observation = read(1)
    shares = mention(observation["object_names"], observation["instruction"])[0]
    # "pick the milk and place it in the basket": the milk before the basket; "alphabet soup" is not there
    torch.testing.assert_close(shares, torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 1 / 2]]))
    instruction = torch.tensor([hash_words("from the basket take soup, then alphabet, then milk")])
    shares = mention(observation["object_names"], instruction)[0]  # basket, soup, alphabet, milk
    torch.testing.assert_close(shares, torch.tensor([[1.0, 3 / 4], [1.0, 1 / 4], [1.0, 0.0]]))


def test_words_that_name_nothing_do_not_change_how_objects_are_mentioned() -> None:
    observation = read(1)
    plain = mention(observation["object_names"], observation["instruction"])
    for said in ("pick up the milk and place it in the basket", "kindly now milk, the basket", "milk basket"):
        assert torch.equal(mention(observation["object_names"], torch.tensor([hash_words(said)])), plain)


def test_words_never_seen_are_not_read_and_known_ones_are() -> None:
    torch.manual_seed(0)
    observation = observations(5)
    encoder = ObjectEncoder(32)
    encoder.fit(observation)

    def encoded(said: str) -> torch.Tensor:
        return encoder(observation.clone().set("instruction", text(said).expand(5, -1)))

    plain = encoder(observation)
    torch.testing.assert_close(encoded("kindly pick up the milk and now place it in the little basket"), plain)
    assert not torch.allclose(encoded("pick the milk and place it in it"), plain)
    other = ObjectEncoder(32)
    other.load_state_dict(encoder.state_dict())
    torch.testing.assert_close(other(observation), plain)


def test_encoding_ignores_order_and_padding_of_objects() -> None:
    torch.manual_seed(0)
    observation = observations(5)
    encoder = ObjectEncoder(32)
    encoder.fit(observation)
    permuted = observation.clone()
    for key in ("object_position", "object_rotation", "object_names"):
        permuted[key] = observation[key].flip(1)
    torch.testing.assert_close(encoder(permuted), encoder(observation))
    padded = observation.clone()
    for key in ("object_position", "object_rotation", "object_names", "object_mask"):
        padded[key] = torch.cat((observation[key], torch.zeros_like(observation[key][:, :1])), 1)
    torch.testing.assert_close(encoder(padded), encoder(observation))


def test_objects_look_the_same_from_both_sides_and_how_far_to_turn_is_seen() -> None:
    observation = observations(2)
    columns = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 0.0])  # hand and objects along the world's axes
    observation["end_effector_rotation"] = columns.expand(2, 6).clone()
    observation["object_rotation"] = columns.expand(2, 3, 6).clone()
    behind = observation.clone()
    behind["object_rotation"][..., [0, 4]] = -1.0  # half a turn about the vertical axis
    torch.testing.assert_close(object_poses(behind), object_poses(observation))
    turned = observation.clone()
    turned["object_rotation"] = torch.tensor([0.0, 1.0, 0.0, -1.0, 0.0, 0.0]).expand(2, 3, 6)  # a quarter
    double = slice(6, 12)  # x^2 - y^2 of three axes, then 2 x y
    expected = torch.tensor([1.0, -1.0, 0.0, 0.0, 0.0, 0.0])
    torch.testing.assert_close(object_poses(observation)[0, 0, double], expected)
    torch.testing.assert_close(object_poses(turned)[0, 0, double], -expected)


def test_a_scene_is_seen_from_the_hand_wherever_it_is_and_whichever_way_it_is_turned() -> None:
    observation = observations(4)
    seen = object_poses(observation)
    moved = observation.clone()
    for key in ("end_effector_position", "object_position"):
        moved[key] += torch.tensor([0.3, -0.2, 0.0])
    torch.testing.assert_close(object_poses(moved), seen)
    turned = observation.clone()
    quarter = torch.tensor([[0.0, -1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    for key in ("end_effector_rotation", "object_rotation"):
        columns = observation[key].unflatten(-1, (2, 3))
        turned[key] = (columns @ quarter.T).flatten(-2)
    torch.testing.assert_close(object_poses(turned), seen)


def test_offsets_by_hand() -> None:
    position = torch.tensor([[[0.0, 0.0, 0.1], [0.3 * NEAR_M, 0.4 * NEAR_M, 0.1]]])  # half of NEAR_M apart
    second = offsets(position)[0, 0, 1]
    torch.testing.assert_close(second, torch.tensor([0.3, 0.4, 0.0, math.exp(-0.5), math.exp(-2.0)]))


def test_statistics_are_of_what_is_there() -> None:
    observation = observations(50)
    padded = observation.clone()
    for key in ("object_position", "object_rotation", "object_names", "object_mask"):
        padded[key] = torch.cat((observation[key], torch.zeros_like(observation[key][:, :1])), 1)
    one, other = ObjectEncoder(32), ObjectEncoder(32)
    one.fit(observation)
    other.fit(padded)
    torch.testing.assert_close(one.pose_mean, other.pose_mean)
    torch.testing.assert_close(one.pose_std, other.pose_std)


def test_a_scene_without_objects_has_finite_features_and_gradients() -> None:
    torch.manual_seed(0)
    observation = observations(5)
    encoder = ObjectEncoder(32)
    encoder.fit(observation)
    empty = observation.clone()
    empty["object_mask"][2] = False
    found, full = encoder(empty), encoder(observation)
    assert found.isfinite().all()
    assert torch.equal(found[[0, 1, 3, 4]], full[[0, 1, 3, 4]])
    attended = slice(2 * 32, None)  # nothing; the hand's own features stay
    assert (found[2, attended] == 0.0).all()
    assert torch.equal(found[2, : 2 * 32], full[2, : 2 * 32])
    empty["object_position"][2] += 1.0  # absent objects have no effect
    assert torch.equal(encoder(empty), found)
    found.square().sum().backward()
    unused = {*encoder.relations.parameters()}  # no two objects share a name
    assert all(parameter.grad.isfinite().all() for parameter in encoder.parameters() if parameter not in unused)


def two_of_a_kind():
    """Observations [5] with two basins, a plate near the first, and what a fitted encoder sees of objects."""
    torch.manual_seed(0)
    observation = observations(5)
    observation["object_names"] = text("basin_1", "basin_2", "plate_1").expand(5, 3, -1).clone()
    observation["instruction"] = text("lift the basin next to the plate").expand(5, -1).clone()
    places = torch.tensor([[0.0, 0.0, 0.9], [0.4, 0.0, 0.9], [0.1, 0.0, 0.9]])
    observation["object_position"] = places.expand(5, 3, 3).clone()
    encoder = ObjectEncoder(32)
    encoder.fit(observation)
    return encoder, observation


def related(encoder: ObjectEncoder, observation: TensorDict) -> torch.Tensor:
    return encoder._object_inputs(encoder.read(observation))[..., -RELATION_WIDTH:]


def test_two_of_a_kind_are_told_apart_by_what_is_near_them() -> None:
    encoder, observation = two_of_a_kind()
    seen = related(encoder, observation)
    assert (seen[:, :2] != 0.0).any(-1).all()
    assert not torch.allclose(seen[:, 0], seen[:, 1])
    assert (seen[:, 2] == 0.0).all()  # there is only one plate
    moved = observation.clone()
    moved["object_position"][:, 2, 0] = 0.3
    assert not torch.allclose(related(encoder, moved)[:, :2], seen[:, :2])
    said = observation.clone().set("instruction", text("lift the basin").expand(5, -1))
    assert not torch.allclose(related(encoder, said)[:, :2], seen[:, :2])
    turned = observation.clone()
    turned["end_effector_position"] += 1.0  # the hand does not matter
    assert torch.equal(related(encoder, turned), seen)


def test_two_of_a_kind_are_related_in_bfloat16_too() -> None:
    encoder, observation = two_of_a_kind()
    whole = encoder(observation)
    with Precision.BFLOAT16.on("cpu"):
        torch.testing.assert_close(encoder(observation).float(), whole, rtol=0.1, atol=0.1)


def test_what_is_hidden_relates_to_nothing() -> None:
    encoder, observation = two_of_a_kind()
    hidden = observation.clone()
    hidden["object_mask"][:, 2] = False
    seen = related(encoder, hidden)
    hidden["object_position"][:, 2] += 1.0
    assert torch.equal(related(encoder, hidden)[:, :2], seen[:, :2])
    hidden["object_mask"][:, 1] = False  # the other basin: now there is one
    assert (related(encoder, hidden) == 0.0).all()


def test_statistics_of_no_object_at_all_are_refused() -> None:
    observation = observations(5)
    observation["object_mask"][:] = False
    encoder = ObjectEncoder(32)
    with pytest.raises(UserError, match="expected objects in some of the observations"):
        encoder.fit(observation)
    assert not encoder.fitted


def test_missing_statistics_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="no normalisation statistics"):
        ObjectEncoder(32)(observations(1))
