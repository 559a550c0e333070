"""Fixed random vectors of words, by the hashes of `embodied.words`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from embodied.words import WORD_BUCKETS


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
