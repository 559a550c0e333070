"""Messages of programs for people: on the console, above progress bars, and in the file run.log."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from tqdm import tqdm

from embodied.runtime.streams import prepare_streams, unread

LOG = "run.log"
PACKAGES = ("embodied", "policies", "sims", "real_robot")


def setup_console() -> None:
    """Print the messages of loggers (`logging.getLogger("embodied")` and others) above progress bars, and only there.

    Warnings and errors go to stderr, the rest to stdout. The program continues if their reader is gone.
    """
    close_log()
    prepare_streams()
    for package in PACKAGES:
        logger = logging.getLogger(package)
        logger.handlers = [_Console()]
        logger.setLevel(logging.INFO)
        logger.propagate = False


def only_errors() -> None:
    """Print only errors, and no progress, because another process prints them."""
    for package in PACKAGES:
        logging.getLogger(package).setLevel(logging.ERROR)


def log_to(directory: Path) -> None:
    """Also write later messages to run.log in `directory`, with tracebacks.

    The console then names this file instead of printing tracebacks.
    """
    close_log()
    handler = _File(directory / LOG, delay=True, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for package in PACKAGES:
        logging.getLogger(package).addHandler(handler)


def run_log() -> str | None:
    """Path of the file that `log_to` writes, or None."""
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
    """Handler of a log file that ignores write errors (full disk): the console also shows every message."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        pass


class _Console(logging.Handler):
    """Handler that prints messages without breaking progress bars; tracebacks only if there is no log file."""

    def emit(self, record: logging.LogRecord) -> None:
        path = run_log() if record.exc_info else None
        text = f"{record.getMessage()}; the traceback is in {path}" if path else self.format(record)
        stream = sys.stderr if record.levelno >= logging.WARNING else sys.stdout
        with unread(stream):
            tqdm.write(text, file=stream)
            stream.flush()
