"""Files that are either complete or not there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def complete_or_absent(path: Path) -> Iterator[Path]:
    """Give the body a temporary path to write: it becomes `path` once on the disk, and goes where the body fails."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        flush(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Wait until the file or directory `path` is on the disk, so that a rename after it never shows less than all."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
