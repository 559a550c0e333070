"""Progress: a bar on a terminal, occasional lines if the output is a file."""

from __future__ import annotations

import logging
import sys
import time
from types import TracebackType
from typing import Self

from tqdm import tqdm

from embodied.runtime.streams import unread

log = logging.getLogger(__name__)
PERIOD_S = 60.0
"""Seconds between two lines of one Progress in a log."""


class Progress:
    """Counter to `total` of `unit` from `initial`; `visible=False` counts silently, as where messages are turned off.

    On a terminal (stderr) it is a bar, elsewhere a message every `PERIOD_S`.
    """

    def __init__(self, label: str, total: int, unit: str, *, initial: int = 0, visible: bool = True) -> None:
        visible = visible and log.isEnabledFor(logging.WARNING)
        self.label = label
        self.total = total
        self.unit = unit
        self.done = initial
        self.visible = visible
        # disable=None: no bar unless stderr is a terminal
        self._bar = tqdm(
            total=total,
            initial=initial,
            desc=label,
            unit=unit,
            unit_scale=total >= 10_000,
            smoothing=0.05,
            disable=None if visible else True,
        )
        self._first = initial
        self._began_s = time.monotonic()
        self._last_log_s = self._began_s

    def update(self, more: int = 1, note: str = "") -> None:
        """Advance by `more`; `note` is shown next to the bar."""
        self.done += more
        if note:
            self._bar.set_postfix_str(note, refresh=False)
        with unread(sys.stderr):
            self._bar.update(more)
        if self._bar.disable and self.visible and time.monotonic() - self._last_log_s >= PERIOD_S:
            self._last_log_s = time.monotonic()
            rest_s = (self._last_log_s - self._began_s) * (self.total - self.done) / max(1, self.done - self._first)
            parts = [f"{self.label}: {self.done:,} of {self.total:,} {self.unit}s", *([note] if note else [])]
            log.info(", ".join([*parts, f"about {max(1, round(rest_s / 60.0))} min left"]))

    def __enter__(self) -> Self:
        """Use as a context manager."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the bar, which stays visible."""
        with unread(sys.stderr):
            self._bar.close()
