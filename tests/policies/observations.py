"""Random observations with the keys of object-token policies."""

import torch
from tensordict import TensorDict

from embodied.contract import Contract, TensorSpec
from embodied.text import encode, text_spec

LENGTH = 64
"""Bytes of text."""
NAMES = ("milk", "alphabet soup", "basket")


def contract(horizon: int = 4, executed: int = 3, action: int = 2) -> Contract:
    """A contract of these observations, with bounded actions."""
    specs = {key: TensorSpec(tuple(value.shape[1:]), str(value.dtype)[6:]) for key, value in observations(1).items()}
    specs |= {"instruction": text_spec(LENGTH), "object_names": text_spec(LENGTH, -1)}
    return Contract(specs, TensorSpec((action,), low=(-1.0,) * action, high=(1.0,) * action), 0.05, horizon, executed)


def text(*said: str) -> torch.Tensor:
    """Texts [M, L]."""
    return torch.stack([torch.from_numpy(encode(each, LENGTH)) for each in said])


def observations(count: int, seed: int = 0) -> TensorDict:
    """Observations [count] with three named objects."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(count, *shape, generator=generator)

    columns = torch.linalg.qr(normal(4, 3, 3))[0]
    rotation = torch.cat((columns[..., 0], columns[..., 1]), -1)
    names = text(*NAMES)
    return TensorDict(
        {
            "joint_position": normal(7),
            "end_effector_position": normal(3),
            "end_effector_rotation": rotation[:, 0],
            "gripper_position": normal(2),
            "gripper_command": normal(1).clamp(-1.0, 1.0),
            "object_position": normal(3, 3),
            "object_rotation": rotation[:, 1:],
            "object_names": names.expand(count, 3, -1).clone(),
            "object_mask": torch.ones(count, 3, dtype=torch.bool),
            "instruction": text("pick the milk and place it in the basket").expand(count, -1).clone(),
        },
        batch_size=[count],
    )
