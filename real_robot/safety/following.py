"""Whether a robot moves as it is commanded: positions near those that were commanded, motion like what was."""

from __future__ import annotations

from collections import deque

from embodied.contract import Contract
from real_robot.safety.limits import INF, ElementLimits, Kind

FOLLOWING = {"rad": 0.1, "m": 0.03}
"""Default of `ElementLimits.following` by unit: what gravity and friction may leave over on a weak arm."""
FOLLOWING_SHARE = 0.05
"""Its default for other units, as a share of the element's range."""


def following(contract: Contract, given: ElementLimits, key: str, reach: float) -> float:
    """How far an element measured by the observation `key` may be off; infinite if nothing is measured or known."""
    if not key:
        return INF
    if given.kind is not Kind.POSITION or given.following is not None:
        return INF if given.following is None else given.following
    return default_following(contract.observation[key].unit, reach)


def default_following(unit: str, reach: float) -> float:
    """Default of `ElementLimits.following` of a position in `unit` that moves over `reach`."""
    return FOLLOWING.get(unit, FOLLOWING_SHARE * reach)


class Motion:
    """Measured against commanded motion over the last `periods`, of an element that is commanded in velocities.

    The robot may follow late, by up to as many periods again, and unevenly, by one period's motion. Motion of up to
    `allowed` is not told from none.
    """

    def __init__(self, periods: int, allowed: float) -> None:
        self._periods, self._allowed = periods, allowed
        self.start()

    def start(self) -> None:
        """The robot begins at rest."""
        self._count, self._fastest = 0, 0.0
        self._commanded = deque([0.0], maxlen=4 * self._periods + 2)
        self._measured: deque[tuple[int, float]] = deque()

    def move(self, step: float) -> None:
        """A period's motion was commanded."""
        self._count += 1
        self._commanded.append(self._commanded[-1] + step)
        self._fastest = max(abs(step), self._fastest * (1.0 - 0.5 / self._periods))

    def away(self, position: float, age: float) -> float:
        """How much the motion up to `position`, measured `age` periods ago, differs from what was commanded; or 0."""
        measured, place = self._measured, self._count - round(age)
        if not measured or place > measured[-1][0]:
            measured.append((place, position))
        while len(measured) > 1 and measured[1][0] <= measured[-1][0] - self._periods:
            measured.popleft()
        (first, begun), (last, ended) = measured[0], measured[-1]
        if last - first < self._periods:
            return 0.0
        moved = ended - begun
        asked = [self._by(last - late) - self._by(first - late) for late in range(self._periods + 1)]
        off = max(min(asked) - moved, moved - max(asked)) - self._fastest
        return off if off > self._allowed else 0.0

    def _by(self, count: int) -> float:
        """Commanded position after `count` periods; before the first, that of the beginning."""
        index = len(self._commanded) - 1 - (self._count - count)
        return self._commanded[min(max(index, 0), len(self._commanded) - 1)]
