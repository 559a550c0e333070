"""Compute resources: the policy's device, PyTorch's threads, and memory limits."""

from __future__ import annotations

import ctypes
import os
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from embodied.errors import OutOfMemoryError, UserError

GROUPS = Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory")
"""Folders of control groups, of Linux's second and first version, which limit the memory of containers."""
LIMITS = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
"""Files of a group with its memory limit and its use, in the second and the first version."""
MALLOC_BYTES = (-1, 1 << 28), (-3, 1 << 25)
"""glibc's M_TRIM_THRESHOLD and M_MMAP_THRESHOLD (man mallopt).

They are the free memory that a process keeps, and the largest block that is taken from it.
"""


def prepare(device: str, threads: int | None = None) -> None:
    """Check that `device` works, and set PyTorch's `threads`: if None, the number of cores, at most four.

    Processes that torchrun started share the cores. Freed memory is kept from then on (`keep_freed_memory`),
    and an allocation beyond the memory that is free now fails at once, unless CUDA is used.

    Raises:
        UserError: for a missing device, or an impossible number of threads.
    """
    cores = len(os.sched_getaffinity(0))
    max_threads = max(64, 8 * cores)
    if threads is not None and not 1 <= threads <= max_threads:
        raise UserError(f"expected threads from 1 to {max_threads} (cores here: {cores}), got {threads}")
    # Matrices of small networks are too small for many threads.
    shared = cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    torch.set_num_threads(threads or max(1, min(4, shared)))
    keep_freed_memory()
    if device == "cpu":  # a GPU's driver reserves large address ranges
        _limit_memory()
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or not (index or "0").isdecimal():
        raise UserError(f"unknown device {device!r}; expected cpu, cuda or cuda:NUMBER")
    if kind == "cuda" and torch.version.cuda is None:
        raise UserError(f"device={device}, but this PyTorch has no CUDA; use device=cpu, or install one with CUDA")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise UserError(f"device={device}, but CUDA devices found: {torch.cuda.device_count()}; use device=cpu")
    # float32 means float32: PyTorch's default is TF32 in convolutions, though not in matrix products
    torch.backends.cudnn.allow_tf32 = False


def keep_freed_memory() -> None:
    """Keep up to 256 MB of freed memory, in blocks up to 32 MB, for the process; a no-op without glibc.

    Otherwise each tensor of some megabytes is returned to Linux when it is freed, and the pages of the next one are
    created again: PPO's updates of a small network spend a fifth of their time on that (`benchmarks/ppo_speed.py`).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        for parameter, value in MALLOC_BYTES:
            mallopt(parameter, value)


@contextmanager
def enough_memory() -> Iterator[None]:
    """Context that reports a lack of memory in the body on one line.

    Raises:
        OutOfMemoryError: if memory runs out.
    """
    try:
        yield
    except Exception as error:  # libraries raise their own classes
        text = str(error)
        # A library that does not fit any more is an ImportError; where a mount forbids programs, the reason follows.
        matches = re.search(r"allocate (memory|\d+ bytes)|failed to map segment from shared object$", text)
        if not (isinstance(error, MemoryError | torch.OutOfMemoryError) or matches):
            raise
        requested = re.search(r"\d[\d.]* ?(bytes|[KMGTPE]iB)", text)
        size = f", {requested[0]} were asked for" if requested else ""
        raise OutOfMemoryError(f"out of memory{size}") from error


def _limit_memory() -> None:
    """Limit the process's data to its size plus the free memory: Linux would grant more and kill the process later."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = _kilobytes(Path("/proc/self/status"), "VmData") + free_memory()
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def free_memory() -> int:
    """Free memory of the machine and of this process's control groups, in bytes; caches of files count as free."""
    free = [_kilobytes(Path("/proc/meminfo"), "MemAvailable")]
    lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    paths = {line.split(":", 2)[2].strip("/") for line in lines if line.split(":", 2)[1] in ("", "memory")}
    for top, (limit, used) in zip(GROUPS, LIMITS, strict=True):
        for group in {top / each for path in paths for each in ("", path, *map(str, Path(path).parents))}:
            if (group / limit).exists() and (bound := (group / limit).read_text(encoding="utf-8").strip()).isdigit():
                # files that are cached but not in use would be dropped
                cached = re.search(
                    r"^(?:total_)?inactive_file (\d+)$",
                    (group / "memory.stat").read_text(encoding="utf-8"),
                    re.MULTILINE,
                )
                free.append(
                    int(bound) - int((group / used).read_text(encoding="utf-8")) + (int(cached[1]) if cached else 0)
                )
    return max(0, min(free))


def _kilobytes(path: Path, name: str) -> int:
    """Number of bytes in the line "NAME: NUMBER kB" of the file `path`."""
    line = re.search(rf"^{name}:\s+(\d+) kB$", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert line, f"{path} has no {name}"
    return int(line[1]) << 10
