"""A bound on the energy that commands may put into the world: a passivity filter with an energy tank.

The robot's port to the world carries the power F v. A learned controller may put in any amount; here it can spend only
the tank's content, which starts with a budget and is refilled by energy that the world returns (Ferraguti et al. 2015,
IEEE T-RO 31(5); energy budgets: Schindlbeck and Haddadin 2015, ICRA). If a command would overdraw the tank, all
elements that do work are scaled by one factor, which preserves the direction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from embodied.configuration import Configuration, NonNegativeFloat
from embodied.errors import UserError

HALVINGS = 20


@dataclass
class Tank(Configuration):
    """Energy in J: `start_j` at a reset, at most `most_j`, with `reserve_j` kept for braking.

    `elements` are the action elements that do work, of kind VELOCITY or DELTA. `conjugate` are the observed elements
    that, multiplied by them, give the power put into the world, W: the force or torque that the robot exerts along the
    velocity. A DELTA is divided by the period first.
    """

    elements: list[str] = field(default_factory=list)
    conjugate: list[str] = field(default_factory=list)
    start_j: NonNegativeFloat = 1.0
    most_j: NonNegativeFloat = 2.0
    reserve_j: NonNegativeFloat = 0.0

    def __post_init__(self) -> None:
        """Raise UserError if the pairs or the energies do not fit."""
        super().__post_init__()
        if not self.elements or len(self.elements) != len(self.conjugate):
            raise UserError(f"expected one conjugate for each element, got {self.elements} and {self.conjugate}")
        if not self.reserve_j <= self.start_j <= self.most_j:
            raise UserError(f"expected reserve_j <= start_j <= most_j, got {self}")


class EnergyTank:
    """The state of the tank, updated every period."""

    def __init__(self, tank: Tank) -> None:
        self._tank = tank
        self.energy_j = tank.start_j

    def reset(self) -> None:
        """Refill the tank to its initial content."""
        self.energy_j = self._tank.start_j

    def share(self, energy_j: Callable[[float], float]) -> float:
        """The factor in [0, 1] by which a motion is scaled so that it does not overdraw the tank.

        `energy_j` is the work of the motion scaled by a factor, the stop after it included; 0 for the factor 0.
        """
        available_j = max(self.energy_j - self._tank.reserve_j, 0.0)
        if energy_j(1.0) <= available_j:
            return 1.0
        share = 0.0
        step = 0.5
        for _ in range(HALVINGS):  # bisection, as the work is not linear in the factor: braking grows with its square
            if energy_j(share + step) <= available_j:
                share += step
            step *= 0.5
        return share

    def spend(self, flow: Sequence[float], effort: Sequence[float], dt_s: float) -> None:
        """Account for the command; returned energy refills the tank."""
        # work done on the world in this period: F v dt; negative if the world returns energy
        work_j = sum(map(float.__mul__, flow, effort)) * dt_s
        self.energy_j = min(self.energy_j - work_j, self._tank.most_j)
