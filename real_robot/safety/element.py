"""One limited element of an action: the contract's units outside, an `Axis` counted in periods inside."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from embodied.contract import Contract
from embodied.errors import UserError
from real_robot.robots.robot import Array
from real_robot.safety.axis import Axis
from real_robot.safety.following import Motion, default_following, following
from real_robot.safety.limits import INF, ElementLimits, Kind, Limits

Element = tuple[str, int]
"""Key of an observation and index in its last axis."""


FOLLOWED_S = 2.0
"""Time for which the motion of an element that is commanded in velocities is kept to compare it with measurements."""


def observed_element(contract: Contract, name: str) -> Element:
    """The observation key and index of "key.element"; elements without names have numbers.

    Raises:
        UserError: if the contract's observation has no such element.
    """
    key, _, element = name.partition(".")
    spec = contract.observation.get(key)
    if spec is not None and not spec.privileged and len(spec.shape) == 1:
        names = spec.names or tuple(map(str, range(spec.shape[0])))
        if element in names:
            return key, names.index(element)
    keys = [key for key, spec in contract.observation.items() if not spec.privileged and len(spec.shape) == 1]
    raise UserError(f"no observed element {name!r}; expected key.element with a key of {keys}")


class LimitedElement:
    """The `element_limits` of element `index` of an action, whose values are within `command`.

    After a pause a position begins where it was commanded last, if the robot is measured near there, or if it is not
    measured and `stays` where it was commanded to.

    Raises:
        UserError: if it can't stand still within its limits.
    """

    def __init__(
        self,
        contract: Contract,
        limits: Limits,
        index: int,
        element_limits: ElementLimits,
        command: tuple[float, float],
        stays: bool,
    ) -> None:
        dt_s = contract.control_dt_s
        self.index = index
        self._measured = observed_element(contract, element_limits.measured) if element_limits.measured else None
        self._from = element_limits.rest
        self._stays = stays
        self._commanded_once = False
        self._position = element_limits.kind is Kind.POSITION
        self._moves_on = element_limits.kind is Kind.VELOCITY  # while nothing is commanded
        self._scale = element_limits.scale * (dt_s if self._moves_on else 1.0)
        # A measurement may be older than it says, and what was commanded before it may not have been done yet.
        self._error = (limits.clock_error_s + limits.lag_s) / dt_s
        self._lag = math.ceil(limits.lag_s / dt_s) + 1
        # last positions, or motion per period, newest first: as far back as a measurement may lie
        oldest_s = limits.following_s if self._position else limits.observation_timeout_s + limits.clock_error_s
        oldest_s += limits.lag_s + (0.0 if self._position else FOLLOWED_S)
        self._past = deque[float](maxlen=math.ceil(oldest_s / dt_s) + 1)
        self._since = 0  # periods since the last accepted measurement, for `leads`
        low, high = (float(bound) * self._scale for bound in command)
        fastest = element_limits.velocity * dt_s
        b = element_limits.acceleration * dt_s**2
        c = element_limits.jerk * dt_s**3
        if self._position:
            low = max(low, element_limits.low)
            high = min(high, element_limits.high)
            if not low <= element_limits.rest <= high and self._measured is None:
                raise UserError(f"expected rest inside {low} to {high}, got {element_limits.rest}")
            self._axis = Axis(low, high, -fastest, fastest, b, c)
        else:
            if not low <= 0.0 <= high:
                raise UserError(f"expected a velocity whose limits contain zero, got {command}")
            pause = limits.command_timeout_s / dt_s if self._moves_on else 0.0
            self._axis = Axis(
                element_limits.low, element_limits.high, max(low, -fastest), min(high, fastest), b, c, pause
            )
        self._walls = self._axis.low, self._axis.high
        self._following = following(contract, element_limits, self._measured[0] if self._measured else "", high - low)
        unit = contract.observation[self._measured[0]].unit if self._measured else ""
        self._tolerance = element_limits.following or default_following(unit, high - low)
        self._motion = Motion(math.ceil(max(limits.following_s, limits.lag_s) / dt_s), self._following)

    def startable(self, observation: dict[str, Array], periods: int) -> bool:
        """Whether a motion may start, `periods` after the last command.

        A position may be outside its limits by what one period can move, and by what the robot may be off.
        """
        if not self._position:
            return True
        axis = self._axis
        position = self._origin(observation, periods)
        return max(axis.low - position, position - axis.high) <= min(axis.fastest, self._following)

    def start(self, observation: dict[str, Array], periods: int) -> None:
        """Start at rest, `periods` after the last command; a position starts inside its limits."""
        axis = self._axis
        if not self._position:
            self._past.extendleft([0.0] * min(periods, self._past.maxlen or 0))  # what was commanded may be done late
            axis.start(0.0)
            self._motion.start()
            return
        position = min(max(self._origin(observation, periods), axis.low), axis.high)
        axis.start(position)
        self._past.clear()
        self._past.appendleft(position)

    def _origin(self, observation: dict[str, Array], periods: int) -> float:
        """Position where a motion starts: commanded last if the robot followed it there, else where it is measured.

        A robot that sags under its weight would otherwise be commanded to jump by as much, and lower at each start.
        """
        if self._measured is None:
            return self._from
        measured = self._read(observation)
        lately = [self._from] * min(periods, self._lag) + list(self._past)
        follows = self._commanded_once and _away(measured, lately[: self._lag]) <= self._following
        return self._from if follows else measured

    def apply(self, value: float, observation: dict[str, Array], age: float) -> float:
        """The value to command for `value`; the measurement is `age` periods old, and has moved since."""
        axis = self._axis
        if self._position:
            axis.toward(value * self._scale)
            return self._commanded()
        if self._measured is not None:
            moved, back, ahead = self._moved(age)
            axis.p = self._read(observation) + moved
            axis.low = self._walls[0] + back
            axis.high = self._walls[1] - ahead
        axis.at_velocity(value * self._scale)
        return self._moving()

    def idle(self, periods: int, silent: bool, stands: bool) -> None:
        """Account for `periods` in which nothing was commanded.

        A velocity goes on meanwhile, unless the robot `stands` still by then by its own time-out. Positions and
        displacements stand still by themselves; if the pause was so long that the program counts as `silent`, they
        begin at rest, otherwise a command was a little late.
        """
        axis = self._axis
        if stands or (silent and not self._moves_on):
            axis.start(axis.p)
        position = axis.p if self._position else axis.w if self._moves_on else 0.0
        count = min(periods, self._past.maxlen or 0)
        self._past.extendleft([position] * count)
        self._since += periods
        if stands:
            self._motion.start()
        elif not self._position:
            for _ in range(count):
                self._motion.move(position)

    def stop(self, rest: float) -> float:
        """The value to command next in order to stand still at the value `rest`.

        A velocity, and a position whose `rest` is NaN, follow the stop that was certified with the last command; no
        measurement is needed.
        """
        axis = self._axis
        if not self._position:
            axis.stop()
            return self._moving()
        if math.isnan(rest):
            axis.stop()
            axis.p = min(max(axis.p, axis.low), axis.high)  # its last step may round past the wall that it ends at
        else:
            axis.rest_at(rest * self._scale)
        return self._commanded()

    def stopped(self, rest: float) -> bool:
        """Whether `stop` has ended."""
        axis = self._axis
        if not self._position or math.isnan(rest):
            return axis.still
        return axis.still and axis.p == min(max(rest * self._scale, axis.low), axis.high)

    def lag(self, observation: dict[str, Array], age: float) -> float:
        """How far the measured position, or motion, is from all that was commanded lately; 0 where that is allowed.

        The measurement is `age` periods old.
        """
        if self._following == INF:
            return 0.0
        measured = self._read(observation)
        if not self._position:
            return self._motion.away(measured, age)
        away = _away(measured, self._past)
        return away if away > self._following else 0.0

    def travel(self, value: float) -> float:
        """Way of the stop after a period at the rate `value`, in the unit of the limits and with its sign.

        w^2 / 2B, and w B / 2C and a whole period more where the jerk is limited; whole periods included.
        """
        w = abs(value * self._scale)
        B = self._axis.most_b
        C = self._axis.most_c
        if w <= B and C >= 2.0 * B:
            return 0.0  # within a period
        way = 0.5 * w * w / B + (0.5 * w * (B / C + 1.0) if C < 2.0 * B else 0.0)
        return math.copysign(way, value)

    def mark(self) -> None:
        """A measurement has been accepted, from which `leads` counts."""
        self._since = 0

    def leads(self, accepted: dict[str, Array], observation: dict[str, Array], age: float) -> bool:
        """Whether commands may have led the robot from an `accepted` measurement to another one, `age` periods old."""
        if self._measured is None or not self._past:
            return True
        measured = self._read(observation)
        if self._position:
            return _away(measured, self._past) <= self._following
        steps = list(self._past)
        late = math.ceil(age) + self._lag
        ways = [sum(steps[after : after + self._since]) for after in range(late + 1)]
        return _away(measured - self._read(accepted), ways) <= self._tolerance

    def reach(self) -> tuple[float, float]:
        """The values that can be commanded next, as far as derivatives are limited."""
        axis = self._axis
        now = axis.p if self._position else axis.w
        b_low = max(axis.b - axis.most_c, -axis.most_b)
        b_high = min(axis.b + axis.most_c, axis.most_b)
        if self._position:
            low = now + axis.w + b_low
            high = now + axis.w + b_high
        else:
            low = max(now + b_low, axis.slowest)
            high = min(now + b_high, axis.fastest)
        return low / self._scale, high / self._scale

    def _moved(self, age: float) -> tuple[float, float, float]:
        """Motion over the last `age` periods, and how much less or more it was if the measurement is older.

        It may be older by what clocks differ.
        """
        moved = total = least = most = 0.0
        for number, step in enumerate(self._past):
            remaining = age + self._error - number
            if remaining <= 0.0:
                break
            total += step * min(remaining, 1.0)
            if number < age:
                moved += step * min(age - number, 1.0)
                least = most = moved
            least = min(least, total)
            most = max(most, total)
        return moved, moved - least, most - moved

    def _moving(self) -> float:
        w = self._axis.w
        self._past.appendleft(w)
        self._since += 1
        self._motion.move(w)
        return w / self._scale

    def _commanded(self) -> float:
        self._past.appendleft(self._axis.p)
        if self._stays:
            self._from = self._axis.p
            self._commanded_once = True
        return self._axis.p / self._scale

    def _read(self, observation: dict[str, Array]) -> float:
        key, index = self._measured or ("", 0)
        return float(observation[key][index])


def _away(measured: float, commanded: Iterable[float]) -> float:
    """How far a `measured` position is outside of all that were `commanded`."""
    positions = list(commanded)
    return max(min(positions) - measured, measured - max(positions), 0.0)
