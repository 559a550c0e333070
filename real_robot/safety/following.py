"""Checks that a robot follows its commands: measured positions are compared with commanded ones, motion likewise."""

from __future__ import annotations

from collections import deque

from embodied.contract import Contract
from real_robot.safety.limits import INF, ElementLimits, Kind

FOLLOWING = {"rad": 0.1, "m": 0.03}
"""Default of `ElementLimits.following` by unit: the error that gravity and friction may leave on a weak arm."""
FOLLOWING_SHARE = 0.05
"""Default of `ElementLimits.following` for other units, as a share of the element's range."""


def following(contract: Contract, element_limits: ElementLimits, key: str, reach: float) -> float:
    """Allowed error of an element measured by the observation `key`; infinite if it is not measured or not compared."""
    if not key:
        return INF
    if element_limits.kind is not Kind.POSITION or element_limits.following is not None:
        return INF if element_limits.following is None else element_limits.following
    return default_following(contract.observation[key].unit, reach)


def default_following(unit: str, reach: float) -> float:
    """Default of `ElementLimits.following` of a position in `unit` that moves over `reach`."""
    return FOLLOWING.get(unit, FOLLOWING_SHARE * reach)


class Motion:
    """Compares measured with commanded motion over the last `periods`, for an element commanded in velocities.

    The robot may follow late, by up to as many periods again, and unevenly, by one period's motion. Differences of up
    to `allowed` are ignored.
    """

    def __init__(self, periods: int, allowed: float) -> None:
        self._periods = periods
        self._allowed = allowed
        self.start()

    def start(self) -> None:
        """Begin at rest, without past commands and measurements."""
        self._count = 0
        self._fastest = 0.0
        self._commanded = deque([0.0], maxlen=4 * self._periods + 2)
        self._measured: deque[tuple[int, float]] = deque()

    def move(self, step: float) -> None:
        """Add one period's commanded motion `step`."""
        self._count += 1
        self._commanded.append(self._commanded[-1] + step)
        self._fastest = max(abs(step), self._fastest * (1.0 - 0.5 / self._periods))

    def away(self, position: float, age: float) -> float:
        """Difference of the motion to `position`, measured `age` periods ago, from commanded motion; 0 if allowed."""
        measurements = self._measured
        period = self._count - round(age)
        if not measurements or period > measurements[-1][0]:
            measurements.append((period, position))
        while len(measurements) > 1 and measurements[1][0] <= measurements[-1][0] - self._periods:
            measurements.popleft()
        (first, begin_position), (last, end_position) = measurements[0], measurements[-1]
        if last - first < self._periods:
            return 0.0
        measured_motion = end_position - begin_position
        # commanded motion over the same time if the robot follows 0, 1, ... periods late
        commanded_motions = [self._by(last - delay) - self._by(first - delay) for delay in range(self._periods + 1)]
        error = max(min(commanded_motions) - measured_motion, measured_motion - max(commanded_motions)) - self._fastest
        return error if error > self._allowed else 0.0

    def _by(self, count: int) -> float:
        """Commanded position after `count` periods; before the first period, the initial position."""
        index = len(self._commanded) - 1 - (self._count - count)
        return self._commanded[min(max(index, 0), len(self._commanded) - 1)]
