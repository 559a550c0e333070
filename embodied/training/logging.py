"""Output of a running training: metrics for programs and dashboards, messages for people."""

from __future__ import annotations

import json
import logging
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

from embodied.command_line.extras import needs_extra
from embodied.command_line.streams import prepare_streams, unread
from embodied.saving.files import complete_or_absent, named, set_aside
from embodied.saving.json_text import loads

log = logging.getLogger(__name__)
METRICS = "metrics.jsonl"
LOG = "run.log"
PACKAGES = ("embodied", "policies", "sims", "real_robot")


class Logger:
    """Writes metrics to `metrics.jsonl` and TensorBoard in `directory`, and to Weights & Biases if a project is named.

    A resumed run passes the number of `rows` at its checkpoint: later rows are dropped, so that curves are continuous.
    If not all of them can be read, the file is renamed and curves have a gap.

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
        kept = _kept(directory, rows)
        shutil.rmtree(directory / "tensorboard", ignore_errors=True)
        self._tensorboard = SummaryWriter(str(directory / "tensorboard"))
        path, self.rows = directory / METRICS, len(kept)
        with complete_or_absent(path) as temporary:
            temporary.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        self._file = path.open("a", encoding="utf-8")
        for row in kept:
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
    """Writes nothing, in a process whose metrics another one writes."""

    def __init__(self) -> None:
        self.rows = 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def read_metrics(directory: str | Path) -> list[dict[str, float]]:
    """Rows of `metrics.jsonl` in `directory`, oldest first; invalid lines, such as truncated ones, are skipped."""
    return [row for row in _rows(Path(directory) / METRICS) if row]


def _rows(path: Path) -> list[dict[str, float] | None]:
    """One row per line of `path`; None for invalid lines."""
    lines = path.read_text(errors="replace", encoding="utf-8").splitlines() if path.exists() else []
    return [_row(line) for line in lines]


def _row(line: str) -> dict[str, float] | None:
    try:
        row = loads(line)
    except ValueError:
        return None
    numbers = isinstance(row, dict) and all(isinstance(value, int | float) for value in row.values())
    return row if numbers and {"step", "time"} <= row.keys() else None


def _kept(directory: Path, rows: int) -> list[dict[str, float]]:
    """The first `rows` rows of `metrics.jsonl`; if not all can be read, the file is renamed."""
    path = directory / METRICS
    kept = [row for row in _rows(path)[:rows] if row]
    if len(kept) < rows:
        where = f"renamed to {set_aside(path)}" if path.exists() else "missing"
        log.warning(f"{path} is {where}: {len(kept)} of {rows} rows could be read, curves have a gap")
    return kept


def setup_console() -> None:
    """Print the messages of loggers (`logging.getLogger("embodied")` and others) above progress bars, and only there.

    Warnings and errors go to stderr, the rest to stdout. Where their reader is gone, the program goes on.
    """
    close_log()
    prepare_streams()
    for package in PACKAGES:
        logger = logging.getLogger(package)
        logger.handlers = [_Console()]
        logger.setLevel(logging.INFO)
        logger.propagate = False


def only_errors() -> None:
    """Print no more messages than errors, and no progress: another process tells them."""
    for package in PACKAGES:
        logging.getLogger(package).setLevel(logging.ERROR)


def log_to(directory: Path) -> None:
    """Also write later messages to run.log in `directory`, with tracebacks.

    The console then names this file in place of tracebacks.
    """
    close_log()
    handler = _File(directory / LOG, delay=True, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for package in PACKAGES:
        logging.getLogger(package).addHandler(handler)


def run_log() -> str | None:
    """The file that `log_to` writes, or None."""
    return next((handler.baseFilename for handler in _files()), None)


def close_log() -> None:
    """Close the file of `log_to`."""
    for handler in _files():
        for package in PACKAGES:
            logging.getLogger(package).removeHandler(handler)
        handler.close()


def _files() -> list[logging.FileHandler]:
    return [each for each in logging.getLogger(PACKAGES[0]).handlers if isinstance(each, logging.FileHandler)]


class _File(logging.FileHandler):
    """A log file that ignores write errors (full disk): the console also shows every message."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        pass


class _Console(logging.Handler):
    """Writes messages without breaking progress bars; tracebacks only if there is no log file."""

    def emit(self, record: logging.LogRecord) -> None:
        path = run_log() if record.exc_info else None
        text = f"{record.getMessage()}; the traceback is in {path}" if path else self.format(record)
        stream = sys.stderr if record.levelno >= logging.WARNING else sys.stdout
        with unread(stream):
            tqdm.write(text, file=stream)
            stream.flush()


def _start_wandb(directory: Path, config: Mapping[str, Any] | None, project: str) -> Any:  # noqa: ANN401 - optional
    with needs_extra("wandb"):
        import wandb  # pyright: ignore[reportMissingImports] - an extra
    directory.mkdir(parents=True, exist_ok=True)
    return wandb.init(project=project, dir=directory, id=directory.name, resume="allow", config=dict(config or {}))
