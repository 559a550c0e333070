"""Measurements over growing sizes, until the time or the memory is used up."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence

import torch

from benchmarks.cuda_parts.record import Record

GROWTH = 2.5
"""Largest expected ratio of a size's time to the previous size's: a size that would not end in time is skipped."""


def sweep(record: Record, name: str, sizes: Sequence[int], measure: Callable[[int], float], seconds: float) -> None:
    """Record the figure `name`: results of `measure` by size for each of `sizes`, rewritten after every size.

    The figure `name`_ended is the reason for missing larger sizes.
    """
    figures: dict[str, float] = {}
    ends, took = time.perf_counter() + seconds, 0.0
    for size in sizes:
        if figures and time.perf_counter() + GROWTH * took > ends:
            record.figure(f"{name}_ended", f"time before {size}")
            return
        start_s = time.perf_counter()
        try:
            figures[str(size)] = measure(size)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            record.figure(f"{name}_ended", f"memory at {size}")
            return
        finally:
            free()
        took = time.perf_counter() - start_s
        record.figure(name, figures)


def out_of_memory(error: RuntimeError) -> bool:
    """Whether torch or warp lacked memory of the device."""
    return isinstance(error, torch.OutOfMemoryError) or "Failed to allocate" in str(error)


def free() -> None:
    """Release unreferenced memory, so that the next size has all of it."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
