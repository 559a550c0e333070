"""The functions of native.c and maps.c, compiled at first use, and pointers to tensors for them."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sims import counter_rng, native
from sims.vehicle.vehicles import PARAMETERS


def pointers(*tensors: Tensor) -> list[ctypes.c_void_p]:
    """Pointers to the data of contiguous tensors (float32, int32 or bool)."""
    for tensor in tensors:
        assert tensor.is_contiguous()
        assert tensor.dtype in (torch.float32, torch.int32, torch.bool)
    return [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]


@cache
def library() -> Any:  # noqa: ANN401 - a library has the functions it has
    """The compiled functions; needs a compiler, see `native.compiler`."""
    indices = ", ".join((*map(str.upper, PARAMETERS), "PARAMETERS"))
    head = f"{counter_rng.C_SOURCE}enum {{ {indices} }};\n"
    compiled = native.load(head + Path(__file__).with_name("native.c").read_text())
    long, number, pointer = ctypes.c_long, ctypes.c_float, ctypes.c_void_p
    shapes = [long, pointer, long, pointer]
    types = {
        "advance": [long, long, number, long, *[pointer] * 3, *shapes, *[pointer] * 2],
        "scan": [long, long, *[number] * 4, *[pointer] * 6, *shapes, pointer],
        "open_cells": [long, long, *[number] * 3, *shapes, pointer],
        "clearance": [long, number, number, long, pointer, long, pointer, pointer],
    }
    return _declared(compiled, types)


@cache
def maps() -> Any:  # noqa: ANN401 - a library has the functions it has
    """The compiled functions of maps.c, in which products and sums stay apart; needs a compiler, as `library`."""
    compiled = native.load(Path(__file__).with_name("maps.c").read_text(), (*native.FLAGS, "-ffp-contract=off"))
    long, number, pointer = ctypes.c_long, ctypes.c_float, ctypes.c_void_p
    types = {
        "shortest_distances": [long, long, number, number, pointer, pointer],
        "path_length_at": [long, long, *[number] * 3, *[pointer] * 3],
        "map_mark": [pointer, long, *[pointer] * 5],
        "map_plan": [pointer, long, *[pointer] * 3],
        "map_observe": [pointer, long, *[pointer] * 8],
    }
    return _declared(compiled, types)


def _declared(compiled: ctypes.CDLL | None, types: dict[str, list[Any]]) -> ctypes.CDLL:
    """`compiled` with the types of its functions' arguments."""
    assert compiled is not None
    for name, arguments in types.items():
        function = getattr(compiled, name)
        function.argtypes, function.restype = arguments, None
    return compiled
