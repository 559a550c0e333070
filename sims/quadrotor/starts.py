"""Random keys of numbered initial states."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

from embodied.seeding import derive
from sims.counter_rng import GOLDEN, mix, uniforms

SPLITS = ("train", "eval")
PLATFORM = -2
"""Counter of the draws of a random platform; see `hover.INITIAL`."""


def keys(split: str, starts: Tensor) -> Tensor:
    """Random keys [2, M] int32 of initial states [M] int64; splits have different keys, up to 64-bit collisions.

    Raises:
        ValueError: for an unknown split.
    """
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; expected one of {', '.join(SPLITS)}")
    # NumPy is several times faster for a few numbers
    salt = _salt(split)
    numbers = starts.cpu().numpy()
    first = mix(mix(numbers ^ (salt & 0xFFFFFFFF)) ^ mix((numbers >> 32) ^ (salt >> 32)))
    second = mix(mix(numbers + GOLDEN) ^ (salt >> 31))
    return torch.from_numpy(np.stack((first, second)).astype(np.uint32).view(np.int32))


@cache
def _salt(split: str) -> int:
    return derive(0, "quadrotor", split)


def draws(key: Tensor, count: int) -> Tensor:
    """`count` uniform numbers of each key [2, M], as [count, M], for values drawn once per episode."""
    return uniforms(key, PLATFORM, count)
