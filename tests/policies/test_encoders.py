"""What the policy reads from names, and that padding and order of objects do not matter."""

import pytest
import torch

from policies.encoders import ObjectEncoder, mention
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


def test_missing_statistics_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="no normalisation statistics"):
        ObjectEncoder(32)(observations(1))
