"""Checks what reaches a robot against its limits, from commands and measurements alone; see `safety_faults`."""

from __future__ import annotations

import math
from collections import Counter, deque
from typing import TYPE_CHECKING

import numpy as np

from real_robot.robots.robot import Array, Reading
from real_robot.safety.inputs import Command
from real_robot.safety.limits import ElementLimits, Kind
from real_robot.safety.safety import State, Verdict

if TYPE_CHECKING:
    from benchmarks.safety_faults import World


class ViolationError(AssertionError):
    """What `Safety` may never do."""


class Track:
    """One element as its commands show it: p, w, b in periods, from rest to rest."""

    def __init__(
        self, given: ElementLimits, dt_s: float, start: float, command: tuple[float, float], rounding: float = 1e-12
    ) -> None:
        self.given, self.position, self.rounding = given, given.kind is Kind.POSITION, rounding
        self.fastest = given.velocity * dt_s
        span = min(2.0 * self.fastest, math.inf)
        self.most_b = min(given.acceleration * dt_s**2, span)
        self.most_c = min(given.jerk * dt_s**3, 2.0 * self.most_b)
        self.low, self.high = (given.low, given.high) if self.position else command
        self.p, self.w, self.b = start, 0.0, 0.0
        self.past = deque([start])

    @property
    def still(self) -> bool:
        """Whether it may begin a new motion."""
        small = 2e-3 * min(self.most_b, self.most_c)
        return abs(self.w) <= small and abs(self.b) <= small

    def rest(self, position: float) -> None:
        """Begin at rest."""
        self.p, self.w, self.b = position, 0.0, 0.0
        self.past.clear()
        self.past.append(position)

    def take(self, value: float, kept: int) -> str:
        """Follow a command; returns which limit it is outside of."""
        w = value - self.p if self.position else value
        b = w - self.w
        c = b - self.b
        rounding = self.rounding * max(1.0, abs(value))
        broken = "range" if not self.low - rounding <= value <= self.high + rounding else ""
        over = (
            ("velocity", w, self.fastest, 1), ("acceleration", b, self.most_b, 2), ("jerk", c, self.most_c, 4)
        )  # fmt: skip
        broken = broken or next(
            (f"{name} of {size:.6g}, limit {most:.6g}" for name, size, most, times in over
             if abs(size) > most * (1 + 1e-9) + times * rounding), "",
        )  # fmt: skip
        self.p, self.w, self.b = (value if self.position else self.p + w), w, b
        self.past.append(self.p)
        while len(self.past) > kept:
            self.past.popleft()
        return broken

    def stop(self) -> tuple[float, float]:
        """Distance and periods that the fastest stop needs at most, counted in whole periods."""
        ramp = math.ceil(abs(self.b) / self.most_c)
        peak = abs(self.w) + 0.5 * abs(self.b) * (ramp + 1)  # first the acceleration has to cease
        braking = peak / self.most_b + self.most_b / self.most_c
        return peak * (ramp + 0.5 * braking + 3.0), ramp + 2.0 * braking + 6.0


class Checker:
    """Follows what reaches the robot."""

    def __init__(self, world: World) -> None:
        self.world, self.limits = world, world.limits
        edges = zip(world.physical(world.low), world.physical(world.high), strict=True)
        self.tracks = [
            Track(given, world.dt_s, start if given.measured else given.rest, edge)
            for given, start, edge in zip(world.elements, world.position, edges, strict=True)
        ]
        self.state, self.count = State.READY, Counter[str]()
        self.good, self.held = 10**9, 0  # periods
        self.silent = False
        self.now_s = self.written_s = -math.inf
        self.bounds: list[tuple[float, float, float]] = []  # of p, or of w summed up; periods
        self.sums = [0.0] * len(self.tracks)

    def check(self, verdict: Verdict, reading: Reading | None, command: Command | None = None) -> None:
        """One call has ended."""
        now_s = self.world.clock()
        self.written_s += min(now_s - self.now_s, 0.0)  # the clock may have gone back
        self.now_s, before, self.state = now_s, self.state, verdict.state
        if command is not None and before is not State.READY:
            self.good = 0 if self._bad(command, reading) else self.good + 1
        if verdict.state is State.ACTIVE:
            if before is not State.ACTIVE:
                self.count["begun"] += 1
            self._active(verdict, reading, before)
        else:
            self._hold(verdict, reading, before)
        if verdict.action is not None:
            self.written_s = self.now_s

    def _active(self, verdict: Verdict, reading: Reading | None, before: State) -> None:
        if before is State.STOPPED:
            raise ViolationError("an emergency stop was left without a reset")
        needed = round(self.limits.recovery_s / self.world.dt_s)
        if before is State.HOLDING and self.good < needed:
            raise ViolationError(f"active after {self.good} good periods, expected {needed}")
        if verdict.action is None:
            return
        assert reading is not None
        measured = reading.observation["position"]
        values = self.world.physical(verdict.action)
        gap = self.now_s - self.written_s > self.limits.command_timeout_s
        begins = before is not State.ACTIVE and all(track.still for track in self.tracks)
        for track, at in zip(self.tracks, measured, strict=True):
            if begins or gap:
                track.rest(min(max(at, track.low), track.high) if track.position and track.given.measured else track.p)
            elif (away := self._away(track, at)) > 0.0:
                raise ViolationError(f"commanded on, {away:.4g} from where the robot is")
        self._take(values)

    def _hold(self, verdict: Verdict, reading: Reading | None, before: State) -> None:
        if before is State.ACTIVE or (before is State.HOLDING and verdict.state is State.STOPPED):
            self._begin_stop(reading, "commanded to" in verdict.reason)
        if self.now_s - self.written_s > 2.0 * self.limits.command_timeout_s:
            # it stands still by its own time-out, and may get one command that says so
            self.held, self.silent = 0, False
            for track in self.tracks:
                track.rest(track.p)
        self.held += 1
        if verdict.action is None:
            self.silent = self.silent or self.now_s - self.written_s > 0.999 * self.world.dt_s
            return
        if self.silent:
            raise ViolationError("commanded after the stop")
        values = self.world.physical(verdict.action)
        self.count["stop commands"] += 1
        self._take(values)
        for index, (track, (low, high, periods)) in enumerate(zip(self.tracks, self.bounds, strict=True)):
            self.sums[index] = track.p if track.position else self.sums[index] + track.w
            rounding = 1e-9 + 1e-9 * abs(self.sums[index])
            if not low - rounding <= self.sums[index] <= high + rounding:
                raise ViolationError(f"stopped at {self.sums[index]:.6g}, certified {low:.6g} to {high:.6g}")
            if self.held > periods:
                raise ViolationError(f"not silent {self.held} periods after the last command, {periods:.0f} allowed")

    def _begin_stop(self, reading: Reading | None, returns: bool) -> None:
        """`returns`: elements that did not follow are brought back to where the robot is."""
        self.count["stops"] += 1
        self.held, self.silent, self.bounds = 0, False, []
        self.sums = [track.p if track.position else 0.0 for track in self.tracks]
        longest = 0.0
        for index, track in enumerate(self.tracks):
            distance, periods = track.stop()
            low, high = self.sums[index] - distance, self.sums[index] + distance
            if returns and reading is not None and track.position and track.given.measured:
                back = min(max(reading.observation["position"][index], track.low), track.high)
                low, high = min(low, back), max(high, back)
                periods += 3.0 * (periods + abs(track.p - back) / track.fastest)
            self.bounds.append((low, high, 0.0))
            longest = max(longest, periods)
        # commands that come too soon are not written, a paused program writes nothing: half of the periods may be such
        self.bounds = [(low, high, 2.0 * longest + 30.0) for low, high, _ in self.bounds]

    def _away(self, track: Track, measured: float) -> float:
        """How far a measured position is outside of what was commanded lately, and may not be."""
        if not (track.position and track.given.measured) or not track.past:
            return 0.0
        allowed = 0.03 if track.given.following is None else track.given.following
        away = max(min(track.past) - measured, measured - max(track.past))
        return away if away > allowed + 1e-9 else 0.0

    def _bad(self, command: Command, reading: Reading | None) -> bool:
        """Whether an input is bad in a way that does not depend on the ones before."""
        now_s, limits = self.world.clock(), self.limits
        if reading is None or command.stamp_s is None or len(command.action) != len(self.tracks):
            return True
        ages = now_s - reading.stamp_s, now_s - command.stamp_s
        late = ages[0] > limits.observation_timeout_s + 1e-9 or ages[1] > limits.command_timeout_s + 1e-9
        values = np.concatenate((command.action, reading.observation["position"]))
        return late or min(ages) < -limits.clock_error_s - 1e-9 or not np.isfinite(values).all()

    def _take(self, values: Array) -> None:
        kept = round(self.limits.following_s / self.world.dt_s) + 2
        for name, track, value in zip("abc", self.tracks, values, strict=False):
            if broken := track.take(float(value), kept):
                raise ViolationError(f"{name}: {broken}")
        self.count["commands"] += 1
