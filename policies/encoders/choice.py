"""Choice of the encoder of a policy's observations, by option and contract."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tensordict import TensorDict

from embodied.configuration import PositiveInt
from embodied.contract import Contract
from embodied.errors import UserError
from embodied.networks.value_head import ValueHead
from embodied.policy import PolicyConfig
from policies.encoders.base import Encoder, EncoderKind
from policies.encoders.libero import OBSERVATIONS, ObjectEncoder, missing
from policies.encoders.words import Reading, Words
from policies.flat import FlatEncoder, PlainEncoder
from policies.vision.backbones import VisionConfig
from policies.vision.encoder import PictureEncoder, pictures


@dataclass
class EncoderConfig(PolicyConfig):
    """Options of the encoders of a policy's actor and critic.

    `encoder` reads object tokens, or pictures (by `vision`), the instruction and the robot's state, or all float32
    fixed-size observations (plain: without layers), of which distances may be `reciprocal` (as for policy=mlp). With
    pictures, the critic reads object tokens instead where a simulator has them. Layers of the encoders have `width`.
    The critic has a head of `values`. With pictures, instructions are read as `words`: fixed random vectors, or
    features of sentences by all-MiniLM-L6-v2 in `words_model`, a folder or a hub name (None: one on this machine).
    """

    encoder: EncoderKind = EncoderKind.AUTO
    vision: VisionConfig = field(default_factory=VisionConfig)
    words: Words = Words.HASHED
    words_model: str | None = None
    reciprocal: list[str] = field(default_factory=list)
    width: PositiveInt = 64
    values: ValueHead = field(default_factory=ValueHead)

    def __post_init__(self) -> None:
        """Raise UserError for numbers out of range, and a model of sentences that nothing reads."""
        super().__post_init__()
        if self.words_model and self.words is Words.HASHED:
            raise UserError(f"policy.words_model={self.words_model} is not read with words=hashed; use words=minilm")

    def recorded(self) -> dict[str, Any]:
        """Record the absolute path of a folder with the model of sentences."""
        folder = self.words_model and Path(self.words_model).is_dir()
        return super().recorded() | ({"words_model": str(Path(self.words_model).resolve())} if folder else {})


def observation_encoder(
    contract: Contract,
    config: EncoderConfig,
    *,
    objects: bool = False,
    privileged: bool = False,
    fixed_size: EncoderKind = EncoderKind.FLAT,
    lender: Encoder | None = None,
) -> Encoder:
    """Encoder of the actor's observations, or with the actor's as `lender` of a critic's, which shares what is frozen.

    With `objects` it reads objects instead of pictures where they are known; with `privileged`, also privileged
    observations. AUTO is `fixed_size` for a contract without objects and pictures.
    """
    kind = config.encoder
    if kind is EncoderKind.AUTO:
        fallback = EncoderKind.PICTURES if pictures(contract) else fixed_size
        kind = fallback if missing(contract) else EncoderKind.OBJECTS
    if kind is not EncoderKind.PICTURES and config.words is Words.MINILM:
        raise UserError(f"policy.words=minilm is read with pictures, not with encoder={kind.value}; use words=hashed")
    if kind not in (EncoderKind.FLAT, EncoderKind.PLAIN) and config.reciprocal:
        raise UserError(f"expected policy.reciprocal=[] with encoder={kind.value}, got {config.reciprocal}")
    if kind is EncoderKind.FLAT:
        return FlatEncoder(contract, config.width, config.reciprocal, privileged=privileged)
    if kind is EncoderKind.PLAIN:
        return PlainEncoder(contract, config.reciprocal, privileged=privileged)
    if kind is EncoderKind.PICTURES:
        has_objects = objects and all(key in contract.observation for key in OBSERVATIONS)
        if has_objects:
            return ObjectEncoder(config.width)
        reading = Reading(config.words, config.words_model)
        lender = lender if isinstance(lender, PictureEncoder) else None
        return PictureEncoder(contract, config.width, config.vision, reading, lender)
    if names := missing(contract):
        raise UserError(f"policy.encoder=objects reads {', '.join(names)}, which this task lacks; use encoder=flat")
    return ObjectEncoder(config.width)


def fit_encoders(contract: Contract, encoders: Sequence[Encoder], observation: TensorDict) -> None:
    """Compute the normalisation statistics of `encoders`, the actor's first, from observations [N] of `contract`.

    Raises:
        UserError: for observations that lack inputs of the critic; `first_decisions` of a simulator have them.
    """
    try:
        observation = encoders[0].read(observation)
        for encoder in encoders:
            encoder.fit(observation)
    except KeyError as error:
        absent = [key for key in contract.observation if key not in observation]
        if not absent:
            raise
        needed = "fit needs all observations that actor and critic read"
        raise UserError(f"{needed}; add {', '.join(absent)}") from error
