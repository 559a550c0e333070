"""Repeatable random numbers: one seed, a separate stream per purpose, states that can be saved."""

from __future__ import annotations

import hashlib
import random
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor


def derive(seed: int, *purpose: str | int) -> int:
    """Seed of one purpose, in [0, 2^63): the same in every process and version."""
    text = "/".join(map(str, (seed, *purpose)))
    # a hash that is the same in every process, unlike Python's; the shift keeps it below 2^63
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(seed: int, *purpose: str | int, device: torch.device | str = "cpu") -> torch.Generator:
    """Separate torch generator for one purpose: more draws for one purpose do not change those of another."""
    return torch.Generator(device=device).manual_seed(derive(seed, *purpose))


def child(parent: torch.Generator, device: torch.device | str = "cpu") -> torch.Generator:
    """Separate generator on `device`, seeded by one draw from `parent`: for a part that draws by itself."""
    return torch.Generator(device).manual_seed(int(torch.randint(1 << 62, (), generator=parent)))


def fixed_noise(rows: Tensor, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """Standard normal noise [N, *shape], on the CPU, as a fixed function of the bytes of each of `rows` [N, B].

    A chunk from zero noise lies between the modes of the demonstrations, where a hand can hover for ever. This noise
    samples a mode, and the same observation still gives the same chunk in any batch, order and process.
    """
    seeds = [zlib.crc32(row.tobytes()) for row in rows.cpu().numpy()]
    return torch.stack([torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds])


def seed_everything(seed: int) -> None:
    """Seed the global generators of torch (all devices), NumPy and Python, for code without a generator argument."""
    torch.manual_seed(derive(seed, "torch"))
    np.random.seed(derive(seed, "numpy") % 2**32)
    random.seed(derive(seed, "python"))


def rng_state() -> dict[str, Any]:
    """States of the global generators, as a tree for a checkpoint."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"torch": torch.get_rng_state(), "cuda": cuda, "numpy": np.random.get_state(), "python": random.getstate()}


def set_rng_state(state: dict[str, Any]) -> None:
    """Continue from `rng_state`; CUDA states are used if the number of devices is the same."""
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])


@contextmanager
def undisturbed() -> Iterator[None]:
    """Context that restores the global generators after the body."""
    before = rng_state()
    try:
        yield
    finally:
        set_rng_state(before)
