"""Checks of measurements and commands before any limit is applied."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from embodied.contract import Contract, TensorSpec
from real_robot.robots.robot import Array, Reading
from real_robot.safety.limits import Limits


@dataclass(frozen=True)
class Command:
    """An action [A] and the decision time, frame and element names that its message declares."""

    action: Array
    stamp_s: float | None = None
    frame: str | None = None
    names: tuple[str, ...] | None = None


CLOCKS = "the computers' clocks differ: synchronise them (chrony)"


class Inputs:
    """Checks inputs against the contract, the clock, and earlier inputs."""

    def __init__(self, contract: Contract, limits: Limits) -> None:
        self._contract = contract
        self._limits = limits
        self._specs = {key: spec for key, spec in contract.observation.items() if not spec.privileged}
        self.reset()

    def reset(self) -> None:
        """Forget earlier inputs."""
        self._reading: Reading | None = None
        self._fault = ""
        self._command_s = -math.inf

    def reading_fault(self, reading: Reading | None, now_s: float) -> str:
        """Describe the fault of the newest measurement; "" if it is valid."""
        if reading is None:
            return "no measurement"
        if fault := self._stamp_fault("measurement", reading.stamp_s, now_s, self._limits.observation_timeout_s):
            return fault
        if reading.newest_s > now_s and (fault := self._stamp_fault("part of it", reading.newest_s, now_s, math.inf)):
            return fault
        if reading is not self._reading:
            if self._reading is not None and not _follows(reading, self._reading):
                late_s = max(self._reading.stamp_s - reading.stamp_s, 0.0)
                return f"reordered measurement: {late_s:.3g} s older than the one before"
            self._reading, self._fault = reading, self._observation_fault(reading.observation, reading.frames)
        return self._fault

    def command_fault(self, command: Command, now_s: float) -> str:
        """Describe the fault of a command; "" if it is valid."""
        spec = self._contract.action
        if command.frame is not None and command.frame != spec.frame:
            return f"command in frame {command.frame!r}, expected {spec.frame!r}"
        if command.names is not None and command.names != spec.names:
            return f"command of {command.names}, expected {spec.names}"
        if command.stamp_s is not None:
            if fault := self._stamp_fault("command", command.stamp_s, now_s, self._limits.command_timeout_s):
                return fault
            if command.stamp_s < self._command_s:
                return f"reordered command: {self._command_s - command.stamp_s:.3g} s older than the one before"
            self._command_s = command.stamp_s
        return _values_fault("command", command.action, spec)

    def _stamp_fault(self, what: str, stamp_s: float, now_s: float, timeout_s: float) -> str:
        """Describe a stamp that is not finite, older than `timeout_s`, or in the future; "" if it is valid."""
        age = now_s - stamp_s
        if not math.isfinite(age):
            return f"{what} without a time"
        if age > timeout_s:
            return f"stale {what}: {age:.3g} s old, limit {timeout_s:g} s; if new ones come, {CLOCKS}"
        if age < -self._limits.clock_error_s:
            return f"{what} from {-age:.3g} s in the future, limit {self._limits.clock_error_s:g} s: {CLOCKS}"
        return ""

    def _observation_fault(self, observation: Mapping[str, Array], frames: Mapping[str, str]) -> str:
        """Describe the first key that is missing, in another frame, or of invalid values; "" if there is none."""
        for key, spec in self._specs.items():
            if key not in observation:
                return f"measurement without {key!r}"
            if frames and frames.get(key, spec.frame) != spec.frame:
                return f"{key!r} in frame {frames[key]!r}, expected {spec.frame!r}"
            if fault := _values_fault(key, observation[key], spec):
                return fault
        return ""


def _follows(reading: Reading, last: Reading) -> bool:
    """Whether `reading` is newer than `last`, or the same measurement again."""
    if reading.sequence == last.sequence:
        return reading.stamp_s == last.stamp_s
    return reading.sequence > last.sequence and reading.stamp_s >= last.stamp_s


def _values_fault(what: str, values: object, spec: TensorSpec) -> str:
    """Describe values of another shape than `spec`, not finite or not numeric; "" if they are valid."""
    array = values if isinstance(values, np.ndarray) else np.asarray(values)
    if array.ndim != len(spec.shape) or any(w not in (-1, g) for w, g in zip(spec.shape, array.shape, strict=True)):
        return f"{what} of shape {array.shape}, expected {spec.shape}"
    if array.dtype.kind == "f":
        return "" if np.isfinite(array).all() else f"{what} is not finite"
    return "" if array.dtype.kind in "iub" else f"{what} of {array.dtype}, expected numbers"
