"""The scripted motion that brings a robot to where its episodes begin."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from embodied.contract import Contract
from embodied.errors import UserError
from real_robot.robots.robot import Array
from real_robot.safety.filters import action_names
from real_robot.safety.limits import Kind, Limits


@dataclass(frozen=True)
class Homing:
    """Actions `waypoints` [W, A], each of which is commanded for `waypoint_s` seconds through safety.

    Positions are approached as fast as the limits allow, velocities and displacements last for that time.
    """

    waypoints: Sequence[Sequence[float]] = ()
    waypoint_s: float = 3.0

    def check(self, contract: Contract, limits: Limits) -> None:
        """Check that the robot of `contract` can be moved home within its `limits`.

        Raises:
            UserError: for waypoints of another size or outside the action's limits, and for positions without a limit
            of
                velocity, to which the robot would jump.
        """
        names = action_names(contract)
        low, high = (np.array(bound or (sign * np.inf,) * len(names)) for sign, bound in _bounds(contract))
        for waypoint in self.waypoints:
            if len(waypoint) != len(names):
                raise UserError(f"expected a waypoint of {', '.join(names)}, got {list(waypoint)}")
            if not ((low <= waypoint) & (waypoint <= high)).all():
                raise UserError(f"the waypoint {list(waypoint)} is outside the action's limits {low} to {high}")
        jumps = [name for name in names if _jumps(limits, name)]
        if self.waypoints and jumps:
            raise UserError(
                f"the robot would jump to a waypoint, as {', '.join(jumps)} have no limit of velocity; set one in"
                " robot.limits=FILE"
            )

    def commands(self, period_s: float) -> Iterator[tuple[Array, int]]:
        """Each waypoint [A] and the number of control periods in which it is commanded."""
        periods = max(1, math.ceil(self.waypoint_s / period_s - 1e-9))
        for waypoint in self.waypoints:
            yield np.array(waypoint, np.float64), periods


def _bounds(contract: Contract) -> tuple[tuple[float, tuple[float, ...]], tuple[float, tuple[float, ...]]]:
    return (-1.0, contract.action.low), (1.0, contract.action.high)


def _jumps(limits: Limits, name: str) -> bool:
    """Whether element `name` is a position that may change at any speed."""
    element = limits.commands.get(name)
    return element is None or (element.kind is Kind.POSITION and not math.isfinite(element.velocity))
