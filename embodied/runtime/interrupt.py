"""Stops a run on Ctrl-C, SIGTERM or SIGHUP without losing work."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_STDERR = 2
STOPPING = threading.Event()
"""Set while a stop of the run is requested: code that waits should stop waiting."""
_REQUESTED = threading.Event()
"""Set by a signal, also while `waiting_ended` has set STOPPING."""


@contextmanager
def waiting_ended() -> Iterator[None]:
    """Context in which code that waits stops waiting, as where a stop is requested; a signal meanwhile counts."""
    if STOPPING.is_set():
        yield
        return
    STOPPING.set()
    try:
        yield
    finally:
        STOPPING.clear()
        if _REQUESTED.is_set():  # in this order, so that no signal between the two is lost
            STOPPING.set()


class Stopped(Exception):  # noqa: N818 - not an error
    """The run stopped on request and has saved; the message has the command that continues it.

    `number` is the signal's; None: another process of the run received it.
    """

    def __init__(self, message: str, number: int | None = None) -> None:
        super().__init__(message)
        self.status = 128 + (number or signal.SIGTERM)


class Abandoned(BaseException):
    """Exception inside `GracefulStop.abandonable` at the first signal; `except Exception` does not catch it."""


class GracefulStop:
    """While entered, Ctrl-C, SIGTERM and SIGHUP set `requested` and print `message`; a second one ends the program.

    `number` is that of the first signal. SIGHUP, sent when a terminal is closed, is not handled where it is ignored, as
    under nohup. A loop checks `requested` where it can save and leave. Long, repeatable work between two checks runs
    inside `abandonable`. Outside the main thread, where Python cannot handle signals, this has no effect.
    """

    def __init__(self, message: str = "Stopping") -> None:
        self.message = message
        self.requested = False
        self.number: int | None = None
        self._abandon = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        """Install the signal handlers."""
        if threading.current_thread() is threading.main_thread():
            handled = [
                number
                for number in _SIGNALS
                if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
            ]
            self._previous = {number: signal.signal(number, self._handle) for number in handled}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Restore the previous signal handlers."""
        self._restore()
        _REQUESTED.clear()
        STOPPING.clear()

    @contextmanager
    def abandonable(self) -> Iterator[None]:
        """Raise Abandoned inside the body as soon as a stop is requested; its work is then incomplete."""
        self._abandon = True
        try:
            self._check()
            yield
            self._check()  # a callback or finaliser may have caught it
        finally:
            self._abandon = False

    def _check(self) -> None:
        if self.requested:
            raise Abandoned

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self.number = number
        _REQUESTED.set()
        STOPPING.set()
        self._restore()
        with suppress(OSError):  # stderr is closed
            below = "\n" if os.isatty(_STDERR) else ""  # the cursor may be in a progress bar
            line = f"{below}{self.message}; again to quit at once\n"
            os.write(_STDERR, line.encode())  # a buffered stream may be in the middle of a write()
        if self._abandon:
            raise Abandoned

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
