"""The only caller of a robot's `write`: every command is checked, filtered, and written, or the robot holds."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from enum import Enum

import numpy as np

from real_robot.robot import Array, Clock, Reading, Robot


class State(Enum):
    """READY: nothing written yet. ACTIVE: commanding. HOLDING: until input is good again. STOPPED: until `reset`."""

    READY = "ready"
    ACTIVE = "active"
    HOLDING = "holding"
    STOPPED = "stopped"


@dataclass(frozen=True)
class Command:
    """An action [A] with what a message declares of it: when it was decided, its frame, and its elements' names."""

    action: Array
    stamp_s: float | None = None
    frame: str | None = None
    names: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Verdict:
    """What became of one command: the action [A] that was written (None: the robot held) and why."""

    state: State
    action: Array | None
    reason: str = ""
    limited: bool = False


@dataclass
class Limits:
    """What a robot may be commanded and may measure; see the fields."""

    observation_timeout_s: float = 0.1
    command_timeout_s: float = 0.1


class Safety:
    """Checks every command and measurement of `robot`; writes what is inside all limits, else holds.

    `trip` latches until `reset`, from any thread: no command is written after it has returned.
    """

    def __init__(self, robot: Robot, limits: Limits, clock: Clock) -> None:
        self._robot, self._limits, self._clock = robot, limits, clock
        self._lock = threading.RLock()
        self._last: Reading | None = None
        self._low = np.array(robot.contract.action.low or (-np.inf,) * robot.contract.action.shape[-1])
        self._high = np.array(robot.contract.action.high or (np.inf,) * robot.contract.action.shape[-1])
        self.state = State.READY
        self.reason = ""

    def command(self, action: Array | Command | None, reading: Reading | None) -> Verdict:
        """Write `action` as far as it is inside the limits, or hold; call it once per period."""
        with self._lock:
            if self.state is State.STOPPED:
                return self._hold(State.STOPPED, self.reason)
            given = action if isinstance(action, Command) else Command(np.empty(0) if action is None else action)
            fault = "no command" if action is None else self._fault(given, reading)
            if fault:
                return self._hold(State.HOLDING, fault)
            written = np.clip(np.asarray(given.action, np.float64), self._low, self._high)
            self._robot.write(written)
            self.state, self.reason = State.ACTIVE, ""
            return Verdict(State.ACTIVE, written, limited=bool((written != given.action).any()))

    def trip(self, reason: str) -> None:
        """Emergency stop: the robot holds now and until `reset`."""
        with self._lock:
            self._hold(State.STOPPED, reason)

    def reset(self) -> None:
        """Leave the emergency stop; the next command is checked as the first one was."""
        with self._lock:
            self.state, self.reason, self._last = State.READY, "", None

    def _hold(self, state: State, reason: str) -> Verdict:
        self.state, self.reason = state, reason
        self._robot.hold()
        return Verdict(state, None, reason)

    def _fault(self, command: Command, reading: Reading | None) -> str:
        now = self._clock()
        if reading is None:
            return "no measurement"
        if not 0 <= now - reading.stamp_s <= self._limits.observation_timeout_s:
            return "stale measurement"
        if self._last is not None and reading.sequence < self._last.sequence:
            return "reordered measurement"
        self._last = reading
        values = np.asarray(command.action)
        if values.shape != self._low.shape:
            return "wrong length"
        return "" if np.isfinite(values).all() else "not finite"
