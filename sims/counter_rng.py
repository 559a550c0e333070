"""Random numbers as a function of a key, a counter and an index: one generator, in Python, NumPy, torch and C.

A draw depends neither on earlier draws nor on other environments. All versions give the same bits (tested).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

Words = Any
"""32-bit words: an int, a NumPy array of int64 or an int64 tensor, of any shape."""

GOLDEN = 0x9E3779B9
COUNTER = 0x85EBCA6B
"""Odd factors of the index and of the counter."""
MIX = ((16, 0x7FEB352D), (15, 0x846CA68B))
"""Shifts and odd factors of a 32-bit mixing function of low bias (github.com/skeeto/hash-prospector)."""
LAST_SHIFT = 16


def mix(words: Words) -> Words:
    """Mix the lower 32 bits of `words`; the result is in [0, 2^32)."""
    words = words & 0xFFFFFFFF
    for shift, factor in MIX:
        words = ((words ^ (words >> shift)) * factor) & 0xFFFFFFFF
    return words ^ (words >> LAST_SHIFT)


def uniform(key: Sequence[Words], counter: Words, index: Words) -> Any:  # noqa: ANN401 - as the key is
    """Number `index` of draw `counter` from the stream `key` (two words), uniform in (0, 1), in double precision.

    It has 24 bits, so that single precision represents it exactly. `counter` and `index` are words too; a counter may
    also be a floating point tensor, like the rows of a kernel.
    """
    words = key[0] + _integers(counter, key[0]) * COUNTER + (index + 1) * GOLDEN
    return (_real(mix(mix(words) ^ key[1]) >> 9) + 0.5) * 2.0**-23


def uniforms(key: Tensor, counter: int, count: int) -> Tensor:
    """Numbers 0 to `count` of draw `counter` of each key [2, M] int32: [count, M] in single precision."""
    index = torch.arange(count, device=key.device).unsqueeze(1)
    return uniform(list((key.long() & 0xFFFFFFFF).unbind(0)), counter, index).float()


def _integers(counter: Words, like: Words) -> Words:
    if isinstance(like, Tensor):
        return torch.as_tensor(counter).long()
    return counter.astype(np.int64) if isinstance(counter, np.ndarray) else int(counter)


def _real(words: Words) -> Any:  # noqa: ANN401 - as the words are
    if isinstance(words, Tensor):
        return words.double()
    return words.astype(np.float64) if isinstance(words, np.ndarray) else float(words)


C_SOURCE = "\n".join(
    (
        "#include <stdint.h>",
        f"#define GOLDEN_ {GOLDEN:#x}u",
        f"#define COUNTER_ {COUNTER:#x}u",
        "static inline uint32_t mix_(uint32_t x)",
        "{",
        *(f"    x = (x ^ (x >> {shift})) * {factor:#x}u;" for shift, factor in MIX),
        f"    return x ^ (x >> {LAST_SHIFT});",
        "}",
        "static inline float uniform_(uint32_t key0, uint32_t key1, float counter, uint32_t index)",
        "{",
        "    const uint32_t x = key0 + (uint32_t)(int32_t)counter * COUNTER_ + (index + 1u) * GOLDEN_;",
        "    return ((float)(int32_t)(mix_(mix_(x) ^ key1) >> 9) + 0.5f) * 0x1p-23f;",
        "}",
        "",
    )
)
"""C code of `mix_` and `uniform_`, the same functions, to place before code that draws."""
