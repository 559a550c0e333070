"""Standard output and standard error without a reader: a run continues when its pipe or terminal is gone."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO


def prepare_streams() -> None:
    """Make both streams exist, and accept any character: those that their encoding lacks are escaped."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the parent process
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - lives as long as the program
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def unread(stream: TextIO) -> Iterator[None]:
    """Context that drops this and all later output if `stream` cannot be written, as its pipe or terminal is closed."""
    try:
        yield
    except OSError:
        _drop(stream)


def flush_streams() -> None:
    """Write buffered output; Python would end with an error where the reader is gone."""
    for stream in (sys.stdout, sys.stderr):
        with unread(stream):
            stream.flush()


def _drop(stream: TextIO) -> None:
    """Connect the file of `stream` to /dev/null."""
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, stream.fileno())
    except OSError:  # a stream of a test or notebook, without a file
        pass
    finally:
        os.close(null)
