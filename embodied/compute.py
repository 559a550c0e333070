"""What computes: the policy's device, and PyTorch's share of the cores."""

from __future__ import annotations

import os

import torch

from embodied.errors import UserError


def prepare(device: str, threads: int | None = None) -> None:
    """Check that `device` works here, and let PyTorch use `threads` cores: those at hand if None, four at most.

    Raises:
        UserError: for a device that is not here, or no thread at all.
    """
    if threads is not None and threads < 1:
        raise UserError(f"expected threads of at least 1, got {threads}")
    # A supervised step gains a quarter from a second thread; matrices this small cannot feed many.
    torch.set_num_threads(threads or min(4, len(os.sched_getaffinity(0))))
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or not (index or "0").isdecimal():
        raise UserError(f"unknown device {device!r}; expected cpu, cuda or cuda:NUMBER")
    if kind == "cuda" and torch.version.cuda is None:
        raise UserError(f"device={device}, but this PyTorch is built without CUDA; use device=cpu, or install another")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise UserError(f"device={device}, but there are {torch.cuda.device_count()} CUDA devices; use device=cpu")
