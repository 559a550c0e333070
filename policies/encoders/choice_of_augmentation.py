"""Choice of the augmentation of a policy's supervised loss, by option and contract."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from embodied.configuration import Fraction, Range
from embodied.contract import Contract
from embodied.errors import UserError
from policies.encoders.augmentation import CARTESIAN, Augmentation, AugmentationKind, CartesianScene
from policies.encoders.base import Encoder
from policies.encoders.choice import EncoderConfig
from policies.encoders.libero import missing
from policies.vision.augmentation import PictureChanges
from policies.vision.encoder import PictureEncoder, pictures


@dataclass
class AugmentedConfig(EncoderConfig):
    """Options of the encoders, see EncoderConfig, and of augmentations.

    With `augmentation` of Cartesian scenes, the supervised loss uses scenes mirrored and rotated by up to `turn_rad`
    (0: unchanged), without a share `hidden_distractors` of unmentioned objects and a share `hidden_words` of words that
    name no object.
    """

    augmentation: AugmentationKind = AugmentationKind.AUTO
    turn_rad: Annotated[float, Range(at_least=0, at_most=math.pi)] = 0.8
    hidden_distractors: Fraction = 0.5
    hidden_words: Fraction = 0.3


def augmentation(contract: Contract, config: AugmentedConfig, encoder: Encoder) -> Augmentation | None:
    """Augmentation for the actor's `encoder`; None: samples are used as they are.

    Raises:
        UserError: for a chosen augmentation that the contract does not allow.
    """
    kind = config.augmentation
    can_turn = contract.action.names[:6] == CARTESIAN
    if kind is AugmentationKind.AUTO:
        scene = can_turn and not missing(contract)
        changes_pictures = isinstance(encoder, PictureEncoder) and (config.vision.shift or config.vision.colour)
        other = AugmentationKind.PICTURES if changes_pictures else AugmentationKind.NONE
        kind = AugmentationKind.CARTESIAN_SCENE if scene else other
    if kind is AugmentationKind.NONE:
        return None
    if kind is AugmentationKind.PICTURES:
        return PictureChanges(pictures(contract), config.vision.shift, config.vision.colour)
    if names := missing(contract):
        raise UserError(f"policy.augmentation=cartesian_scene needs {', '.join(names)}; use augmentation=none")
    if config.turn_rad and not can_turn:
        raise UserError(f"expected actions {CARTESIAN} to turn scenes, got {contract.action.names}; set turn_rad=0")
    return CartesianScene(config.turn_rad, config.hidden_distractors, config.hidden_words)
