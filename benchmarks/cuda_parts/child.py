"""Process of one part of the CUDA check, which `benchmarks/cuda.py` starts: child.py MODULE DEVICE END FOLDER."""

from __future__ import annotations

import faulthandler
import importlib
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)  # instead of this folder

from benchmarks.cuda_parts.record import RECORD, Options, Record  # noqa: E402
from embodied.training.compute import prepare  # noqa: E402

HANG_S = 1.0
"""Time before the part's end at which its stacks are printed, to locate a hang."""


def main(module: str, device: str, end: str, folder: str) -> None:
    """Run the part until the time `end` (s since the epoch), and write its record into `folder`."""
    seconds = float(end) - time.time()  # imports have used some of its time
    faulthandler.dump_traceback_later(max(0.1, seconds - HANG_S))
    prepare(device, 1 if device == "cpu" else None)
    options = Options(device, seconds, Path(folder))
    importlib.import_module(module).run(Record(options.folder / RECORD), options)


if __name__ == "__main__":
    main(*sys.argv[1:])
