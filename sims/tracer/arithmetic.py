"""Arithmetic of programs, for tensors, arrays and traced values.

The values themselves implement `+ - * /`, comparisons and `& | ~`; this module has all other operations. It never
branches on values, so that a function is the same for every lane of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from sims import counter_rng
from sims.tracer.graph import Node

Value = Any
"""A torch tensor or NumPy array [N], a `Node` of a traced graph, or a Python number."""
Rows = list[Value]


def where(condition: Value, first: Value, second: Value) -> Value:
    """`first` where `condition` holds, else `second`."""
    if isinstance(condition, Node):
        return condition.graph.where(condition, first, second)
    if isinstance(condition, bool):  # for plain numbers
        return first if condition else second
    if isinstance(condition, np.ndarray):
        return np.where(condition, first, second)
    return torch.where(condition, first, second)


def sqrt(x: Value) -> Value:
    """Square root."""
    return x**0.5


def squares(values: Rows) -> Value:
    """Sum of the squares of `values`."""
    total = values[0] * values[0]
    for value in values[1:]:
        total = total + value * value
    return total


def clip(x: Value, low: Value, high: Value) -> Value:
    """`x` limited to [low, high]; its derivative is 1 inside and at the limits, 0 outside."""
    return where(x < low, low, where(x > high, high, x))


def uniform(key: Sequence[Value], counter: Value, index: Value) -> Value:
    """Number `index` of draw `counter` from the stream `key` (two 32-bit words), uniform in (0, 1).

    It is `counter_rng.uniform`, also for nodes, whose `index` is an int. Its derivative is zero.
    """
    if isinstance(key[0], Node):
        return key[0].graph.uniform(key[0], key[1], counter, index)
    return counter_rng.uniform(key, counter, index)


def gaussians(key: Sequence[Value], counter: Value, first: int, count: int) -> Rows:
    """`count` independent standard normal numbers of draw `counter`, which use its indices from `first` on.

    Box and Muller 1958, Ann. Math. Stat. 29(2).
    """
    numbers: Rows = []
    for index in range(first, first + count + count % 2, 2):
        # sqrt(-2 log u) (cos 2 pi v, sin 2 pi v) are two independent standard normal numbers.
        radius = (uniform(key, counter, index).log() * -2.0).sqrt()
        angle = uniform(key, counter, index + 1) * (2.0 * math.pi)
        numbers += [radius * angle.cos(), radius * angle.sin()]
    return numbers[:count]
