"""Wall time of a run by phase."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class PhaseTimer:
    """Wall seconds per phase; an inner phase does not count for the outer one, so that phases add up to the total."""

    def __init__(self, seconds: dict[str, float] | None = None) -> None:
        self.seconds = dict(seconds or {})
        self._inner = 0.0

    def add(self, phase: str, seconds: float) -> None:
        """Add `seconds` measured elsewhere, and subtract them from the running phase, if any."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds
        self._inner += seconds

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time the body of a `with` statement, also when it raises."""
        outer, self._inner = self._inner, 0.0
        started = time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - started
            own, self._inner = elapsed - self._inner, outer
            self.add(phase, own)
            self._inner += elapsed - own
