"""Stopping a run from outside without losing work."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_STDERR = 2


class Stopped(Exception):  # noqa: N818 - not an error
    """The run was asked to stop and has saved; the message says how to continue."""


class Abandoned(BaseException):
    """Raised inside `GracefulStop.abandonable` by the first signal; no `except Exception` on the way holds it up."""


class GracefulStop:
    """While entered, Ctrl-C and SIGTERM set `requested` and tell what happens now; a second one ends it at once.

    A loop looks at `requested` where it can save and leave. What runs long between two looks, and can be repeated from
    its beginning, runs inside `abandonable`. Outside the main thread, where Python lets nobody handle signals, none of
    this changes anything.
    """

    def __init__(self, message: str = "Stopping") -> None:
        self.message, self.requested = message, False
        self._abandon = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        """Take over the two signals."""
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Give them back."""
        self._restore()

    @contextmanager
    def abandonable(self) -> Iterator[None]:
        """Raise Abandoned out of the body, wherever it is, once a stop is requested: what it did is half done."""
        self._abandon = True
        try:
            self._check()
            yield
            self._check()  # something may have caught it: a callback, a finaliser
        finally:
            self._abandon = False

    def _check(self) -> None:
        if self.requested:
            raise Abandoned

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self._restore()
        with suppress(OSError):  # nobody reads it
            below = "\n" if os.isatty(_STDERR) else ""  # a progress bar
            line = f"{below}{self.message}; again to quit at once\n"
            os.write(_STDERR, line.encode())  # a buffered stream may be in the middle of a write
        if self._abandon:
            raise Abandoned

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
