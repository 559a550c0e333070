"""Programs of the root run in this process: without a start of Python, and with the process's global state restored.

Tests of the process itself (signals, streams, locale, memory, a kill) start one.
"""

from __future__ import annotations

import io
import logging
import os
import random
import resource
import runpy
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from embodied.runtime.console import PACKAGES, close_log

ROOT = Path(__file__).parents[1]
SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


@dataclass(frozen=True)
class Completed:
    """Exit status and output of a program."""

    returncode: int
    stdout: str
    stderr: str


def run_program(name: str, *arguments: str, cwd: Path = ROOT) -> Completed:
    """Run the file `name`, such as "train.py", as __main__ with `arguments`, in the folder `cwd`; stdin is empty."""
    stdout, stderr = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    with restored_process(), redirect_stdout(stdout), redirect_stderr(stderr), open(os.devnull) as sys.stdin:
        os.chdir(cwd)
        sys.argv = [name, *arguments]
        try:
            runpy.run_path(str(ROOT / name), run_name="__main__")
            status = 0
        except SystemExit as ended:
            status = ended.code
    assert isinstance(status, int)
    stdout.flush()  # of print
    return Completed(status, *(stream.buffer.getvalue().decode() for stream in (stdout, stderr)))


@contextmanager
def restored_process() -> Iterator[None]:
    """Context that restores what programs set for their process: generators, threads, limits, logging, signals."""
    threads, dtype, generator = torch.get_num_threads(), torch.get_default_dtype(), torch.get_rng_state()
    allow_tf32, memory = torch.backends.cudnn.allow_tf32, resource.getrlimit(resource.RLIMIT_DATA)
    python, numpy = random.getstate(), np.random.get_state()
    folder, environment, argv, stdin = Path.cwd(), dict(os.environ), sys.argv, sys.stdin
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    loggers = [logging.getLogger(package) for package in PACKAGES]
    logged = [(logger, logger.handlers, logger.level, logger.propagate) for logger in loggers]
    try:
        yield
    finally:
        close_log()
        for logger, logger.handlers, level, logger.propagate in logged:
            logger.setLevel(level)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.chdir(folder)
        sys.argv, sys.stdin = argv, stdin
        os.environ.clear()
        os.environ.update(environment)
        random.setstate(python)
        np.random.set_state(numpy)
        resource.setrlimit(resource.RLIMIT_DATA, memory)
        torch.backends.cudnn.allow_tf32 = allow_tf32
        torch.set_rng_state(generator)
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
