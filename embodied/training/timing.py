"""Wall and CPU time of a run by phase."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class PhaseTimer:
    """Wall `seconds` and `cpu` seconds of this process (all threads) per phase.

    An inner phase does not count for the outer one, so that phases add up to the total.
    """

    def __init__(self, seconds: dict[str, float] | None = None, cpu: dict[str, float] | None = None) -> None:
        self.seconds = dict(seconds or {})
        self.cpu = dict(cpu or {})
        self._inner = self._inner_cpu = 0.0

    def add(self, phase: str, seconds: float, cpu: float = 0.0) -> None:
        """Add `seconds` and `cpu` seconds that were timed separately, and subtract them from the running phase."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds
        self._inner += seconds
        if cpu:
            self.cpu[phase] = self.cpu.get(phase, 0.0) + cpu
            self._inner_cpu += cpu

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time the body of a `with` statement, also when it raises."""
        outer = self._inner
        self._inner = 0.0
        outer_cpu = self._inner_cpu
        self._inner_cpu = 0.0
        started = time.perf_counter()
        began = time.process_time()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - started
            spent = time.process_time() - began
            # own time = elapsed time - time of inner phases
            own = elapsed - self._inner
            self._inner = outer
            own_cpu = spent - self._inner_cpu
            self._inner_cpu = outer_cpu
            self.add(phase, own, own_cpu)
            self._inner += elapsed - own
            self._inner_cpu += spent - own_cpu
