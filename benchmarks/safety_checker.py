"""Checks a robot's commands against its limits, from commands and measurements alone; see `safety_faults`."""

from __future__ import annotations

import math
from collections import Counter, deque
from typing import TYPE_CHECKING

import numpy as np

from real_robot.robots.robot import Array, Reading
from real_robot.safety.consistency import HAND_SPEED, START_READINGS
from real_robot.safety.inputs import Command
from real_robot.safety.limits import ElementLimits, Kind
from real_robot.safety.safety import State, Verdict

if TYPE_CHECKING:
    from benchmarks.safety_faults import World


class ViolationError(AssertionError):
    """Raised for a violation of a property that `Safety` guarantees."""


class Track:
    """State of one element by its commands: p, w, b in periods, from rest to rest."""

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
        self.unknown = 0
        """Number of commands whose derivatives are unknown, because their starting point is unknown."""

    @property
    def still(self) -> bool:
        """Whether a new motion may begin."""
        small = 2e-3 * min(self.most_b, self.most_c)
        return abs(self.w) <= small and abs(self.b) <= small

    def lost(self, near: float) -> None:
        """Restart at an unknown position `near`: the velocity is known after one command, the jerk after three."""
        self.rest(near)
        self.unknown = 3

    def rest(self, position: float) -> None:
        """Restart at rest."""
        self.p, self.w, self.b = position, 0.0, 0.0
        self.past.clear()
        self.past.append(position)

    def take(self, value: float, kept: int) -> str:
        """Apply a command; returns the name of a violated limit."""
        w = value - self.p if self.position else value
        b = w - self.w
        c = b - self.b
        rounding = self.rounding * max(1.0, abs(value))
        broken = "range" if not self.low - rounding <= value <= self.high + rounding else ""
        limits = (("velocity", w, self.fastest, 1), ("acceleration", b, self.most_b, 2), ("jerk", c, self.most_c, 4))
        self.unknown -= 1
        broken = broken or next(
            (
                f"{name} of {size:.6g}, limit {limit:.6g}"
                for name, size, limit, times in limits
                if self.unknown < 0 and abs(size) > limit * (1 + 1e-9) + times * rounding
            ),
            "",
        )
        self.p, self.w, self.b = (value if self.position else self.p + w), w, b
        self.past.append(self.p)
        while len(self.past) > kept:
            self.past.popleft()
        return broken

    def stop(self) -> tuple[float, float]:
        """Upper bounds of the fastest stop's distance and duration, in whole periods."""
        w, b = (self.fastest, self.most_b) if self.unknown > 0 else (abs(self.w), abs(self.b))
        ramp = math.ceil(b / self.most_c)
        peak = w + 0.5 * b * (ramp + 1)  # first the acceleration has to decrease to zero
        braking = peak / self.most_b + self.most_b / self.most_c
        return peak * (ramp + 0.5 * braking + 3.0), ramp + 2.0 * braking + 6.0


class Checker:
    """Tracks the robot's commands and its position."""

    def __init__(self, world: World) -> None:
        self.world, self.limits = world, world.limits
        edges = zip(world.physical(world.low), world.physical(world.high), strict=True)
        self.tracks = [
            Track(given, world.dt_s, start if given.measured else given.rest, edge)
            for given, start, edge in zip(world.elements, world.position, edges, strict=True)
        ]
        self.state, self.count = State.READY, Counter[str]()
        self.good, self.held = 10**9, 0  # periods
        self.silent = self.commanded_once = False
        self.reset_s = -math.inf
        self.lied, self.lying, self.truths = "", "", 0
        """Kind of the newest measurement's falsehood, kind of the previous one's, and number of different true ones."""
        self.true_sequence, self.true_positions = -1, world.position.copy()
        self.lies = self.near = 0
        """Number of measurements of this falsehood, and of its latest consecutive ones near the commands."""
        self.deceived = False
        """Whether a false measurement was a position to which the robot could have been moved since the last one."""
        self.now_s = self.written_s = self.true_s = self.true_stamp_s = -math.inf
        self.bounds: list[tuple[float, float, float]] = []  # of p, or of w summed up; periods
        self.sums = [0.0] * len(self.tracks)
        self.departure = 0.0
        """Largest distance outside the walls of an element that is neither pushed nor blocked, in its unit."""
        self.disturbed = 0  # number of remaining periods
        self.excused = [0.0] * len(self.tracks)
        """Allowed distance outside the walls, because somebody pushed the element or the whole program was paused."""

    def reset(self, state: State) -> None:
        """Process an operator's reset of an emergency stop."""
        self.state, self.good, self.reset_s, self.truths = state, 10**9, self.world.clock(), 0

    def check(self, verdict: Verdict, reading: Reading | None, command: Command | None = None) -> None:
        """Check the result of one call; `reading` is the measurement, true or false."""
        self.reset_s = min(self.reset_s, self.world.clock())  # which may have gone back
        self.now_s, before, self.state = self.world.steady(), self.state, verdict.state
        self._believe(reading)
        self._pause()
        if command is not None and before is not State.READY:
            self.good = 0 if self._bad(command, reading) else self.good + 1
        if verdict.state is State.ACTIVE:
            if before is not State.ACTIVE:
                self.count["begun"] += 1
            self._active(verdict, command, before)
        else:
            self._hold(verdict, before)
        if verdict.action is not None:
            self.written_s, self.commanded_once = self.now_s, True

    def _believe(self, reading: Reading | None) -> None:
        """Store a true measurement; for a false one, update `deceived`."""
        if reading is None or not np.isfinite(positions := reading.observation["position"]).all():
            return
        age_s = self.world.clock() - reading.stamp_s
        if not -self.limits.clock_error_s <= age_s <= self.limits.observation_timeout_s:
            return
        if not self.lied:
            self.true_s, self.true_stamp_s = self.now_s, reading.stamp_s
            self.truths += reading.sequence != self.true_sequence
            self.lying, self.true_sequence = "", reading.sequence
            self.true_positions = positions
        else:
            self._doubt(positions, reading.stamp_s)

    def _doubt(self, positions: Array, stamp_s: float) -> None:
        """Set `deceived` if the false measurement `positions` is indistinguishable from a true one.

        Initially it is, if somebody could have moved the robot there since the last measurement; later it is, if it
        stays near the commands, because rejected measurements are accepted again then.
        """
        indices = [index for index, track in enumerate(self.tracks) if track.given.measured]
        if self.lying != self.lied:
            self.lying, self.lies, self.near = self.lied, 0, 0
            errors = np.abs(positions - self.true_positions)
            detectable = any(errors[index] > self._by_hand(self.tracks[index], stamp_s) for index in indices)
            self.deceived = self.deceived or self.truths < START_READINGS or not detectable
        self.lies += 1
        deviates = any(self._apart(index, float(positions[index])) for index in indices)
        self.near = 0 if deviates else self.near + 1
        convincing = START_READINGS + self.world.late
        self.deceived = self.deceived or self.near >= (1 if self.lies == 2 else convincing)

    def _apart(self, index: int, lie: float) -> bool:
        """Whether a measured position deviates from all recently commanded positions."""
        track, world = self.tracks[index], self.world
        if track.position:
            return self._away(track, lie) > 0.0
        flight = (world.late + 2) * track.fastest
        return abs(lie - world.position[index]) > self._following(track) + flight

    def walls(self, paused: bool) -> None:
        """Check the robot's position after a period, in which it may have been pushed or the whole program `paused`.

        Raises:
            ViolationError: if the position is outside the walls.
        """
        world = self.world
        # for a robot that is pushed, earlier commands are still in flight
        settling_periods = world.late + self._window() + max(math.ceil(track.stop()[1]) for track in self.tracks)
        self.disturbed = settling_periods if world.taken or world.blocked or paused else self.disturbed - 1
        for index, (track, element) in enumerate(zip(self.tracks, world.elements, strict=True)):
            if track.position or not element.measured:
                continue
            position = world.position[index]
            outside = max(element.low - position, position - element.high, 0.0)
            if self.disturbed > 0 or self.deceived or outside <= 1e-4 * track.fastest + 1e-9:
                self.excused[index] = outside
                continue
            self.departure = max(self.departure, outside - self.excused[index])
            if outside > self.excused[index] + 1e-4 * track.fastest + 1e-9:
                raise ViolationError(f"element {index} is {outside:.4g} outside of its walls")

    def _pause(self) -> None:
        """Account for a pause: positions and displacements stand still, velocities continue until the robot stops."""
        gap_s, stops_s = self.now_s - self.written_s, self.world.stops_after_s
        stands = stops_s is not None and gap_s > stops_s
        if not self.commanded_once or not (stands or gap_s > self.limits.command_timeout_s):
            return
        for track, kind in zip(self.tracks, self.world.kinds, strict=True):
            if kind is not Kind.VELOCITY or stands:
                track.w = track.b = 0.0
        if self.state is not State.ACTIVE and all(track.still for track in self.tracks):
            self.held = 0

    def _active(self, verdict: Verdict, command: Command | None, before: State) -> None:
        if before is State.STOPPED:
            raise ViolationError("an emergency stop was left without a reset")
        needed = round(self.limits.recovery_s / self.world.dt_s)
        if before is State.HOLDING and self.good < needed:
            raise ViolationError(f"active after {self.good} good periods, expected {needed}")
        if verdict.action is None:
            return
        if command is not None and command.stamp_s is not None and command.stamp_s <= self.reset_s:
            raise ViolationError("a command from before the reset was executed")
        values, measured_positions = self.world.physical(verdict.action), self.world.position + self.world.sag
        begins = before is not State.ACTIVE and all(track.still for track in self.tracks)
        for track, value, measurement in zip(self.tracks, values, measured_positions, strict=True):
            if begins:
                self._begin(track, float(value), float(measurement))
            elif not (self.lied or self.deceived) and (away := self._away(track, measurement)) > 0.0:
                raise ViolationError(f"commanded on, {away:.4g} from where the robot is")
        self._take(values)

    def _begin(self, track: Track, value: float, at: float) -> None:
        """Check that a motion begins at the last command or at the robot's position."""
        if not (track.position and track.given.measured):
            track.rest(track.p)
            return
        allowed, start = self._following(track), min(max(at, track.low), track.high)
        if self.commanded_once and not self.deceived and self.disturbed <= 0 and abs(at - track.p) <= allowed:
            track.rest(track.p)
            return
        lags = self.commanded_once and self._away(track, at) == 0.0 and abs(value - track.p) <= 1.001 * track.fastest
        near = abs(value - start) <= allowed + self._window() * track.fastest
        if not (near or lags or self.deceived or self.disturbed > 0):
            raise ViolationError(f"began at {value:.4g}, the robot is at {start:.4g}")
        track.lost(value)
        track.past.append(at)

    def _by_hand(self, track: Track, stamp_s: float) -> float:
        """Largest distance that an element may have been moved since the last measurement; infinite before it."""
        speed = max(track.fastest / self.world.dt_s, HAND_SPEED)
        elapsed_s = max(self.now_s - self.true_s, stamp_s - self.true_stamp_s)
        return speed * elapsed_s + self._following(track)

    def _window(self) -> int:
        """Largest delay of a measurement, in periods."""
        return round((self.limits.observation_timeout_s + self.limits.clock_error_s) / self.world.dt_s) + 1

    def _hold(self, verdict: Verdict, before: State) -> None:
        if before is State.ACTIVE:
            self._begin_stop()
        self.held += 1
        if verdict.action is None:
            self.silent = self.silent or self.now_s - self.written_s > 0.999 * self.world.dt_s
            return
        if self.silent and any(self.world.physical(verdict.action)[index] for index in self._rates()):
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

    def _rates(self) -> list[int]:
        return [index for index, track in enumerate(self.tracks) if not track.position]

    def _begin_stop(self) -> None:
        """Begin to check the stop against the bounds that its last command certified."""
        self.count["stops"] += 1
        self.held, self.silent, self.bounds = 0, False, []
        self.sums = [track.p if track.position else 0.0 for track in self.tracks]
        stops = [track.stop() for track in self.tracks]
        # early commands are not written, and a paused program writes nothing: this may be half of the periods
        longest = 2.0 * max(periods for _, periods in stops) + 30.0
        self.bounds = [
            (total - distance, total + distance, longest) for total, (distance, _) in zip(self.sums, stops, strict=True)
        ]

    def _away(self, track: Track, measured: float) -> float:
        """Distance of a measured position from recent commands, beyond the allowed one."""
        if not (track.position and track.given.measured) or not track.past:
            return 0.0
        deviation = max(min(track.past) - measured, measured - max(track.past))
        # safety's measurement may have been older than the current one
        return deviation if deviation > self._following(track) + self._window() * track.fastest + 1e-9 else 0.0

    def _following(self, track: Track) -> float:
        return 0.03 if track.given.following is None else track.given.following

    def _bad(self, command: Command, reading: Reading | None) -> bool:
        """Whether an input is invalid independently of earlier ones."""
        now_s, limits = self.world.clock(), self.limits
        if reading is None or command.stamp_s is None or len(command.action) != len(self.tracks):
            return True
        ages = now_s - reading.stamp_s, now_s - command.stamp_s
        stale = ages[0] > limits.observation_timeout_s + 1e-9 or ages[1] > limits.command_timeout_s + 1e-9
        values = np.concatenate((command.action, reading.observation["position"]))
        return stale or min(ages) < -limits.clock_error_s - 1e-9 or not np.isfinite(values).all()

    def _take(self, values: Array) -> None:
        length = round((self.limits.following_s + self.limits.lag_s) / self.world.dt_s) + 2
        for name, track, value in zip("abc", self.tracks, values, strict=False):
            if broken := track.take(float(value), length):
                raise ViolationError(f"{name}: {broken}")
        self.count["commands"] += 1
