"""Numbered worlds of episodes (rooms, obstacles, tracks), made in blocks; a number always gives the same world.

Letters: M worlds, C circles, S segments, P points of the route.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor

from embodied.seeding import derive
from sims.vehicle.vehicles import SCATTERED

Array = NDArray[Any]
BLOCK = 256
"""Number of worlds that are made together, at little more cost than one."""
SPLITS = ("train", "eval")


class Maker(Protocol):
    """Makes worlds; hashable, and equal to makers of the same worlds."""

    def worlds(self, rng: np.random.Generator, count: int) -> dict[str, Array]:
        """`count` worlds, each drawn from `rng`.

        They are circles [M, C, 3] (centre, radius), segments [M, S, 4] (both ends), the vehicle's initial pose [M, 3],
        the route [M, P, 2] to drive, all in m and rad, world, the route's length_m [M], and the vehicle's initial
        speed_m_s [M].
        """
        ...


def worlds(maker: Maker, split: str, starts: Tensor) -> TensorDict:
    """Worlds of initial states `starts` [M] int64: the arrays of `maker`, and three more.

    `draws` [M, D] and `odometry` [M, 2] are in [-1, 1]. `world` [M, 2] identifies the world: the split, as a number,
    and the initial state.

    Raises:
        ValueError: for an unknown split.
    """
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; expected one of {', '.join(SPLITS)}")
    blocks, place = torch.unique(starts // BLOCK, return_inverse=True)
    parts = [_block(maker, split, number) for number in blocks.tolist()]
    return TensorDict.cat(parts)[BLOCK * place + starts % BLOCK]


@lru_cache(maxsize=16)
def _block(maker: Maker, split: str, number: int) -> TensorDict:
    seed = derive(0, "vehicle", type(maker).__name__, split, number)
    rng = np.random.Generator(np.random.Philox(key=seed))
    arrays = maker.worlds(rng, BLOCK) | {"draws": rng.uniform(-1.0, 1.0, (BLOCK, len(SCATTERED)))}
    arrays["odometry"] = rng.uniform(-1.0, 1.0, (BLOCK, 2))
    tensors = {name: torch.from_numpy(part).float() for name, part in arrays.items()}
    numbers = BLOCK * number + torch.arange(BLOCK)
    tensors["world"] = torch.stack((torch.full_like(numbers, SPLITS.index(split)), numbers), 1)
    return TensorDict(tensors, batch_size=[BLOCK])
