"""Files that are either complete or not there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path


@contextmanager
def complete_or_absent(path: Path) -> Iterator[Path]:
    """Give the body a temporary path to write: it becomes `path` once on the disk, and goes where the body fails."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with named(path):
            yield temporary
            flush(temporary)
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Have an OSError of the body say that it is about `path`: writing to a full disk, alone, says no name."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:  # without a number, Python tells nothing but the name any more
            error.filename = error.filename or str(path)
        raise


def flush(path: Path) -> None:
    """Wait until the file or directory `path` is on the disk, so that a rename after it never shows less than all."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def set_aside(path: Path) -> Path:
    """Rename the file or directory `path` to a free name, PATH.aside or one with a number; returns that."""
    for number in count(1):
        aside = path.with_name(f"{path.name}.aside" + (f"_{number}" if number > 1 else ""))
        if not aside.exists():
            return path.rename(aside)
    raise AssertionError
