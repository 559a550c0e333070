"""Where the wall time of a run goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class PhaseTimer:
    """Wall seconds per named phase; a phase inside another counts for itself alone, so parts add up to the whole."""

    def __init__(self, seconds: dict[str, float] | None = None) -> None:
        self.seconds = dict(seconds or {})
        self._inner = 0.0

    def add(self, phase: str, seconds: float) -> None:
        """Count `seconds` measured elsewhere, inside the phase that is running or outside of any."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds
        self._inner += seconds

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Count the body of a `with` statement, also when it raises."""
        outer, self._inner = self._inner, 0.0
        started = time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - started
            own, self._inner = elapsed - self._inner, outer
            self.add(phase, own)
            self._inner += elapsed - own
