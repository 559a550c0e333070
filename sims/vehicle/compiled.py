"""The functions of native.c, compiled at first use."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

from embodied import native
from sims import counter_rng
from sims.vehicle.vehicles import PARAMETERS


@cache
def library() -> Any:  # noqa: ANN401 - a library has the functions it has
    """The compiled functions; needs a compiler, see `native.compiler`."""
    indices = ", ".join((*map(str.upper, PARAMETERS), "PARAMETERS"))
    head = f"{counter_rng.C_SOURCE}enum {{ {indices} }};\n"
    compiled = native.load(head + Path(__file__).with_name("native.c").read_text(encoding="utf-8"))
    long = ctypes.c_long
    number = ctypes.c_float
    pointer = ctypes.c_void_p
    shapes = [long, pointer, long, pointer]
    types = {
        "advance": [long, long, number, long, *[pointer] * 3, *shapes, *[pointer] * 2],
        "scan": [long, long, *[number] * 4, *[pointer] * 6, *shapes, pointer],
        "open_cells": [long, long, *[number] * 3, *shapes, pointer],
    }
    return native.declared(compiled, types)
