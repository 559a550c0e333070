"""A bound on the energy that commands may put into the world: a passivity filter with an energy tank.

The robot's port with the world carries the power F v. A controller that learned may put in any amount; here it may
spend only what is in a tank, which begins with a budget and is filled by what the world gives back (Ferraguti et al.
2015, IEEE T-RO 31(5); energy budgets: Schindlbeck and Haddadin 2015, ICRA). Where a command would overdraw it, all
elements that do work are scaled by one factor, so direction is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from embodied.errors import UserError


@dataclass
class Tank:
    """Energy in J: `start_j` at a reset, at most `most_j`, of which `reserve_j` is left for braking.

    `elements` are the action elements that do work; `conjugate` the observed element by which each is multiplied to
    give power put into the world, W: of a velocity the force or torque that the robot exerts along it, of a torque
    command the joint's velocity. A DELTA or POSITION command is divided by the period first.
    """

    elements: list[str] = field(default_factory=list)
    conjugate: list[str] = field(default_factory=list)
    start_j: float = 1.0
    most_j: float = 2.0
    reserve_j: float = 0.0

    def __post_init__(self) -> None:
        """Raise UserError where the pairs or the energies do not fit."""
        if not self.elements or len(self.elements) != len(self.conjugate):
            raise UserError(f"expected one conjugate for each element, got {self.elements} and {self.conjugate}")
        if not 0 <= self.reserve_j <= self.start_j <= self.most_j:
            raise UserError(f"expected 0 <= reserve_j <= start_j <= most_j, got {self}")


class EnergyTank:
    """The tank as it is drawn from, one period at a time."""

    def __init__(self, tank: Tank) -> None:
        self._tank = tank
        self.energy_j = tank.start_j

    def reset(self) -> None:
        """Fill it to where it starts."""
        self.energy_j = self._tank.start_j

    def share(self, flow: Sequence[float], effort: Sequence[float], dt_s: float) -> float:
        """The factor in [0, 1] for `flow` with which flow effort dt_s does not overdraw the tank."""
        asked = sum(map(float.__mul__, flow, effort)) * dt_s
        left = max(self.energy_j - self._tank.reserve_j, 0.0)
        return 1.0 if asked <= left else left / asked

    def spend(self, flow: Sequence[float], effort: Sequence[float], dt_s: float) -> None:
        """Account for what was commanded; what flows back fills the tank."""
        given = sum(map(float.__mul__, flow, effort)) * dt_s
        self.energy_j = min(self.energy_j - given, self._tank.most_j)
