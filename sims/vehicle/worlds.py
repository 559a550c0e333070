"""Numbered worlds of episodes (rooms, obstacles, tracks), made in blocks; a number always gives the same world.

Letters: M worlds, C circles, S segments, P points of the route.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor

from embodied.seeding import derive
from sims.vehicle.episode import Mdp
from sims.vehicle.vehicles import SCATTERED

Array = NDArray[Any]
BLOCK = 256
"""Number of worlds that are made together, at little more cost than one."""
SPLITS = ("train", "eval")


def worlds(mdp: Mdp, split: str, starts: Tensor) -> TensorDict:
    """Worlds of initial states `starts` [M] int64: the arrays of `Mdp.worlds`, and three more.

    `draws` [M, D] and `odometry` [M, 2] are in [-1, 1]. `world` [M, 2] identifies the world: the split, as a number,
    and the initial state.

    Raises:
        ValueError: for an unknown split.
    """
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; expected one of {', '.join(SPLITS)}")
    blocks, place = torch.unique(starts // BLOCK, return_inverse=True)
    parts = [_block(mdp, split, number) for number in blocks.tolist()]
    return TensorDict.cat(parts)[BLOCK * place + starts % BLOCK]


@lru_cache(maxsize=16)
def _block(mdp: Mdp, split: str, number: int) -> TensorDict:
    seed = derive(0, "vehicle", type(mdp).__name__, split, number)
    rng = np.random.Generator(np.random.Philox(key=seed))
    arrays = mdp.worlds(rng, BLOCK) | {"draws": rng.uniform(-1.0, 1.0, (BLOCK, len(SCATTERED)))}
    arrays["odometry"] = rng.uniform(-1.0, 1.0, (BLOCK, 2))
    tensors = {name: torch.from_numpy(part).float() for name, part in arrays.items()}
    numbers = BLOCK * number + torch.arange(BLOCK)
    tensors["world"] = torch.stack((torch.full_like(numbers, SPLITS.index(split)), numbers), 1)
    return TensorDict(tensors, batch_size=[BLOCK])
