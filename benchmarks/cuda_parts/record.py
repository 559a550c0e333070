"""Record of one part of the CUDA check, written to disk line by line, so that it survives a kill of the part."""

from __future__ import annotations

import json
import math
import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embodied.errors import UserError

RECORD = "record.jsonl"
"""Name of the record's file in the part's folder."""
KINDS = ("figures", "agreement", "failures", "skipped")


@dataclass(frozen=True)
class Options:
    """Options of a part.

    Args:
        device: "cuda" or "cpu".
        seconds: time of the part, s; it is ended afterwards.
        folder: an empty folder for files of the part.
    """

    device: str
    seconds: float
    folder: Path

    @property
    def tiny(self) -> bool:
        """Whether sizes are minimal, as for a CPU: the code paths are tested, but the figures are meaningless."""
        return self.device == "cpu"

    def size(self, full: Any, tiny: Any) -> Any:  # noqa: ANN401 - whatever is sized
        """Return `full` on a GPU, `tiny` on a CPU."""
        return tiny if self.tiny else full


class Record:
    """Appends the results of a part to the file `path`, one JSON object per line.

    Every entry has a name, unique within the part and its kind: figures (numbers or lists and dicts of them), agreement
    with the CPU, failures (tracebacks) and skipped rows (reasons). `read` merges them.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def figure(self, name: str, value: Any) -> None:  # noqa: ANN401 - JSON
        """Record a measured value; its name contains the unit, such as "chunk_ms" or "steps_per_s"."""
        self._write("figures", name, value)

    def agree(self, name: str, expected: Tensor, measured: Tensor, tolerance: float) -> None:
        """Compare `measured` on the device with `expected` on the CPU: relative to the largest absolute value or 1."""
        expected, measured = (each.detach().cpu().double() for each in (expected, measured))
        scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
        error = float((expected - measured).abs().max()) / scale if expected.numel() else 0.0
        self.check(name, error, tolerance)

    def check(self, name: str, error: float, tolerance: float) -> None:
        """Record an agreement with an `error` that was computed elsewhere; a NaN does not agree."""
        agrees = error <= tolerance
        json_error = error if math.isfinite(error) else str(error)  # JSON has no NaN
        self._write("agreement", name, {"error": json_error, "tolerance": tolerance, "agrees": agrees})

    def skip(self, name: str, reason: str) -> None:
        """Record a row that cannot run here."""
        self._write("skipped", name, reason)

    @contextmanager
    def row(self, name: str) -> Iterator[None]:
        """Context of one row's code: a failure is recorded, and the other rows continue.

        A missing optional package (`UserError` of `needs_extra`, ImportError) skips the row with its reason.
        """
        try:
            yield
        except ImportError as error:
            self.skip(name, f"{type(error).__name__}: {error}")
        except UserError as error:
            if isinstance(error.__cause__, ImportError):
                self.skip(name, str(error))
            else:
                self._fail(name)
        except Exception:
            self._fail(name)

    def _fail(self, name: str) -> None:
        self._write("failures", name, traceback.format_exc())

    def _write(self, kind: str, name: str, value: Any) -> None:  # noqa: ANN401 - JSON
        assert kind in KINDS, kind
        self._file.write(json.dumps({"kind": kind, "name": name, "value": value}) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Entries of the file by kind and name; a line that was cut off by a kill is ignored."""
    entries: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        entries[entry["kind"]][entry["name"]] = entry["value"]
    return entries


def wait(device: str) -> None:
    """Wait until `device` has finished all its work."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def seconds_per_call(function: Callable[[], object], device: str, *, seconds: float, warm_up: int = 1) -> float:
    """Mean seconds of a call of `function`, repeated for about `seconds` after `warm_up` calls."""
    for _ in range(warm_up):
        function()
    wait(device)
    calls, start_s = 0, time.perf_counter()
    while time.perf_counter() - start_s < seconds:
        function()
        wait(device)
        calls += 1
    return (time.perf_counter() - start_s) / calls
