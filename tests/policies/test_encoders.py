"""What the policy reads from names, and that padding and order of objects do not matter."""

import pytest
import torch

from policies.encoders import ObjectEncoder, mention, object_poses
from tests.policies.observations import observations


def test_mention_by_hand() -> None:
    observation = observations(1)
    shares = mention(observation["object_names"], observation["instruction"])[0]
    # "pick the milk and place it in the basket": milk is word 2, basket word 8 of 9; "alphabet soup" is not there
    torch.testing.assert_close(shares, torch.tensor([[1.0, 2 / 9], [0.0, 0.0], [1.0, 8 / 9]]))


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


def test_missing_statistics_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="no normalisation statistics"):
        ObjectEncoder(32)(observations(1))
