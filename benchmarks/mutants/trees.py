"""Copies of the tree in which tests run, each test run in a fork of a process that has imported the slow packages."""

import contextlib
import ctypes
import math
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import hypothesis
import numpy
import pytest
import tensordict
import torch

from benchmarks.mutants import trace
from benchmarks.mutants.coverage import Record, Recorder
from benchmarks.mutants.operators import Fault

PRELOADED = (hypothesis, numpy, pytest, tensordict, torch)
IGNORED = shutil.ignore_patterns(".git", ".venv*", "__pycache__", "outputs", "build", "dist", ".*_cache", ".hypothesis")
OPTIONS = ["-q", "-p", "no:cacheprovider", "-m", "not evidence"]
RECORDING_LIMIT_S = 900.0
"""A test file that runs longer is of no use here."""

CPU_FACTOR, CPU_SLACK_S = 4.0, 20.0
"""Tests whose CPU time is this many times that without the fault, plus this much, hang, and so catch the fault."""

WAITING_FACTOR, WAITING_SLACK_S = 20.0, 180.0
"""Likewise for all of their time: they may wait for each other, and the machine may be busy."""

PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """End this process when its parent ends, however that ends (on Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Tree:
    """One copy of the tree."""

    def __init__(self, root: Path, directory: str) -> None:
        self.path = Path(tempfile.mkdtemp(dir=directory)).resolve()
        shutil.copytree(root, self.path, ignore=IGNORED, dirs_exist_ok=True)
        # Child processes of tests record functions, too: Python imports `sitecustomize` when it starts.
        hook = self.path / "build" / "trace"
        hook.mkdir(parents=True)
        shutil.copy(trace.__file__, hook / "sitecustomize.py")
        with (hook / "sitecustomize.py").open("a") as file:
            file.write("\n\nstart()\n")

    def record(self, test_file: str) -> Record:
        """Run `test_file` and record what it executes; a file that takes too long or has errors gives no tests."""
        log, saved = self.path / "build" / "calls.tsv", self.path / "build" / "record.json"
        log.write_text("")
        saved.unlink(missing_ok=True)

        def run() -> int:
            os.environ |= {trace.TREE: str(self.path), trace.LOG: str(log)}
            os.environ["PYTHONPATH"] = f"{self.path}/build/trace:{self.path}"
            recorder = Recorder()
            trace.enter("")
            trace.start()
            status = pytest.main([*OPTIONS, test_file], plugins=[recorder])
            recorder.complete(log).save(saved)
            return status

        status = self._fork(run, RECORDING_LIMIT_S)
        if status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
            return Record.load(saved)
        return Record(failed=[f"{test_file}: {(self.path / 'build' / 'pytest.log').read_text()[-500:]}"])

    def outcome(self, fault: Fault, tests: list[str], usual_s: float) -> str:
        """`caught`, `survived` or `timed out`: insert `fault`, run `tests`, restore the file."""
        path = self.path / fault.file
        text = path.read_text()
        path.write_text(fault.apply(text))

        def run() -> int:
            cpu_s = math.ceil(time.process_time() + CPU_FACTOR * usual_s + CPU_SLACK_S)
            resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 5))
            return pytest.main(["-x", *OPTIONS, *tests])

        try:
            status = self._fork(run, WAITING_FACTOR * usual_s + WAITING_SLACK_S)
        finally:
            path.write_text(text)
        if status in (None, -signal.SIGXCPU):
            return "timed out"
        return "caught" if status else "survived"

    def _fork(self, run: Callable[[], int], limit_s: float) -> int | None:
        """Exit status of `run` in a fork that works in the tree; None, after ending all it started, if it hangs."""

        def work() -> None:
            os.setsid()
            end_with_parent()
            with (self.path / "build" / "pytest.log").open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            os.chdir(self.path)
            sys.path.insert(0, str(self.path))
            for name in [name for name in sys.modules if name.split(".")[0] == "benchmarks"]:
                del sys.modules[name]  # tests import their own from the copy
            # A cached module is identified by its time and size, which a fault may keep.
            sys.dont_write_bytecode = True
            os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(self.path), "OMP_NUM_THREADS": "1"}
            sys.exit(run())

        process = multiprocessing.get_context("fork").Process(target=work)
        process.start()
        process.join(limit_s)
        status = process.exitcode
        assert process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # including programs that tests left behind
        process.join()
        return status
