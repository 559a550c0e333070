"""Fixtures of all tests: no time limits, one thread of torch, no figures on a screen, a cache of their own."""

import atexit
import gc
import os
import shutil
import sys
import tempfile

os.environ.setdefault("MPLBACKEND", "Agg")
if "EMBODIED_CACHE" not in os.environ:  # the processes of a parallel run share the folder of the first
    os.environ["EMBODIED_CACHE"] = tempfile.mkdtemp(prefix="embodied-tests-")
    atexit.register(shutil.rmtree, os.environ["EMBODIED_CACHE"], ignore_errors=True)

import hypothesis
import torch

hypothesis.settings.register_profile("house", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("house")
torch.set_num_threads(1)

_frozen_modules = 0


def pytest_runtest_setup() -> None:
    """Freeze what imports have made: simulators ask for a garbage collection at each close, which then skips it."""
    global _frozen_modules
    if len(sys.modules) != _frozen_modules:
        gc.collect()
        gc.freeze()
        _frozen_modules = len(sys.modules)
