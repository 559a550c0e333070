"""Memory that parent and children share: plain buffers, described by JSON, for any version of NumPy and torch.

It has no name, so that it is freed however the processes end.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from typing import Any, BinaryIO, cast

import numpy as np

ALIGNMENT = 64
"""Alignment of arrays, bytes."""
Layout = dict[str, tuple[str, tuple[int, ...]]]
"""dtype and shape of every array, by name, in order."""


def allocate(layout: Layout) -> BinaryIO:
    """New shared memory for `layout`, all zero; it exists as long as a process has it open or mapped."""
    if hasattr(os, "memfd_create"):
        file: BinaryIO = open(os.memfd_create("embodied"), "r+b")  # noqa: SIM115 - the caller's
    else:  # not on Linux
        file = cast(BinaryIO, tempfile.TemporaryFile())  # noqa: SIM115 - the caller's
    os.ftruncate(file.fileno(), max(ALIGNMENT, sum(_size(*each) for each in layout.values())))
    return file


def arrays(file: int, layout: Layout) -> dict[str, np.ndarray]:
    """Arrays of `layout` in the memory of the descriptor `file`, which may be closed afterwards."""
    memory = mmap.mmap(file, 0)
    views = {}
    offset = 0
    for name, (dtype, shape) in layout.items():
        views[name] = np.frombuffer(memory, dtype, math.prod(shape), offset).reshape(shape)
        offset += _size(dtype, shape)
    return views


def from_json(layout: dict[str, Any]) -> Layout:
    """Layout from its JSON form."""
    return {name: (dtype, tuple(shape)) for name, (dtype, shape) in layout.items()}


def joined(layouts: list[Layout], count: int) -> Layout:
    """Common layout of `count` rows for arrays of several processes, with the largest size of each axis.

    Raises:
        ValueError: if dtypes, numbers of axes or numbers of arrays differ.
    """
    common: Layout = {}
    for name, (dtype, shape) in layouts[0].items():
        each = [layout.get(name, ("nothing", ())) for layout in layouts]
        if {(kind, len(other)) for kind, other in each} != {(dtype, len(shape))} or len(layouts[0]) != len(layouts[-1]):
            raise ValueError(f"processes have different kinds of {name}: {each}")
        common[name] = dtype, (count, *map(max, zip(*(other for _, other in each), strict=True)))
    return common


def _size(dtype: str, shape: tuple[int, ...]) -> int:
    return -(-np.dtype(dtype).itemsize * math.prod(shape) // ALIGNMENT) * ALIGNMENT
