"""Standard output and standard error that nobody need read: a run goes on when a reader or terminal is gone."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO


def prepare_streams() -> None:
    """Make both streams exist, and accept any character: what their encoding lacks is written as an escape."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by whoever started the program
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - lives as long as the program
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def unread(stream: TextIO) -> Iterator[None]:
    """Where the body cannot write to `stream`, as its pipe or terminal is closed, drop this and all later output."""
    try:
        yield
    except OSError:
        _drop(stream)


def flush_streams() -> None:
    """Write what is buffered; Python would end with an error where the reader is gone."""
    for stream in (sys.stdout, sys.stderr):
        with unread(stream):
            stream.flush()


def _drop(stream: TextIO) -> None:
    """Connect the file of `stream` to nothing."""
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, stream.fileno())
    except OSError:  # a stream of a test or notebook, without a file
        pass
    finally:
        os.close(null)
