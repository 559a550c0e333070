"""Whether measured positions are consistent with each other: drivers send single messages of zeros, encoders jump."""

from __future__ import annotations

import math

from embodied.contract import Contract
from real_robot.robots.robot import Array, Reading
from real_robot.safety.element import Element, observed_element
from real_robot.safety.following import default_following
from real_robot.safety.limits import ElementLimits, Kind, Limits

HAND_SPEED = 3.0
"""Speed at which somebody may move a robot that is not commanded, in the unit of the element per s."""
START_READINGS = 3
"""Number of consistent measurements in a row from which a motion may start."""


class Consistency:
    """Accepts measurements whose positions moved no farther since the last accepted one than limits allow.

    Compared are the positions that `ElementLimits.measured` names and whose velocity is limited: they may have moved by
    velocity times the time between the stamps, and by `following`, which a robot may catch up at once.
    """

    def __init__(self, contract: Contract, limits: Limits) -> None:
        self._rows: list[tuple[str, Element, float, float]] = []
        action = contract.action
        for name, given in limits.commands.items():
            if not given.measured:
                continue
            speed = _speed(contract, given, action.names.index(name) if name in action.names else int(name))
            element = observed_element(contract, given.measured)
            reach = min(given.high - given.low, speed)  # of an element in another unit without walls
            allowance = given.following or default_following(contract.observation[element[0]].unit, reach)
            if math.isfinite(speed):
                self._rows.append((name, element, speed, allowance))
        self.rejected = 0
        """Number of rejected measurements."""
        self.reset()

    def reset(self) -> None:
        """Forget all measurements."""
        self.accepted: Reading | None = None
        self.fault = ""
        """Why the newest measurement was rejected; "" if it was accepted."""
        self.keys: set[str] = set()
        """Observation keys that are inconsistent in the newest measurement."""
        self._newest: Reading | None = None
        self._streak, self._counted = 0, (-math.inf, -math.inf)

    @property
    def settled(self) -> bool:
        """Whether enough measurements in a row were consistent to start a motion from them."""
        return not self._rows or self._streak >= START_READINGS

    def take(self, reading: Reading, commanded: bool) -> Reading:
        """The newest accepted measurement, after `reading`; the robot is `commanded`, or may be moved by hand."""
        newest = self._newest
        same = newest is not None and (reading.sequence, reading.stamp_s) == (newest.sequence, newest.stamp_s)
        if same and self.accepted is not None:
            return self.accepted
        self._newest = reading
        self.fault, self.keys = "", set()
        if self.accepted is not None:
            self._compare(self.accepted, reading, commanded)
        if self.fault:
            self.rejected += 1
            self._streak = 0
        else:
            self.accepted = reading
            stamps = reading.stamp_s, reading.newest_s
            # of several topics all have news; a simulator in lock-step repeats all
            if reading.stamp_s > self._counted[1] or stamps == self._counted:
                self._streak, self._counted = self._streak + 1, stamps
        assert self.accepted is not None
        return self.accepted

    def begin_anew(self) -> None:
        """Accept the newest measurement, though it contradicts those before, as the first one."""
        self.accepted, self._streak = self._newest, 1

    def _compare(self, last: Reading, reading: Reading, commanded: bool) -> None:
        elapsed_s = max(reading.stamp_s - last.stamp_s, 0.0)
        for name, element, speed, allowance in self._rows:
            fastest = speed if commanded else max(speed, HAND_SPEED)
            moved = abs(_value(reading.observation, element) - _value(last.observation, element))
            if moved > (most := fastest * elapsed_s + allowance):
                self.keys.add(element[0])
                self.fault = self.fault or (
                    f"{name} is measured {moved:.3g} from where it was {elapsed_s:.3g} s ago, at most {most:.3g} is"
                    " possible: check the sensor and its driver"
                )


def _value(observation: dict[str, Array], element: Element) -> float:
    return float(observation[element[0]][element[1]])


def _speed(contract: Contract, given: ElementLimits, index: int) -> float:
    """Largest speed of an element, in the unit of its limits per s."""
    action, speed = contract.action, given.velocity
    if given.kind is not Kind.POSITION and action.low and action.high:
        bound = max(abs(action.low[index]), abs(action.high[index])) * given.scale
        speed = min(speed, bound if given.kind is Kind.VELOCITY else bound / contract.control_dt_s)
    return speed
