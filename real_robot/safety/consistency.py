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
    velocity times the time between the stamps, and by `following`, which a robot may catch up at once. The observations
    that have them are `keys`.
    """

    def __init__(self, contract: Contract, limits: Limits) -> None:
        self._rows: list[tuple[str, Element, float, float]] = []
        action = contract.action
        for name, element_limits in limits.commands.items():
            if not element_limits.measured:
                continue
            speed = _speed(contract, element_limits, action.names.index(name) if name in action.names else int(name))
            element = observed_element(contract, element_limits.measured)
            reach = min(element_limits.high - element_limits.low, speed)  # of an element in another unit without walls
            allowance = element_limits.following or default_following(contract.observation[element[0]].unit, reach)
            if math.isfinite(speed):
                self._rows.append((name, element, speed, allowance))
        self.keys = {element[0] for _, element, _, _ in self._rows}
        self._long = max(math.ceil(limits.recovery_s / contract.control_dt_s), START_READINGS)
        self._gap_s = limits.observation_timeout_s
        self._convincing = START_READINGS + math.ceil(limits.lag_s / contract.control_dt_s)
        self.rejected = 0
        """Number of rejected measurements."""
        self.reset()

    def reset(self) -> None:
        """Forget all measurements: the robot may be anywhere."""
        self.accepted: Reading | None = None
        self.fault = ""
        """Why the newest measurement was rejected; "" if it was accepted."""
        self._newest: Reading | None = None
        self._commanded_s = self._idle_s = 0.0  # since `accepted`
        self._needed = START_READINGS
        self._streak = 0
        self._astray = self._followed = 0  # rejected measurements of this fault; those in a row where commands led
        self._counted = -math.inf, -math.inf  # oldest and newest stamp of the measurement that was counted last
        self._trusted = False  # whether enough of them have been consistent once

    @property
    def settled(self) -> bool:
        """Whether enough measurements in a row were consistent to start a motion from them."""
        return not self._rows or self._streak >= self._needed

    def take(self, reading: Reading, idle_s: float, follows: bool) -> Reading:
        """The newest accepted measurement, after `reading`.

        The robot has not been commanded for `idle_s`, and may be moved by hand since; `follows` says whether it is
        measured where commands lead it. Once a measurement has been rejected, the robot has to be measured there again,
        or, if it was not commanded meanwhile, where it was; once several have been, it has to be measured there
        START_READINGS times in a row, and for as long as it may lag. The rejected measurement itself counts once,
        however often it comes again with news of other parts. While the first measurements contradict each other, none
        is trusted: the newest is accepted. After a contradiction a motion starts only after `Limits.recovery_s` without
        another one.
        """
        before = self._newest
        self._newest = reading
        if before is None:
            self.accepted = reading
            self._count(reading)
            return reading
        if (reading.sequence, reading.stamp_s) == (before.sequence, before.stamp_s):
            return self.accepted
        if reading.stamp_s < before.stamp_s:  # by another clock
            self._counted = -math.inf, -math.inf
        elapsed_s = max(self._stamp_s(reading) - self._stamp_s(before), 0.0)
        if self.fault and self._stamp_s(reading) == self._stamp_s(before):
            return self.accepted  # the rejected positions again, with news of another part only
        if elapsed_s > self._gap_s:  # it may have been moved meanwhile, or the first new measurement may be wrong
            self._streak = min(self._streak, self._needed - START_READINGS)
        idle_s = min(idle_s, elapsed_s)
        self._commanded_s += elapsed_s - idle_s
        self._idle_s += idle_s * (not self.fault)
        if not (self.fault and self._commanded_s):
            self.fault = self._contradiction(self.accepted, reading)
            self._astray = int(bool(self.fault))
            self._followed = 0
        elif not follows:
            self._astray = self._astray + 1
            self._followed = 0
        else:
            # A sensor that stands still is also where commands lead, as they pass by.
            self._followed += 1
            if self._followed >= (1 if self._astray == 1 else self._convincing):
                self.fault = ""
        if not self.fault:
            self.accepted = reading
            self._count(reading)
            self._commanded_s = self._idle_s = 0.0
            return reading
        self.rejected += 1
        self._streak, self._needed = 0, self._long
        if not self._trusted:
            self.accepted = reading
            self.fault = ""
            self._count(reading)
            self._commanded_s = self._idle_s = 0.0
        return self.accepted

    def _stamp_s(self, reading: Reading) -> float:
        """When the compared positions were measured: other parts of the measurement may be older."""
        return min((reading.stamps.get(key, reading.stamp_s) for key in self.keys), default=reading.stamp_s)

    def _count(self, reading: Reading) -> None:
        """Count a consistent measurement, once if it is of several topics of which not all have news.

        A simulator in lock-step repeats all of them.
        """
        stamps = reading.stamp_s, reading.newest_s
        if reading.stamp_s > self._counted[1] or stamps == self._counted:
            self._streak = self._streak + 1
            self._counted = stamps
            self._trusted = self._trusted or self.settled

    def _contradiction(self, last: Reading, reading: Reading) -> str:
        """Description of the first position that moved farther from `last` to `reading` than it can; "" if none did."""
        for name, element, speed, allowance in self._rows:
            most = speed * self._commanded_s + max(speed, HAND_SPEED) * self._idle_s + allowance
            moved = abs(_value(reading.observation, element) - _value(last.observation, element))
            if moved > most:
                ago_s = self._stamp_s(reading) - self._stamp_s(last)
                return (
                    f"{name} is measured {moved:.3g} from where it was {ago_s:.3g} s ago, at most {most:.3g} is"
                    " possible: check the sensor and its driver"
                )
        return ""


def _value(observation: dict[str, Array], element: Element) -> float:
    return float(observation[element[0]][element[1]])


def _speed(contract: Contract, element_limits: ElementLimits, index: int) -> float:
    """Largest speed of an element, in the unit of its limits per s."""
    action = contract.action
    speed = element_limits.velocity
    if element_limits.kind is not Kind.POSITION and action.low and action.high:
        bound = max(abs(action.low[index]), abs(action.high[index])) * element_limits.scale
        speed = min(speed, bound if element_limits.kind is Kind.VELOCITY else bound / contract.control_dt_s)
    return speed
