"""Files and folders that are either complete or absent."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from embodied.errors import UserError

PASSING = {errno.ESTALE, errno.EIO, errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.ETIMEDOUT, errno.EREMOTEIO}
"""Errors of network file systems that a second attempt may not meet."""
PAUSES_S = 0.1, 0.5, 2.0, 5.0
"""Pauses between attempts, s."""


@contextmanager
def complete_or_absent(path: Path) -> Iterator[Path]:
    """Context with a temporary path to write, which is then synced and renamed to `path`, or deleted on an error."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with named(path):
            yield temporary
            flush(temporary)
            rename(temporary, path)
            flush(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def complete_or_absent_folder(path: Path) -> Iterator[Path]:
    """Context with a temporary folder to fill, which is then renamed to `path`, or deleted on an error.

    Raises:
        UserError: if `path` exists.
    """
    if path.exists():
        raise UserError(f"{path} exists; choose another output")
    temporary = path.with_name(f".{path.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # left by a killed process
    try:
        make_folder(temporary)
        yield temporary
        flush(temporary)
        rename(temporary, path)
        flush(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def rename(source: Path, target: Path) -> None:
    """Rename `source` to `target`; retry temporary errors of network file systems.

    Raises:
        OSError: for other errors, and after all `PAUSES_S`.
    """
    for pause_s in (*PAUSES_S, None):
        try:
            with named(target):
                os.replace(source, target)
            return
        except OSError as error:
            if pause_s is None or error.errno not in PASSING:
                raise
            time.sleep(pause_s)


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Context that adds the name `path` to an OSError of the body, which has none if the disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:  # without errno, Python would only print the file name
            error.filename = error.filename or str(path)
        raise


def make_folder(path: Path) -> None:
    """Create the folder `path` unless it exists.

    Raises:
        UserError: where no folder can be created, such as in /proc.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileNotFoundError as error:
        raise UserError(f"no folder can be made at {path}; choose another output") from error


def flush(path: Path) -> None:
    """Sync the file or directory `path` to the disk, so that a later rename never exposes incomplete content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def set_aside(path: Path) -> Path:
    """Rename the file or directory `path` to a free name, PATH.aside or PATH.aside with a number, and return it."""
    for number in count(1):
        aside = path.with_name(f"{path.name}.aside" + (f"_{number}" if number > 1 else ""))
        if not aside.exists():
            return path.rename(aside)
    raise AssertionError
