"""Drones of four, six or eight rotors, all with the commands of a drone of four.

Rotor i of N stands at the angle -pi (2 i + 1) / N from the front on an ellipse through the rotors of an X of four with
the same arms: clockwise seen from above, the first to the right of the front; neighbours turn in opposite directions.
The commands of four rotors have a mean and parts of roll, pitch and yaw. Each rotor of N takes the mean and, by its
place, its share of these parts, as in the mixers of flight controllers. The drone therefore turns like a drone of four
whose rotors have N / 4 times the thrust, until a rotor reaches a limit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

from sims.tracer.arithmetic import Rows, Value, where

COUNTS = (4, 6, 8)
MOST = max(COUNTS)


@dataclass(frozen=True)
class Rotors:
    """The rotors of a drone.

    Attributes:
        places: for each rotor, its distance forward and to the left, in the arms of a drone of four, and the sign of
            its reaction torque about z: three rows each.
        shares: for each rotor, its part of the total in quarters: 1 of four rotors; 0 for rotors that the drone lacks.
    """

    places: list[Rows]
    shares: Rows

    @classmethod
    def of(cls, count: Value) -> Self:
        """`MOST` rotors, of which a drone has the first `count`."""
        zero = 0.0 * count

        def chosen(values: list[float]) -> Value:
            four, six, eight = (zero + value for value in values)
            return where(count < 5.0, four, where(count < 7.0, six, eight))

        rows = [[(*place(i, n), 4.0 / n) if i < n else (0.0,) * 4 for n in COUNTS] for i in range(MOST)]
        rotors = [[chosen([row[part] for row in rotor]) for part in range(4)] for rotor in rows]
        return cls([rotor[:3] for rotor in rotors], [rotor[3] for rotor in rotors])

    def mixed(self, four: Rows) -> Rows:
        """Commands of all rotors from those of `four`; rotors that the drone lacks take the mean."""
        mean = 0.25 * (four[0] + four[1] + four[2] + four[3])
        parts = [0.25 * _sum([sign[axis] * value for sign, value in zip(FOUR, four, strict=True)]) for axis in range(3)]
        return [mean + _sum([c * part for c, part in zip(at, parts, strict=True)]) for at in self.places]

    def joined(self, values: Rows) -> Rows:
        """Values of four rotors with the same mean and parts of roll, pitch and yaw; the inverse of `mixed`."""
        weighted = [share * value for share, value in zip(self.shares, values, strict=True)]
        mean = 0.25 * _sum(weighted)
        parts = [
            0.25 * _sum([at[axis] * value for at, value in zip(self.places, weighted, strict=True)])
            for axis in range(3)
        ]
        return [mean + _sum([sign * part for sign, part in zip(signs, parts, strict=True)]) for signs in FOUR]


def place(rotor: int, count: int) -> tuple[float, float, float]:
    """Place of rotor number `rotor` of `count`, as in `Rotors.places`."""
    angle = -math.pi * (2 * rotor + 1) / count
    return math.sqrt(2.0) * math.cos(angle), math.sqrt(2.0) * math.sin(angle), 1.0 if rotor % 2 else -1.0


def _sum(values: Rows) -> Value:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


FOUR = [tuple(float(round(value)) for value in place(rotor, 4)) for rotor in range(4)]
