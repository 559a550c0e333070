"""The only caller of a robot's `write`: every command is checked, filtered and written, or the robot holds."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum

import numpy as np

from embodied.contract import Contract
from embodied.errors import UserError
from real_robot.robots.robot import Array, Clock, Reading, Robot
from real_robot.safety.consistency import Consistency
from real_robot.safety.element import Element, observed_element
from real_robot.safety.filters import Filters
from real_robot.safety.inputs import CLOCKS, Command, Inputs
from real_robot.safety.limits import Limits, ObservedRange, load_limits

__all__ = ["Command", "Limits", "Safety", "State", "Verdict", "load_limits"]


SAME = 1e-9
"""Commands that differ by less count as equal."""
MISSING = "no command"
"""Why a robot holds that is not told what to do."""
UNSETTLED = "too few consistent measurements yet to start from"
EARLY = "sooner than the control period"
"""Why a command is not written, although nothing is wrong: a later one will be."""
LATE = 0.25
"""Share of a period by which a command may be late without counting as missing."""


class State(Enum):
    """READY: nothing commanded yet. ACTIVE: commanding. HOLDING: stops and is silent. STOPPED: so until `reset`."""

    READY = "ready"
    ACTIVE = "active"
    HOLDING = "holding"
    STOPPED = "stopped"


@dataclass(frozen=True)
class Verdict:
    """Result of one command: the action [A] that was written (None if nothing was), and why or how it was changed.

    `limited` says whether the written action differs from the requested one.
    """

    state: State
    action: Array | None
    reason: str = ""
    limited: bool = False


class Safety:
    """Checks every command and measurement of `robot`; writes an action inside all limits, or holds.

    Holding is the stop that was certified with the last command: one action per period within all limits, from the last
    command alone, however old the measurement is, and never towards a measurement; nothing is written afterwards, so
    that nobody who moves the robot meanwhile is disturbed. A robot without `at_rest` gets no stop, but its own `hold`
    at once. Before the first command there is nothing to stop.

    - Input that is stale, reordered, from the future, not finite, or of another shape or frame is a fault: it holds in
      the same period. A robot that is stopped by commands moves again once it stands still and the inputs of
      `recovery_s` in a row were good; any other one as its own `hold` lets it.
    - A measured position that contradicts the ones before is rejected and counted (`rejected`); if it persists for
      `observation_timeout_s`, the robot stops until `reset`.
    - A missing command holds, too; the next command goes on from where the stop is.
    - Exceeded observation bounds, a robot that fails, does not follow or says so, and `trip` stop until `reset`.
    - After `command_timeout_s` without a command the program counts as silent, whoever notices it: velocities have gone
      on meanwhile, unless the robot has stopped by itself (`Robot.stops_after_s`), all else stands still.

    `clock` is that of the stamps. Control periods are counted in `steady` time, which does not jump; None: `clock`'s. A
    robot that `relocates` may be put elsewhere at once, as a simulator's at the beginning of an episode: its
    measurements are not compared with each other.

    A motion starts at rest from measurements that are consistent with each other: where the robot was commanded last if
    it is measured near there, else where it is measured. All methods may be called from any thread: once `trip` has
    returned, nothing but the stop is written.

    Raises:
        UserError: for limits that do not fit the robot's contract.
    """

    def __init__(
        self, robot: Robot, limits: Limits, clock: Clock, steady: Clock | None = None, *, relocates: bool = False
    ) -> None:
        self._robot = robot
        self.limits = limits
        self._clock = clock
        self._steady = steady or clock
        self._inputs = Inputs(robot.contract, limits)
        self._consistency = Consistency(robot.contract, Limits() if relocates else limits)
        self._filters = Filters(robot.contract, limits, robot.at_rest)
        self._bounds = Bounds(robot.contract, limits)
        self._period_s = robot.contract.control_dt_s
        self._recovery = math.ceil(limits.recovery_s / self._period_s - 1e-9)
        self._lock = threading.RLock()
        self.state = State.READY
        self.reason = ""
        self._now_s = self._steady_s = self._written_s = self._reset_s = -math.inf
        self._counted_s = -math.inf  # until when periods without a command are accounted for
        self._accepted_s = -math.inf  # when the newest accepted measurement was accepted
        self._credit = 1.0
        self._went_back = ""
        self._stopping = False
        self._missing: int | None = None  # good periods that going on after a fault needs, besides standing still

    @property
    def energy_j(self) -> float:
        """Energy left in the tank; infinite without one."""
        return self._filters.energy_j

    @property
    def rejected(self) -> int:
        """Number of measurements that contradicted the ones before."""
        return self._consistency.rejected

    @property
    def settled(self) -> bool:
        """Whether a motion may start from the measurements so far, which are consistent with each other."""
        with self._lock:
            return self._consistency.settled and not self._consistency.fault

    def observe(self, reading: Reading) -> tuple[Reading | None, str]:
        """Take note of a measurement without a command: a motion starts from several that are consistent.

        Returns the newest measurement that is valid and does not contradict the ones before, by which programs should
        decide, or None and why `reading` is invalid.
        """
        with self._lock:
            fault = self._inputs.reading_fault(reading, self._time())
            return (None, fault) if fault else (self._accepted(reading), "")

    def command(self, action: Array | Command | None, reading: Reading | None) -> Verdict:
        """Write `action`, limited where necessary, or hold; call it once per period.

        A command that comes before the control period is over is not written: limits of velocity, acceleration and jerk
        hold in real time. One period of jitter is tolerated.
        """
        with self._lock:
            now_s = self._time()
            fault = self._went_back
            self._went_back = ""
            fault = fault or self._inputs.reading_fault(reading, now_s)
            accepted = None if fault or reading is None else self._accepted(reading)
            if self.state is State.STOPPED:
                return self._hold(State.STOPPED, self.reason)
            if reading is None or accepted is None:
                return self._fail(fault)
            if reading.refusal:
                stops = self._hold(State.STOPPED, reading.refusal) if self._moving else None
                return stops or self._fail(reading.refusal)
            if bound := self._bounds.broken(
                reading.observation, self._consistency.keys if self._consistency.fault else ()
            ):
                return self._hold(State.STOPPED, bound)
            # A clock that goes back makes an old measurement no newer.
            age_s = max(now_s - accepted.stamp_s, self._steady_s - self._accepted_s, 0.0)
            if (fault := self._consistency.fault) and age_s > self.limits.observation_timeout_s:
                return self._hold(State.STOPPED, fault)
            if self._moving and (away := self._filters.unfollowed(accepted.observation, age_s)):
                return self._hold(State.STOPPED, away)
            if action is None:
                return self._hold(State.HOLDING, MISSING)
            command = action if isinstance(action, Command) else Command(action)
            delay_s = age_s + self.limits.clock_error_s + self._period_s
            fault = self._inputs.command_fault(command, now_s) or self._bounds.ahead(accepted.observation, delay_s)
            if fault:
                return self._fail(fault)
            if command.stamp_s is not None and command.stamp_s <= self._reset_s:
                return self._hold(State.HOLDING, "the command was issued before the reset")
            return self._go_on(np.asarray(command.action), accepted)

    def hold(self, reason: str, fault: bool = True) -> Verdict:
        """Hold, as after a bad input, or as after a missing command; call it every period."""
        with self._lock:
            self._time()
            if self.state is State.STOPPED:
                return self._hold(State.STOPPED, self.reason)
            return self._fail(reason) if fault else self._hold(State.HOLDING, reason)

    def trip(self, reason: str) -> None:
        """Emergency stop: the robot holds now and until `reset`."""
        with self._lock:
            self._time()
            self._hold(State.STOPPED, reason)

    def reset(self) -> None:
        """Leave the emergency stop: the next command that is issued from now on is checked like the first one.

        It goes on from a running stop. Measurements that contradicted the ones before stay rejected: either the sensor
        is mended, or, where the robot really was put elsewhere, its program is started anew.
        """
        with self._lock:
            self._reset_s = self._time()
            self.state = State.HOLDING if self._stopping else State.READY
            self.reason = ""
            self._missing = None
            self._went_back = ""
            self._inputs.reset()
            self._filters.reset()

    def watch(self) -> None:
        """Hold if the last command is older than `command_timeout_s`, and carry on a stop.

        Call it every period from a timer outside the control loop.
        """
        with self._lock:
            self._time()
            if self.state is State.ACTIVE and self._silent:
                self._hold(State.HOLDING, "no command in time")
            elif self._stopping:
                self._hold(self.state, self.reason)

    def settle(self, reason: str, wait: Callable[[float], None] = time.sleep) -> None:
        """Hold, and return when the robot has its last command; `wait` waits for the given s, a control period."""
        self.hold(reason, fault=False)
        while self._stopping:
            wait(self._period_s)
            with self._lock:
                self._time()
                self._credit = 1.0  # the time of this loop counts, whatever the clock says
                self._hold(self.state, self.reason)

    def _accepted(self, reading: Reading) -> Reading:
        """The newest measurement that does not contradict the ones before, after the valid `reading`."""
        before = self._consistency.accepted
        follows = True
        if before and self._consistency.fault:
            age_s = max(self._now_s - reading.stamp_s, 0.0)
            follows = self._filters.leads(before.observation, reading.observation, age_s)
        idle_s = 0.0 if self._moving else self._steady_s - self._written_s
        accepted = self._consistency.take(reading, idle_s, follows)
        if accepted is not before:
            self._accepted_s = self._steady_s
            self._filters.mark()
        return accepted

    @property
    def _moving(self) -> bool:
        """Whether the robot moves by commands, or by a stop."""
        return self.state is State.ACTIVE or self._stopping

    @property
    def _silent(self) -> bool:
        """Whether commands have been missing for `command_timeout_s`, or for so long that the robot has stopped."""
        return self._steady_s - self._written_s > self.limits.command_timeout_s + 1e-6 or self._stands

    @property
    def _stands(self) -> bool:
        """Whether the robot has brought velocities to rest by itself."""
        after_s = self._robot.stops_after_s
        return after_s is not None and self._steady_s - self._written_s > after_s

    def _go_on(self, action: Array, reading: Reading) -> Verdict:
        """Write a valid command, unless a fault is too recent."""
        if self._missing is not None:
            self._missing = max(self._missing - 1, 0)
            if self._missing or self._stopping:
                return self._hold(State.HOLDING, self.reason)
        if self._moving and self._silent:
            self._hold(State.HOLDING, "no command in time", writes=False)
        if not self._moving and not self.settled:
            waits = self._consistency.fault or UNSETTLED
            return self._hold(State.HOLDING, waits)
        idle_s = self._steady_s - self._written_s
        if not self._moving and (fault := self._filters.outside(reading.observation, idle_s)):
            return self._fail(fault)
        if not self._due():
            return Verdict(self.state, None, EARLY)
        if not self._moving:
            self._filters.start(reading.observation, idle_s)
        written = self._filters.apply(action, reading.observation, max(self._now_s - reading.stamp_s, 0.0))
        if not np.isfinite(written).all():
            return self._hold(State.STOPPED, f"the filters made {written} of {action}")
        self.state = State.ACTIVE
        self.reason = ""
        self._stopping = False
        self._missing = None
        self._write(written)
        return Verdict(State.ACTIVE, written, limited=bool((np.abs(written - action) > SAME).any()))

    def _account_for_pause(self) -> None:
        """Tell the filters of the periods in which nothing was commanded."""
        if not self._moving:
            self._counted_s = self._steady_s
            return
        periods = math.floor((self._steady_s - self._counted_s) / self._period_s + LATE)
        if periods > 1:
            self._filters.idle(periods - 1, self._silent, self._stands)
        self._counted_s = min(self._counted_s + max(periods, 1) * self._period_s, self._steady_s)

    def _fail(self, reason: str) -> Verdict:
        if self.state is not State.READY and self._robot.at_rest is not None:
            self._missing = self._recovery
        return self._hold(State.HOLDING, reason)

    def _hold(self, state: State, reason: str, writes: bool = True) -> Verdict:
        """Take the next step of the stop, if there is one and `writes`."""
        begins = self.state is State.ACTIVE or (self._stopping and self._silent)
        if begins and self._robot.at_rest is not None:
            self._account_for_pause()
            self._stopping = self._filters.begin_stop()
        self.state = state if state is State.STOPPED else State.READY if self.state is State.READY else State.HOLDING
        self.reason, own = reason, self._robot.at_rest is None or state is State.STOPPED
        own = own or (begins and not self._stopping)
        action = None
        if writes and self._stopping and self._due(jitter=0.5):
            action, ended = self._filters.stop()
            self._write(action)
            self._stopping = not ended
            own = own or ended
        if own:
            self._robot.hold()
        return Verdict(self.state, action, reason)

    def _write(self, action: Array) -> None:
        try:
            self._robot.write(action)
        except Exception as error:
            self.state = State.STOPPED
            self.reason = f"the robot failed: {error}"
            self._stopping = False
            self._robot.hold()
            raise

    def _time(self) -> float:
        """The time; if the clock went back, what was known by the old time is forgotten."""
        (now_s, steady_s), last_s = (self._clock(), self._steady()), self._now_s
        back_s = min(steady_s - self._steady_s, 0.0)  # a simulator's time may go back
        self._written_s, self._counted_s = self._written_s + back_s, self._counted_s + back_s
        self._accepted_s += back_s
        self._now_s = now_s
        self._steady_s = steady_s
        if now_s < last_s:
            self._inputs.reset()
            self._reset_s = -math.inf
            self._went_back = f"the clock went back by {last_s - now_s:.3g} s: {CLOCKS}"
        return now_s

    def _due(self, jitter: float = 1.0) -> bool:
        """Whether a period has passed since the last command, or up to `jitter` periods less after a late one.

        If so, counts it as used, and accounts for the pause before it. A stop, which is carried on from several
        callbacks, is never two steps in one.
        """
        since_s = self._steady_s - self._written_s
        credit = min(self._credit + since_s / self._period_s, 1.0 + jitter)
        if credit < 1.0 - 1e-6:
            return False
        self._account_for_pause()
        self._credit, self._written_s = credit - 1.0, self._steady_s
        return True


class Bounds:
    """Checks observations against `Limits.observed` and the tilt."""

    def __init__(self, contract: Contract, limits: Limits) -> None:
        self._rows = [(name, observed_element(contract, name), bounds) for name, bounds in limits.observed.items()]
        self._rates = [
            (name, place, observed_element(contract, bounds.rate), bounds)
            for name, place, bounds in self._rows
            if bounds.rate
        ]
        self._late_s = limits.lag_s + limits.command_timeout_s
        self._upright = math.cos(limits.tilt_rad)
        self._attitude = _attitude(contract, limits.attitude) if limits.attitude else []

    def broken(self, observation: dict[str, Array], rejected: Collection[str] = ()) -> str:
        """Description of the first violated bound, except of the keys that were `rejected`; "" if there is none."""
        for name, (key, index), bounds in self._rows:
            if key in rejected:
                continue
            value = float(observation[key][index])
            if not bounds.low <= value <= bounds.high:
                return f"{name} is {value:.4g}, outside {bounds.low:.4g} to {bounds.high:.4g}"
        if self._attitude:
            values = [float(observation[key][index]) for key, index in self._attitude]
            upright = values[0] if len(values) == 1 else 1.0 - 2.0 * (values[0] ** 2 + values[1] ** 2)
            if upright < self._upright:
                return f"tilted by {math.acos(max(upright, -1.0)):.3g} rad, limit {math.acos(self._upright):.3g}"
        return ""

    def ahead(self, observation: dict[str, Array], delay_s: float) -> str:
        """Description of a bound that holding could not meet; "" if there is none.

        The measurement is `delay_s` old when the next command comes, which may be the last one until the program counts
        as silent, and has an effect after the robot's lag.
        """
        delay_s += self._late_s
        for name, place, rate_place, bounds in self._rates:
            value, rate = (float(observation[key][index]) for key, index in (place, rate_place))
            for side, bound in ((1.0, bounds.high), (-1.0, bounds.low)):
                if _travel(side * rate, delay_s, bounds) > side * (bound - value):
                    return f"{name} at {value:.4g} could not stop before {bound:.4g}"
        return ""


def _travel(rate: float, delay_s: float, bounds: ObservedRange) -> float:
    """Distance that an element travels if it accelerates for `delay_s` and is then brought to rest."""
    faster = max(rate + bounds.acceleration * delay_s, 0.0)
    return (rate + 0.5 * bounds.acceleration * delay_s) * delay_s + 0.5 * faster * faster / bounds.deceleration


def _attitude(contract: Contract, key: str) -> list[Element]:
    """Elements that measure how upright the body is: zz of a rotation matrix, or x and y of a quaternion."""
    names = contract.observation[key].names if key in contract.observation else ()
    for needed, read in ((("zz",), ("zz",)), (("x", "y", "z", "w"), ("x", "y"))):
        if set(needed) <= set(names):
            return [observed_element(contract, f"{key}.{name}") for name in read]
    raise UserError(f"expected an attitude with an element zz or x, y, z, w; {key!r} has {names}")
