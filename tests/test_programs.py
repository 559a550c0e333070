"""Programs that tests run in their own process: what they return, and that they leave no trace in it."""

import logging
import os
import random
import resource
import signal
import sys

import numpy as np
import torch

from embodied.runtime.console import log_to, setup_console
from embodied.training.compute import prepare
from tests.programs import ROOT, restored_process, run_program


def state() -> dict[str, object]:
    """Global state of this process that programs change."""
    logger = logging.getLogger("embodied")
    return {
        "threads": (torch.get_num_threads(), torch.get_default_dtype(), torch.backends.cudnn.allow_tf32),
        "random": (torch.rand(1).item(), np.random.rand(), random.random()),
        "limit": resource.getrlimit(resource.RLIMIT_DATA),
        "logging": (list(logger.handlers), logger.level, logger.propagate),
        "signal": signal.getsignal(signal.SIGTERM),
        "process": (os.getcwd(), dict(os.environ), list(sys.argv), sys.stdin, sys.stdout, sys.stderr),
    }


def seed() -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)


def test_what_a_program_sets_for_its_process_is_restored(tmp_path):
    seed()
    before = state()
    seed()
    with restored_process():
        setup_console()
        log_to(tmp_path)
        prepare("cpu", threads=3)
        torch.set_default_dtype(torch.float64)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.chdir(tmp_path)
        os.environ["NEW"] = "1"
        sys.argv = ["train.py"]
        assert not any(value == before[name] for name, value in state().items())
    assert state() == before


def test_a_program_returns_its_status_and_both_streams_and_leaves_no_trace():
    seed()
    before = state()
    seed()
    wrong = run_program("train.py", "task=nope")
    assert (wrong.returncode, wrong.stdout) == (1, "")
    assert wrong.stderr.startswith("error: unknown task 'nope'; expected one of ")
    printed = run_program("train.py", "task=quadrotor_hover", "--cfg", "job", cwd=ROOT / "tests")
    assert (printed.returncode, printed.stderr) == (0, "")
    assert "name: quadrotor_hover" in printed.stdout
    assert state() == before
