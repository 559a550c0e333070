"""A fixed rate with absolute deadlines, and one period of control: read, decide, check, command."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from real_robot.robot import Array, Clock, Reading, Robot
from real_robot.safety import Safety, Verdict


class Executor(Protocol):
    """Turns measurements into one action for now; see `chunk_executor.ChunkExecutor`."""

    def reset(self) -> None:
        """Begin an episode."""
        ...

    def observe(self, reading: Reading) -> None:
        """Offer the newest measurement."""
        ...

    def action(self, now_s: float) -> Array | None:
        """The action [A] for now; None: nothing valid."""
        ...


class Controller:
    """One period of control of `robot`: every program that moves a robot calls `tick` once per period."""

    def __init__(self, robot: Robot, executor: Executor, safety: Safety, clock: Clock) -> None:
        self._robot, self._executor, self._safety, self._clock = robot, executor, safety, clock

    def tick(self) -> Verdict:
        """Read, offer the measurement to the executor, and let safety write its action or hold."""
        reading = self._robot.read()
        if reading is not None:
            self._executor.observe(reading)
        return self._safety.command(self._executor.action(self._clock()), reading)


@dataclass(frozen=True)
class Timing:
    """How well a loop kept its rate: `late_s` is how long after its deadline a period began, `work_s` how long it ran.

    `overruns` periods took longer than the period; `missed` deadlines were skipped because of them.
    """

    periods: int
    missed: int
    overruns: int
    late_s: dict[str, float]
    work_s: dict[str, float]


class ControlLoop:
    """Runs a step at `period_s`, at deadlines counted from the first: lateness never adds up.

    A deadline that has passed is skipped, never made up for by a burst. The last `spin_s` before a deadline are spent
    spinning, which wakes up sooner than sleeping.
    """

    def __init__(
        self,
        period_s: float,
        clock: Clock = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        spin_s: float = 0.0,
    ) -> None:
        if not period_s > 0 or spin_s < 0:
            raise ValueError(f"expected period_s > 0 and spin_s >= 0, got {period_s} and {spin_s}")
        self.period_s, self._clock, self._sleep, self._spin_s = period_s, clock, sleep, spin_s
        self._stopped = False

    def stop(self) -> None:
        """End `run` after the present period; from any thread."""
        self._stopped = True

    def run(self, step: Callable[[], object], periods: int) -> Timing:
        """Call `step` for `periods` deadlines, skipped ones included, or until `stop`."""
        self._stopped = False
        late, work, missed = [], [], 0
        first, index = self._clock(), 0
        while index < periods and not self._stopped:
            deadline = first + index * self.period_s
            self._wait(deadline)
            began = self._clock()
            step()
            ended = self._clock()
            late.append(began - deadline)
            work.append(ended - began)
            following = max(index + 1, int(np.ceil((ended - first) / self.period_s)))
            missed += min(following, periods) - index - 1
            index = following
        overruns = sum(duration > self.period_s for duration in work)
        return Timing(len(work), missed, overruns, _quantiles(late), _quantiles(work))

    def _wait(self, deadline: float) -> None:
        remaining = deadline - self._clock() - self._spin_s
        if remaining > 0:
            self._sleep(remaining)
        while self._clock() < deadline:
            pass


def _quantiles(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    array = np.array(values)
    return {"p50": float(np.quantile(array, 0.5)), "p99": float(np.quantile(array, 0.99)), "max": float(array.max())}


class Watchdog:
    """Calls `Safety.watch` from a thread of its own: the robot holds while the control loop's program hangs."""

    def __init__(self, safety: Safety, every_s: float) -> None:
        self._safety, self._every_s, self._closed = safety, every_s, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closed.wait(self._every_s):
            self._safety.watch()

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        self._thread.join()
