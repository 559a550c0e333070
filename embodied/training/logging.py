"""Output of a running training: metrics for programs and dashboards, messages for people."""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from embodied.extras import needs_extra
from embodied.saving.files import complete_or_absent, named, set_aside
from embodied.saving.metrics import METRICS, read_rows

log = logging.getLogger(__name__)


class Logger:
    """Writer of metrics to `metrics.jsonl`, TensorBoard, and Weights & Biases if it has a project.

    The files are in `directory`. A resumed run passes the number of `rows` at its checkpoint: later rows are dropped,
    so that curves are continuous. If not all of them can be read, the file is renamed and curves have a gap.

    Raises:
        UserError: if Weights & Biases is requested but not installed.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        config: Mapping[str, Any] | None = None,
        wandb_project: str | None = None,
        rows: int = 0,
    ) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        directory = Path(directory)
        self._wandb = _start_wandb(directory, config, wandb_project) if wandb_project else None
        directory.mkdir(parents=True, exist_ok=True)
        earlier_rows = _rows_until(directory, rows)
        shutil.rmtree(directory / "tensorboard", ignore_errors=True)
        self._tensorboard = SummaryWriter(str(directory / "tensorboard"))
        path = directory / METRICS
        self.rows = len(earlier_rows)
        with complete_or_absent(path) as temporary:
            temporary.write_text("".join(json.dumps(row) + "\n" for row in earlier_rows), encoding="utf-8")
        self._file = path.open("a", encoding="utf-8")
        for row in earlier_rows:
            self._draw(row)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write `metrics`, such as {"rollout/success": 0.5}, at `step` of environment or gradient steps."""
        values = {name: float(value) for name, value in metrics.items()}
        self._write({"step": step, "time": time.time(), **values})
        if self._wandb is not None:
            self._wandb.log({"step": step, **values})

    def _write(self, row: dict[str, float]) -> None:
        with named(Path(self._file.name)):
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
        self.rows += 1
        self._draw(row)

    def _draw(self, row: dict[str, float]) -> None:
        for name, value in row.items():
            if name not in ("step", "time"):
                self._tensorboard.add_scalar(name, value, int(row["step"]), row["time"])

    def close(self) -> None:
        """Close all files."""
        self._file.close()
        self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()

    def __enter__(self) -> Self:
        """Use as a context manager."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close all files."""
        self.close()


class NoLogger(Logger):
    """Logger that writes nothing, in a process whose metrics another one writes."""

    def __init__(self) -> None:
        self.rows = 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """No-op."""

    def close(self) -> None:
        """No-op."""


def _rows_until(directory: Path, rows: int) -> list[dict[str, float]]:
    """Read the first `rows` rows of `metrics.jsonl`; if not all can be read, the file is renamed."""
    path = directory / METRICS
    readable = [row for row in read_rows(path)[:rows] if row]
    if len(readable) < rows:
        status = f"renamed to {set_aside(path)}" if path.exists() else "missing"
        log.warning(f"{path} is {status}: {len(readable)} of {rows} rows could be read, curves have a gap")
    return readable


def _start_wandb(directory: Path, config: Mapping[str, Any] | None, project: str) -> Any:  # noqa: ANN401 - optional
    with needs_extra("wandb"):
        import wandb  # pyright: ignore[reportMissingImports] - an extra
    directory.mkdir(parents=True, exist_ok=True)
    return wandb.init(project=project, dir=directory, id=directory.name, resume="allow", config=dict(config or {}))
