"""Small policies that generate chunks, trained a little, and observations for them."""

from dataclasses import replace
from functools import cache

import torch
from tensordict import TensorDict

from embodied.contract import Contract, TensorSpec
from embodied.policy import Steering
from embodied.text import encode, text_spec
from policies.diffusion import DiffusionConfig
from policies.flow import FlowConfig
from policies.generation.base import GenerativeConfig, GenerativePolicy
from policies.generation.steering import SteeringConfig
from policies.vision.backbones import VisionConfig

LENGTH = 48
"""Bytes of text."""
NAMES = ("milk_1", "alphabet_soup_1", "basket_1", "butter_1", "bowl_1")
SAID = ("pick the milk and place it in the basket", "put the butter into the bowl", "milk: basket", "")
HORIZON, EXECUTED, ACTIONS = 6, 4, 7
LIMITS = {"low": (-1.0,) * 6 + (-0.2,), "high": (1.0,) * 6 + (0.6,)}
HAND = {
    "end_effector_position": TensorSpec((3,), unit="m"),
    "end_effector_rotation": TensorSpec((6,)),
    "gripper_position": TensorSpec((2,), unit="m"),
    "gripper_command": TensorSpec((1,)),
}
OBJECTS = {
    "object_position": TensorSpec((-1, 3), unit="m"),
    "object_rotation": TensorSpec((-1, 6)),
    "object_names": text_spec(LENGTH, -1),
    "object_mask": TensorSpec((-1,), dtype="bool"),
}
WORDS = {"instruction": text_spec(LENGTH)}
KNOWN = {key: replace(spec, privileged=True) for key, spec in OBJECTS.items()}
CAMERA = {"agentview_image": TensorSpec((32, 32, 3), "uint8", camera="agentview")}
UNREAD = {"joint_position": TensorSpec((7,), unit="rad")}
SPECS = {"objects": HAND | OBJECTS | WORDS | UNREAD, "pictures": HAND | CAMERA | WORDS | KNOWN, "flat": HAND | UNREAD}
SMALL = {"width": 16, "hidden": 32, "candidates": 8, "turn_rad": 0.0, "vision": VisionConfig(width=8, features=16)}
ONE_STEP = SteeringConfig(kind=Steering.ONE_STEP, hidden=[32])
CONFIGS: dict[str, tuple[str, GenerativeConfig]] = {
    "objects": ("objects", FlowConfig(**SMALL)),
    "one_step": ("objects", FlowConfig(**SMALL, denoising_steps=1, shortcut=0.25)),
    "diffusion": ("objects", DiffusionConfig(**SMALL, train_steps=20, denoising_steps=3, tuned_steps=2)),
    "pictures": ("pictures", FlowConfig(**SMALL)),
    "flat": ("flat", FlowConfig(**SMALL, reciprocal=["gripper_position"], steering=ONE_STEP)),
}


def contract(kind: str) -> Contract:
    """The contract of the policy `kind` of CONFIGS, with more observations than it reads."""
    return Contract(SPECS[CONFIGS[kind][0]], TensorSpec((ACTIONS,), **LIMITS), 0.05, HORIZON, EXECUTED)


def observations(kind: str, count: int, seed: int, rows: int = 5) -> TensorDict:
    """Random observations [count] with text, also such as training has not seen; two objects are namesakes."""
    generator = torch.Generator().manual_seed(seed)

    def chosen(texts: tuple[str, ...], *shape: int) -> torch.Tensor:
        table = torch.stack([torch.from_numpy(encode(each, LENGTH)) for each in texts])
        return table[torch.randint(len(texts), shape, generator=generator)]

    found = {}
    for key, spec in contract(kind).observation.items():
        shape = (count, *(rows if size < 0 else size for size in spec.shape))
        if spec.is_text:
            found[key] = chosen(NAMES if rows in shape[1:-1] else SAID, *shape[:-1])
        elif spec.is_picture:
            found[key] = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
        elif key == "object_mask":
            found[key] = torch.rand(shape, generator=generator) < 0.8
        else:
            found[key] = 0.3 * torch.randn(shape, generator=generator)
    if "object_names" in found and rows > 1:
        found["object_names"][:, 0] = found["object_names"][:, 1]
    return TensorDict(found, batch_size=[count])


@cache
def make(kind: str, steps: int = 60) -> GenerativePolicy:
    """A policy that was trained to follow a function of the hand's pose, and ranks; some have a one-step actor."""
    torch.manual_seed(0)
    policy = CONFIGS[kind][1].build(contract(kind))
    seen = observations(kind, 256, 0)
    actions = torch.tanh(4.0 * seen["end_effector_rotation"][:, :1]).unsqueeze(2).expand(-1, HORIZON, ACTIONS)
    actions = actions + 0.3 * torch.randn(256, HORIZON, ACTIONS)
    policy.fit(seen, actions)
    optimizer = torch.optim.Adam(policy.parameters(), 3e-3)
    for _ in range(steps):
        loss = policy.loss(seen, actions, torch.ones(256, HORIZON))
        if policy.steering is Steering.ONE_STEP:
            loss = loss + policy.distance_of_one_step(seen, torch.randn(256, *policy.steering_noise_shape))
        loss = loss + policy.advantage_loss(seen, actions, actions.mean((1, 2)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    policy.start_ranking()
    if policy.steering is Steering.ONE_STEP:
        policy.start_steering(keep_ranking=True)
    return policy
