"""Augmentations of observations and actions for a supervised loss, for tabletop scenes.

They preserve the action's meaning: scenes are rotated about the vertical axis or mirrored, and irrelevant parts are
hidden. Gravity is the only preferred direction in physics, so one demonstration is valid in all its mirror images.
(Reach and joint limits break the symmetry far from the nominal pose, hence the limited rotations.)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch
from tensordict import TensorDict
from torch import Tensor

from policies.encoders.libero import INSTRUCTION_WORDS, matches, namesakes

CARTESIAN = ("x", "y", "z", "rotation_x", "rotation_y", "rotation_z")
"""First elements of actions that can be rotated."""


class AugmentationKind(Enum):
    """Value of the option `augmentation` of a policy.

    AUTO is CARTESIAN_SCENE if objects are moved by Cartesian actions, PICTURES if pictures are read, else NONE.
    """

    AUTO = "auto"
    NONE = "none"
    CARTESIAN_SCENE = "cartesian_scene"
    PICTURES = "pictures"


class Augmentation(Protocol):
    """Random change of the samples of a supervised loss."""

    def __call__(self, observation: TensorDict, actions: Tensor) -> tuple[TensorDict, Tensor]:
        """Change observations [N], as read by an encoder, and actions [N, H, A]; the arguments are not modified."""
        ...


@dataclass(frozen=True)
class CartesianScene:
    """Augmentation that mirrors scenes, rotates them by up to `turn_rad` (0: unchanged), and hides unmentioned parts.

    `hidden_distractors` is the share of objects, `hidden_words` of words that are hidden.
    """

    turn_rad: float
    hidden_distractors: float
    hidden_words: float

    def __call__(self, observation: TensorDict, actions: Tensor) -> tuple[TensorDict, Tensor]:
        """Apply one random change to each row."""
        if self.turn_rad:
            observation, actions = random_image(observation, actions, self.turn_rad)
        return hide(observation, words=self.hidden_words, distractors=self.hidden_distractors), actions


def random_image(observation: TensorDict, actions: Tensor, turn_rad: float) -> tuple[TensorDict, Tensor]:
    """Rotate each row randomly by up to `turn_rad` about the vertical axis and mirror half of the rows.

    Args:
        observation: [N], with poses in a frame whose z axis is vertical.
        actions: [N, H, 7], displacement, rotation (axis-angle) and gripper in the same frame.
        turn_rad: the largest rotation.
    """
    n = len(actions)
    device = actions.device
    angle = (2.0 * torch.rand(n, device=device) - 1.0) * turn_rad
    side = torch.where(torch.rand(n, device=device) < 0.5, -1.0, 1.0)
    return image(observation, actions, angle, side)


def hide(observation: TensorDict, *, words: float = 0.0, distractors: float = 0.0) -> TensorDict:
    """Hide words that name no object, and objects that the instruction does not mention, each with its probability.

    "grab" for "pick up" means the same, and such objects seldom matter. If the instruction mentions none of the visible
    objects, any of them may matter, and all stay. So do all objects, and all words, if it mentions one that has a
    namesake: only words about their places distinguish them.
    """
    names, mask, instruction = (observation[key] for key in ("object_names", "object_mask", "instruction"))
    equal = matches(names, instruction)
    mentioned = mask & equal.any(2).any(1).t()  # [N, M]
    has_namesake = (namesakes(names, mask) & mentioned).any(-1, keepdim=True)  # [N, 1]
    names_object = equal.any(1).any(0).t()  # [N, L']
    result = observation.clone(recurse=False)
    # a fixed number of draws, whatever the padding, so that later draws do not depend on it
    draws = torch.rand(len(names_object), max(INSTRUCTION_WORDS, names_object.shape[1]), device=names_object.device)
    visible_words = names_object | (draws[:, : names_object.shape[1]] >= words)
    result["instruction"] = instruction * (visible_words | has_namesake)
    hidden = ~mentioned & (torch.rand(mask.shape, device=mask.device) < distractors)
    result["object_mask"] = mask & ~(hidden & mentioned.any(-1, keepdim=True) & ~has_namesake)
    return result


def image(observation: TensorDict, actions: Tensor, angle: Tensor, side: Tensor) -> tuple[TensorDict, Tensor]:
    """Mirror y where `side` [N] is -1 (1: unchanged), then rotate by `angle` [N] rad about the vertical axis."""
    cosine = angle.cos()
    sine = angle.sin()
    zero = torch.zeros_like(angle)
    one = torch.ones_like(angle)
    rows = ((cosine, -sine * side, zero), (sine, cosine * side, zero), (zero, zero, one))
    # R(angle) diag(1, side, 1)
    matrix = torch.stack([torch.stack(row, -1) for row in rows], -2)  # [N, 3, 3]

    def vectors(v: Tensor) -> Tensor:
        return torch.einsum("nij,n...j->n...i", matrix, v)

    def rotations(columns: Tensor, axis: int) -> Tensor:
        """Reflect each body about one of its `axis` as well, which makes its mirrored frame right-handed again."""
        halves = [vectors(columns[..., :3]), vectors(columns[..., 3:])]
        halves[axis] = halves[axis] * side.view(-1, *[1] * (columns.dim() - 1))
        return torch.cat(halves, -1)

    # mirroring exchanges the two fingers
    fingers = observation["gripper_position"]
    mirrored = (side < 0).unsqueeze(-1)
    result = observation.clone(recurse=False)
    result.update(
        {
            "end_effector_position": vectors(observation["end_effector_position"]),
            "end_effector_rotation": rotations(observation["end_effector_rotation"], 0),
            "object_position": vectors(observation["object_position"]),
            "object_rotation": rotations(observation["object_rotation"], 1),
            "gripper_position": torch.where(mirrored, -fingers.flip(-1), fingers),
        }
    )
    # An axis of rotation is a pseudo-vector: mirroring reverses it once more.
    rotation = vectors(actions[..., 3:6]) * side.view(-1, 1, 1)
    return result, torch.cat((vectors(actions[..., :3]), rotation, actions[..., 6:]), -1)
