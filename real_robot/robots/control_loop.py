"""A fixed-rate loop with absolute deadlines, and one period of control: read, decide, check, command."""

from __future__ import annotations

import gc
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from real_robot.robots.robot import Array, Clock, Reading, Robot
from real_robot.safety.safety import Safety, Verdict

log = logging.getLogger(__name__)


class Executor(Protocol):
    """Computes the current action from measurements; see `chunk_executor.ChunkExecutor`."""

    def reset(self) -> None:
        """Begin an episode."""
        ...

    def observe(self, reading: Reading) -> None:
        """Pass in the newest measurement."""
        ...

    def action(self, now_s: float) -> Array | None:
        """The action [A] for the time `now_s`, or None without a valid action."""
        ...


Record = Callable[[float, Reading | None, Array | None, Verdict], None]
"""Called with the time of a period, the measurement, the requested action and safety's verdict."""


class Controller:
    """One period of control of `robot`: every program that moves a robot calls `tick` once per period.

    `record`, such as `recorder.Recorder.write`, is called for each period.
    """

    def __init__(
        self, robot: Robot, executor: Executor, safety: Safety, clock: Clock, record: Record | None = None
    ) -> None:
        self._robot = robot
        self._executor = executor
        self._safety = safety
        self._clock = clock
        self._record = record

    def tick(self) -> Verdict:
        """Read, pass the measurement to the executor, and let safety write the action or hold.

        The executor gets the one before in place of a measurement that contradicts it, and none that is invalid, except
        numbers that are not finite, after which executors drop what they were about to do.
        """
        reading = self._robot.read()
        if reading is not None:
            accepted, _ = self._safety.observe(reading)
            if accepted is not None or reading.fault:
                self._executor.observe(accepted or reading)
        now_s = self._clock()
        requested = self._executor.action(now_s)
        verdict = self._safety.command(requested, reading)
        if self._record:
            self._record(now_s, reading, requested, verdict)
        return verdict


@dataclass(frozen=True)
class Timing:
    """Timing of a loop's last periods: p50, p99 and max in s.

    `late_s` is how long after its deadline a period began, `work_s` how long it ran. Over the whole run, `overruns`
    counts periods that took too long and `missed` counts skipped deadlines.
    """

    periods: int
    missed: int
    overruns: int
    late_s: dict[str, float]
    work_s: dict[str, float]


class ControlLoop:
    """Runs a step every `period_s`, at deadlines counted from the first, so that lateness never accumulates.

    Missed deadlines are skipped, not caught up. The last `spin_s` before a deadline are spent in a busy wait, which
    reacts sooner than sleeping. `timing` covers the last `timed_periods` periods.
    """

    def __init__(
        self,
        period_s: float,
        clock: Clock = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        spin_s: float = 0.0,
        timed_periods: int = 1 << 16,
    ) -> None:
        if not period_s > 0 or spin_s < 0 or timed_periods < 1:
            raise ValueError(
                f"expected period_s > 0, spin_s >= 0 and timed_periods >= 1, got {period_s}, {spin_s}, {timed_periods}"
            )
        self.period_s = period_s
        self._clock = clock
        self._sleep = sleep
        self._spin_s = spin_s
        self._late = np.zeros(timed_periods)
        self._work = np.zeros(timed_periods)
        self._periods = self._missed = self._overruns = 0
        self._stopped = False

    def stop(self) -> None:
        """End `run` after the current period; may be called from any thread, or from the step."""
        self._stopped = True

    def run(self, step: Callable[[], object], periods: int | None = None) -> Timing:
        """Call `step` for `periods` deadlines, including skipped ones, or until `stop`; returns `timing`."""
        self._stopped = False
        self._periods = 0
        self._missed = 0
        self._overruns = 0
        last = math.inf if periods is None else periods
        first = self._clock()
        index = 0
        while index < last and not self._stopped:
            # deadlines are multiples of the period from the first one, so that errors do not add up
            deadline = first + index * self.period_s
            self._wait(deadline)
            begin_s = self._clock()
            step()
            end_s = self._clock()
            self._count(begin_s - deadline, end_s - begin_s)
            # up to rounding, a step that ends on a deadline has not missed it
            next_index = max(index + 1, math.ceil((end_s - first) / self.period_s - 1e-6))
            self._missed += int(min(next_index, last)) - index - 1
            index = next_index
        return self.timing()

    def timing(self) -> Timing:
        """Statistics so far; may be called while the loop runs."""
        count = min(self._periods, len(self._late))
        late_s, work_s = (_quantiles(values[:count]) for values in (self._late, self._work))
        return Timing(self._periods, self._missed, self._overruns, late_s, work_s)

    def _count(self, late_s: float, work_s: float) -> None:
        index = self._periods % len(self._late)  # ring buffer
        self._late[index] = late_s
        self._work[index] = work_s
        self._overruns += work_s > self.period_s
        self._periods += 1

    def _wait(self, deadline: float) -> None:
        # sleep until spin_s before the deadline, then spin
        remaining = deadline - self._clock() - self._spin_s
        if remaining > 0:
            self._sleep(remaining)
        while (remaining := deadline - self._clock()) > 0:
            if remaining > self._spin_s:  # woken too early: a simulator's clock can be slowed down
                self._sleep(remaining)


def _quantiles(values: Array) -> dict[str, float]:
    if not len(values):
        return {}
    p50, p99 = np.quantile(values, [0.5, 0.99])
    return {"p50": float(p50), "p99": float(p99), "max": float(values.max())}


class Watchdog:
    """Calls `Safety.watch` from its own thread, so that the robot holds if the control loop's program hangs."""

    def __init__(self, safety: Safety, every_s: float) -> None:
        self._safety = safety
        self._every_s = every_s
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(self._every_s):
            try:
                self._safety.watch()
            except Exception as error:  # safety has stopped the robot; after its reset it is watched again
                log.warning(f"the robot's driver failed while it was stopped: {error}")


def prefer_real_time(priority: int = 50) -> list[str]:
    """Request real-time scheduling; returns one line for each refused request, with the remedy.

    The calling thread runs before ordinary ones (SCHED_FIFO), memory is not paged out, and existing objects are left
    out of garbage collection.
    """
    import ctypes

    refusals = []
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(priority))
    except OSError as error:
        refusals.append(f"real-time scheduling: {error.strerror}; give rtprio {priority} in /etc/security/limits.conf")
    current_and_future = 3  # MCL_CURRENT | MCL_FUTURE
    if ctypes.CDLL(None, use_errno=True).mlockall(current_and_future) != 0:
        message = os.strerror(ctypes.get_errno())
        refusals.append(f"locking memory: {message}; give memlock unlimited in /etc/security/limits.conf")
    gc.collect()
    gc.freeze()
    return refusals
