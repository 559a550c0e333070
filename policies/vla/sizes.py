"""Sizes of vision-language-action models that start from random weights; published weights define their own."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from policies.vla.inputs import PAD


class Size(Enum):
    """Sizes by name: TINY has below a million weights, for tests. SMALL has a few millions, which learn on CPUs."""

    TINY = "tiny"
    SMALL = "small"


@dataclass(frozen=True)
class Sizes:
    """Widths of hidden states and of dense layers of the vision model, the language model, and pi0's action expert.

    Language model and expert have `layers`, each with `heads` of queries of width `head` and one of keys. Pictures have
    `picture` pixels a side, in patches of `patch`, and pass through `seeing_layers`.
    """

    picture: int
    patch: int
    seeing: tuple[int, int]
    seeing_layers: int
    reading: tuple[int, int]
    acting: tuple[int, int]
    layers: int
    heads: int
    head: int

    def text(self, vocabulary: int) -> dict[str, Any]:
        """Settings of transformers' Gemma that reads words from `vocabulary`."""
        return self._gemma(*self.reading) | {"vocab_size": vocabulary}

    def expert(self) -> dict[str, Any]:
        """Settings of transformers' Gemma that denoises actions."""
        return self._gemma(*self.acting)

    def vision(self) -> dict[str, Any]:
        """Settings of transformers' SigLIP."""
        return {
            "model_type": "siglip_vision_model",
            "hidden_size": self.seeing[0],
            "intermediate_size": self.seeing[1],
            "num_hidden_layers": self.seeing_layers,
            "num_attention_heads": self.heads,
            "image_size": self.picture,
            "patch_size": self.patch,
            "vision_use_head": False,
        }

    def _gemma(self, width: int, inner: int) -> dict[str, Any]:
        return {
            "model_type": "gemma",
            "hidden_size": width,
            "intermediate_size": inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": 1,
            "head_dim": self.head,
            "pad_token_id": PAD,
        }


SIZES = {
    Size.TINY: Sizes(32, 8, (32, 64), 2, (64, 128), (32, 64), layers=2, heads=2, head=16),
    Size.SMALL: Sizes(64, 16, (128, 512), 4, (128, 256), (256, 1024), layers=2, heads=4, head=32),
}
