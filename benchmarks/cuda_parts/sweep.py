"""Measurements over growing sizes that end where the time or the memory does."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence

import torch

from benchmarks.cuda_parts.record import Record

GROWTH = 2.5
"""Time of a size over that of the one before it, at most: a size that would not end in time is not begun."""


def sweep(record: Record, name: str, sizes: Sequence[int], measure: Callable[[int], float], seconds: float) -> None:
    """Figure `name`, by size, of what `measure` returns for each of `sizes`; written anew after every size.

    Figure `name`_ended says why larger sizes are missing.
    """
    figures: dict[str, float] = {}
    ends, took = time.perf_counter() + seconds, 0.0
    for size in sizes:
        if figures and time.perf_counter() + GROWTH * took > ends:
            record.figure(f"{name}_ended", f"time before {size}")
            return
        began = time.perf_counter()
        try:
            figures[str(size)] = measure(size)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            record.figure(f"{name}_ended", f"memory at {size}")
            return
        finally:
            free()
        took = time.perf_counter() - began
        record.figure(name, figures)


def out_of_memory(error: RuntimeError) -> bool:
    """Whether torch or warp lacked memory of the device."""
    return isinstance(error, torch.OutOfMemoryError) or "Failed to allocate" in str(error)


def free() -> None:
    """Give back what nothing refers to, so that the next size has the whole memory."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
