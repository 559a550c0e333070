"""The only caller of a robot's `write`: every command is checked, filtered and written, or the robot holds."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from enum import Enum

import numpy as np

from embodied.contract import Contract
from embodied.errors import UserError
from real_robot.robots.robot import Array, Clock, Reading, Robot
from real_robot.safety.filters import Element, Filters, observed_element
from real_robot.safety.inputs import Command, Inputs
from real_robot.safety.limits import Limits, Range, load_limits

__all__ = ["Command", "Limits", "Safety", "State", "Verdict", "load_limits"]


SAME = 1e-9
"""Commands that differ by less count as equal."""


class State(Enum):
    """READY: nothing written yet. ACTIVE: commanding. HOLDING: until input is valid again. STOPPED: until `reset`."""

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

    Input that is missing, stale, reordered, from the future, not finite, or of another shape or frame holds the robot
    at once, until input is valid again. Exceeded observation bounds, a failing robot, and `trip` stop it until `reset`.
    All methods may be called from any thread: once `trip` has returned, nothing is written.

    Raises:
        UserError: for limits that do not fit the robot's contract.
    """

    def __init__(self, robot: Robot, limits: Limits, clock: Clock) -> None:
        self._robot, self._limits, self._clock = robot, limits, clock
        self._inputs = Inputs(robot.contract, limits)
        self._filters = Filters(robot.contract, limits)
        self._bounds = Bounds(robot.contract, limits)
        self._period_s = robot.contract.control_dt_s
        self._lock = threading.RLock()
        self.state, self.reason = State.READY, ""
        self._written_s, self._credit = -math.inf, 1.0

    @property
    def energy_j(self) -> float:
        """Energy left in the tank; infinite without one."""
        return self._filters.energy_j

    def command(self, action: Array | Command | None, reading: Reading | None) -> Verdict:
        """Write `action`, limited where necessary, or hold; call it once per period.

        A command that comes before the control period is over is not written: limits of velocity, acceleration and jerk
        hold in real time. One period of jitter is tolerated.
        """
        with self._lock:
            if self.state is State.STOPPED:
                return self._hold(State.STOPPED, self.reason)
            now = self._clock()
            if fault := self._inputs.reading_fault(reading, now):
                return self._hold(State.HOLDING, fault)
            assert reading is not None
            if bound := self._bounds.broken(reading.observation):
                return self._hold(State.STOPPED, bound)
            if action is None:
                return self._hold(State.HOLDING, "no command")
            command = action if isinstance(action, Command) else Command(action)
            fault = self._inputs.command_fault(command, now)
            if fault := fault or self._bounds.ahead(reading.observation, now - reading.stamp_s + self._period_s):
                return self._hold(State.HOLDING, fault)
            return self._write(np.asarray(command.action), reading, now)

    def trip(self, reason: str) -> None:
        """Emergency stop: the robot holds now and until `reset`."""
        with self._lock:
            self._hold(State.STOPPED, reason)

    def reset(self) -> None:
        """Leave the emergency stop; the next command is checked like the first one."""
        with self._lock:
            self.state, self.reason = State.READY, ""
            self._written_s, self._credit = -math.inf, 1.0  # the clock may have jumped back
            self._inputs.reset()
            self._filters.reset()

    def watch(self) -> None:
        """Hold if the last command is older than `command_timeout_s`; call it from a timer outside the control loop."""
        with self._lock:
            if self.state is State.ACTIVE and self._clock() - self._written_s > self._limits.command_timeout_s:
                self._hold(State.HOLDING, "no command in time")

    def _write(self, action: Array, reading: Reading, now_s: float) -> Verdict:
        if not self._due(now_s):
            return Verdict(self.state, None, "sooner than the control period")
        if self.state is not State.ACTIVE and (fault := self._filters.start(reading.observation)):
            return self._hold(State.HOLDING, fault)
        written = self._filters.apply(action, reading.observation, max(now_s - reading.stamp_s, 0.0))
        if not np.isfinite(written).all():
            return self._hold(State.STOPPED, f"the filters made {written} of {action}")
        self.state, self.reason = State.ACTIVE, ""
        try:
            self._robot.write(written)
        except Exception as error:
            self._hold(State.STOPPED, f"the robot failed: {error}")
            raise
        return Verdict(State.ACTIVE, written, limited=bool((np.abs(written - action) > SAME).any()))

    def _due(self, now_s: float) -> bool:
        """Whether a period has passed since the last command; if so, counts it as used."""
        since_s = now_s - self._written_s
        if self.state is State.ACTIVE and since_s > self._limits.command_timeout_s:
            self.state = State.HOLDING  # the robot has stopped by itself: start again from the measurement
        credit = min(self._credit + since_s / self._period_s, 2.0)
        if credit < 1.0 - 1e-6:
            return False
        self._credit, self._written_s = credit - 1.0, now_s
        return True

    def _hold(self, state: State, reason: str) -> Verdict:
        self.state, self.reason = state, reason
        self._robot.hold()
        return Verdict(state, None, reason)


class Bounds:
    """Checks observations against `Limits.observed` and the tilt."""

    def __init__(self, contract: Contract, limits: Limits) -> None:
        self._rows = [(name, observed_element(contract, name), bounds) for name, bounds in limits.observed.items()]
        self._rates = [
            (name, place, observed_element(contract, bounds.rate), bounds)
            for name, place, bounds in self._rows
            if bounds.rate
        ]
        self._upright = math.cos(limits.tilt_rad)
        self._attitude = _attitude(contract, limits.attitude) if limits.attitude else []

    def broken(self, observation: dict[str, Array]) -> str:
        """Description of the first violated bound; "" if there is none."""
        for name, (key, index), bounds in self._rows:
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
        """Description of a bound that holding after `delay_s` could not meet; "" if there is none."""
        for name, place, rate_place, bounds in self._rates:
            value, rate = (float(observation[key][index]) for key, index in (place, rate_place))
            for side, bound in ((1.0, bounds.high), (-1.0, bounds.low)):
                if _travel(side * rate, delay_s, bounds) > side * (bound - value):
                    return f"{name} at {value:.4g} could not stop before {bound:.4g}"
        return ""


def _travel(rate: float, delay_s: float, bounds: Range) -> float:
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
