"""What computes: the policy's device, PyTorch's share of the cores, and the machine's memory."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from embodied.errors import UserError

GROUP_LIMITS = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Where Linux tells how much memory a container may take."""


def prepare(device: str, threads: int | None = None) -> None:
    """Check that `device` works here, and let PyTorch use `threads` cores: those at hand if None, four at most.

    From here on, asking for more memory than the machine has fails at once, unless CUDA is used.

    Raises:
        UserError: for a device that is not here, no thread at all, or more than these cores could take turns at.
    """
    cores = len(os.sched_getaffinity(0))
    most = max(64, 8 * cores)
    if threads is not None and not 1 <= threads <= most:
        raise UserError(f"expected threads of 1 to {most} on these {cores} cores, got {threads}")
    # A supervised step gains a quarter from a second thread; matrices this small cannot feed many.
    torch.set_num_threads(threads or min(4, cores))
    if device == "cpu":  # a GPU's driver reserves addresses as it likes
        _limit_memory()
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or not (index or "0").isdecimal():
        raise UserError(f"unknown device {device!r}; expected cpu, cuda or cuda:NUMBER")
    if kind == "cuda" and torch.version.cuda is None:
        raise UserError(f"device={device}, but this PyTorch is built without CUDA; use device=cpu, or install another")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise UserError(f"device={device}, but there are {torch.cuda.device_count()} CUDA devices; use device=cpu")


@contextmanager
def enough_memory() -> Iterator[None]:
    """Tell the user where the body asks for more memory than there is.

    Raises:
        UserError: then, on one line.
    """
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        text = str(error)
        if not (isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in text.lower()):
            raise
        asked = re.search(r"\d[\d.]* ?(bytes|[KMGTPE]iB)", text)
        size = f", {asked[0]} were asked for" if asked else ""
        raise UserError(f"out of memory{size}; use a smaller num_envs, policy or minibatch") from error


def _limit_memory() -> None:
    """Have the kernel refuse what cannot end well: it would promise more memory than there is, and kill us later."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    of_group = [int(path.read_text()) for path in GROUP_LIMITS if path.exists() and path.read_text().strip().isdigit()]
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = min([machine, *of_group] + ([hard] if hard != resource.RLIM_INFINITY else []))
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
