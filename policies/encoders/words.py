"""Fixed random vectors of words, by hashes of `embodied.networks.words`, and the choice of words or sentences."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn

from embodied.networks.words import WORD_BUCKETS


class Words(Enum):
    """Value of the option `words` of a policy.

    HASHED are fixed random vectors of the training's words; others are ignored. MINILM are features of the whole
    sentence by a frozen encoder (`policies.encoders.sentences`). AUTO is MINILM for a new run of train.py where the
    model is at hand, else HASHED; the run records which one.
    """

    AUTO = "auto"
    HASHED = "hashed"
    MINILM = "minilm"


@dataclass(frozen=True)
class Reading:
    """How instructions are read: the kind of `words`, and the `model` of sentences, if one is named."""

    words: Words = Words.HASHED
    model: str | None = None


def word_features(width: int) -> Tensor:
    """Fixed random word embeddings [WORD_BUCKETS, width]: not learned, and the same in every process."""
    features = torch.randn(WORD_BUCKETS, width, generator=torch.Generator().manual_seed(0), device="cpu") / 2.0
    features[0] = 0.0  # id 0 is padding
    return features


def summed(words: Tensor, vocabulary: Tensor, features: Tensor) -> Tensor:
    """Sum [..., width] of `features` [WORD_BUCKETS, width] of `words` [..., L] in the `vocabulary` [WORD_BUCKETS]."""
    indices = words * vocabulary[words]
    if torch.jit.is_tracing():  # exported graphs have no bags
        return features[indices].sum(-2)
    bags = nn.functional.embedding_bag(indices.flatten(0, -2), features, mode="sum", padding_idx=0)
    return bags.unflatten(0, indices.shape[:-1])
