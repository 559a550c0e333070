"""Gymnasium's spaces as our contract, and observations of worlds in buffers of its specs.

Letters in shape comments: N worlds, K executed actions of a chunk, A action dimension.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.spaces.utils import flatdim, flatten
from numpy.typing import NDArray

from embodied.contract import Contract, TensorSpec, with_privileged
from embodied.errors import UserError

Array = NDArray[Any]
RENDER = "render"
"""Name of the camera of an environment's own renderer."""
ENCODED = (spaces.Discrete, spaces.MultiBinary, spaces.MultiDiscrete)
"""Spaces whose observations are flattened by Gymnasium: a choice is one-hot."""


class Observations:
    """Observations of N worlds in `space`: by name, nested ones as "outer.inner"; a single one is "observation".

    Images of three colours are uint8 with their name as the camera, other uint8 arrays stay uint8, all others are
    float32.

    Raises:
        UserError: for spaces without observations of fixed size.
    """

    def __init__(self, space: spaces.Space, count: int) -> None:
        self._parts = list(_parts(space, ()))
        self.specs = {".".join(path) or "observation": _spec(path, part) for path, part in self._parts}
        self.buffers = {
            name: np.zeros((count, *spec.shape), dtype=spec.dtype) for name, spec in self.specs.items()
        }  # [N, ...] each

    def read(self, rows: list[int], observations: list[Any]) -> list[int]:
        """Store the `observations` of the worlds `rows` [M], ascending, except where a number is not finite.

        Returns the worlds with such numbers.
        """
        finite = True
        values = []
        for path, space in self._parts:
            parts = observations
            for key in path:
                parts = [each[key] for each in parts]
            if isinstance(space, ENCODED):
                parts = [flatten(space, each) for each in parts]
            values.append(value := np.array(parts))
            if value.dtype.kind == "f" and not (finite_elements := np.isfinite(value)).all():
                finite = finite_elements.reshape(len(rows), -1).all(1) & finite
        for buffer, value in zip(self.buffers.values(), values, strict=True):
            if finite is True and len(rows) == len(buffer):
                buffer[...] = value.reshape(buffer.shape)  # several times as fast as by indices
            else:
                indices = np.array(rows, dtype=np.int64)[finite]
                buffer[indices] = value.reshape(len(rows), *buffer.shape[1:])[finite]
        return [] if finite is True else np.array(rows)[~finite].tolist()


class Actions:
    """Actions in `space`: elements of a box, flat, within its limits; or scores of n choices, where the highest wins.

    `limit` bounds elements without limits in the space. `name` is the environment's name, for messages.

    Raises:
        UserError: for elements without limits, and for other spaces.
    """

    def __init__(self, space: spaces.Space, limit: float | None, name: str) -> None:
        self.space = space
        if isinstance(space, spaces.Discrete):
            count = int(space.n)
            self.low = -np.ones(count, dtype=np.float32)
            self.high = np.ones(count, dtype=np.float32)
            names = tuple(f"choice_{space.start + index}" for index in range(count))
        elif isinstance(space, spaces.Box):
            self.low, self.high = (_limited(bound, limit, name) for bound in (space.low, space.high))
            names = tuple(f"action_{index}" for index in range(len(self.low)))
        else:
            raise UserError(f"{name} takes actions in {space}; expected a Box or Discrete: wrap it in one")
        self.spec = TensorSpec((len(names),), names=names, low=tuple(self.low.tolist()), high=tuple(self.high.tolist()))

    def chosen(self, actions: Array) -> Array:
        """Actions of the space, [N, K, ...], for `actions` [N, K, A]."""
        if isinstance(self.space, spaces.Discrete):
            return actions.argmax(-1) + self.space.start
        clipped = np.minimum(np.maximum(actions, self.low), self.high).astype(self.space.dtype, copy=False)
        return clipped.reshape(*actions.shape[:2], *(self.space.shape or ()))


def contract(
    world: gymnasium.Env,
    executed: int = 1,
    control_dt_s: float | None = None,
    action_limit: float | None = None,
    horizon: int | None = None,
    image_size: int | None = None,
    privileged: Sequence[str] = (),
) -> Contract:
    """Contract derived from the spaces of `world`: chunks of H = `horizon` actions (K if None), K of them executed.

    If `control_dt_s` is None, it is the world's `dt`, or the inverse of its `render_fps`. With an `image_size`, frames
    of the world's renderer are the observation "render_image". Observations `privileged` are for critics only.

    Raises:
        UserError: without a time between actions, for spaces that cannot be read, and unknown names in `privileged`.
    """
    name = world.spec.id if world.spec else str(world)
    rate_hz = world.metadata.get("render_fps")
    dt_s = control_dt_s or getattr(world.unwrapped, "dt", None) or (1.0 / rate_hz if rate_hz else None)
    if dt_s is None:
        raise UserError(f"{name} does not tell the time between its steps; set task.control_dt_s")
    specs = with_privileged(Observations(world.observation_space, 0).specs, privileged)
    if image_size is not None:
        specs[f"{RENDER}_image"] = TensorSpec(
            (image_size, image_size, 3), "uint8", names=("red", "green", "blue"), camera=RENDER
        )
    action = Actions(world.action_space, action_limit, name).spec
    chunk = {"horizon": executed if horizon is None else horizon, "executed": executed}
    return Contract(specs, action, round(float(dt_s), 9), **chunk)


def _parts(space: spaces.Space, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], spaces.Space]]:
    if isinstance(space, spaces.Dict):
        for key, part in space.items():
            yield from _parts(part, (*path, key))
    else:
        yield path, space


def _spec(path: tuple[str, ...], space: spaces.Space) -> TensorSpec:
    if isinstance(space, ENCODED):
        return TensorSpec((flatdim(space),))
    if not isinstance(space, spaces.Box) or 0 in space.shape:
        what = f"observation {'.'.join(path)!r}" if path else "the observation"
        raise UserError(f"{what} is in {space}; expected a Box, a discrete space or a Dict of them: wrap it in one")
    shape = space.shape or (1,)
    if space.dtype == np.uint8:
        picture = len(shape) == 3 and shape[-1] == 3
        return TensorSpec(shape, "uint8", camera=(".".join(path) or "observation") if picture else "")
    low, high = (tuple(map(float, np.ravel(bound))) for bound in (space.low, space.high))
    bounded = len(shape) == 1 and all(map(math.isfinite, (*low, *high)))
    return TensorSpec(shape, low=low if bounded else (), high=high if bounded else ())


def _limited(bound: Array, limit: float | None, name: str) -> Array:
    flat = np.asarray(bound, dtype=np.float32).ravel()
    if limit is None and not np.isfinite(flat).all():
        raise UserError(f"actions of {name} have no limits; set task.action_limit")
    return np.where(np.isfinite(flat), flat, np.sign(flat) * np.float32(limit or 0.0))
