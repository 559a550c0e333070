"""Part of the CUDA check for FSDP2 on one device, in bfloat16: resumed runs, and comparison with unsharded updates."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.cuda_parts.record import Options, Record
from embodied.extras import needs_extra

PROCESS = Path(__file__).with_name("sharding_process.py")
LOOPBACK = {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
"""Interfaces of a machine without a network."""
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Workspace with which cuBLAS sums deterministically, as a resumed run needs."""


def run(record: Record, options: Options) -> None:
    """Run one process of torchrun, which appends to the same record."""
    end = time.time() + options.seconds
    with record.row("torchrun"):
        with needs_extra("vla"):
            import transformers  # noqa: F401
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            "1",
            "--master-addr",
            "127.0.0.1",
            "--master-port",
            str(free_port()),
            str(PROCESS),
            options.device,
            str(end),
            str(options.folder),
        ]
        process = subprocess.run(
            command,
            env={**os.environ, **LOOPBACK, **DETERMINISTIC},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        if process.returncode:
            raise RuntimeError(f"torchrun ended with {process.returncode}:\n{process.stderr[-6000:]}")


def free_port() -> int:
    """A free port of this machine."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
