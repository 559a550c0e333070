"""What a run writes while it goes on: metrics for programs and dashboards, lines for people."""

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

from embodied.extras import needs_extra

METRICS = "metrics.jsonl"
LOG = "run.log"
PACKAGES = ("embodied", "policies", "sims", "real_robot")


class Logger:
    """Writes metrics to `metrics.jsonl` and TensorBoard in `directory`, and to Weights & Biases if a project is named.

    A resumed run passes how many `rows` its checkpoint knew: what was logged after it is dropped, so that curves join.

    Raises:
        UserError: where Weights & Biases is asked for and not installed.
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
        kept = read_metrics(directory)[:rows]
        shutil.rmtree(directory / "tensorboard", ignore_errors=True)
        self._tensorboard = SummaryWriter(str(directory / "tensorboard"))
        self._file = (directory / METRICS).open("w")
        self.rows = 0
        for row in kept:
            self._write(row)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write `metrics`, such as {"rollout/success": 0.5}, at `step` of environment or gradient steps."""
        values = {name: float(value) for name, value in metrics.items()}
        self._write({"step": step, "time": time.time(), **values})
        if self._wandb is not None:
            self._wandb.log({"step": step, **values})

    def _write(self, row: dict[str, float]) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        self.rows += 1
        for name, value in row.items():
            if name not in ("step", "time"):
                self._tensorboard.add_scalar(name, value, int(row["step"]), row["time"])

    def close(self) -> None:
        """Finish all files."""
        self._file.close()
        self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()

    def __enter__(self) -> Self:
        """Use as a context manager."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Finish all files."""
        self.close()


def read_metrics(directory: str | Path) -> list[dict[str, float]]:
    """Rows of `metrics.jsonl` in `directory`, oldest first; a last line cut short by a kill is left out."""
    path = Path(directory) / METRICS
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def setup_console() -> None:
    """Show the run's messages (`logging.getLogger("embodied")` and its siblings) above progress bars, and only there.

    Warnings and errors go to stderr, the rest to stdout.
    """
    for package in PACKAGES:
        logger = logging.getLogger(package)
        for handler in logger.handlers[:]:
            logger.removeHandler(handler)
            handler.close()
        logger.setLevel(logging.INFO)
        logger.propagate = False
    _add(_Console())


def log_to(directory: Path) -> None:
    """Write the messages to come into run.log in `directory`, too: with the traceback of what fails.

    The console then says where that is, until the next `setup_console`.
    """
    handler = logging.FileHandler(directory / LOG, delay=True, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    _add(handler)


def run_log() -> str | None:
    """Where `log_to` writes now."""
    handlers = logging.getLogger(PACKAGES[0]).handlers
    return next((each.baseFilename for each in handlers if isinstance(each, logging.FileHandler)), None)


def _add(handler: logging.Handler) -> None:
    for package in PACKAGES:
        logging.getLogger(package).addHandler(handler)


class _Console(logging.Handler):
    """Writes messages so that they do not tear progress bars, and a traceback only where no file takes it."""

    def emit(self, record: logging.LogRecord) -> None:
        path = run_log() if record.exc_info else None
        text = f"{record.getMessage()}; the traceback is in {path}" if path else self.format(record)
        tqdm.write(text, file=sys.stderr if record.levelno >= logging.WARNING else sys.stdout)


def _start_wandb(directory: Path, config: Mapping[str, Any] | None, project: str) -> Any:  # noqa: ANN401 - optional
    with needs_extra("wandb"):
        import wandb  # pyright: ignore[reportMissingImports] - an extra
    directory.mkdir(parents=True, exist_ok=True)
    return wandb.init(project=project, dir=directory, id=directory.name, resume="allow", config=dict(config or {}))
