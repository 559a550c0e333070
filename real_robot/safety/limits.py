"""Limits on a robot's commands and measurements, as one YAML file."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

from embodied.configuration import (
    Bound,
    Configuration,
    FiniteFloat,
    Limit,
    NonNegativeFloat,
    PositiveFloat,
    Range,
    check_ranges,
)
from embodied.errors import UserError
from real_robot.safety.barrier import Distance
from real_robot.safety.energy_tank import Tank

INF = math.inf


class Kind(Enum):
    """Meaning of an action element.

    POSITION: a joint's position, or any value that is commanded itself: torque, thrust, body rate, steering angle.
    VELOCITY: the derivative of a position. DELTA: an increment of a position per control period. Distance and energy
    are limited by changing velocities, so elements of `Distance` and `Tank` are VELOCITY or DELTA.
    """

    POSITION = "position"
    VELOCITY = "velocity"
    DELTA = "delta"


@dataclass
class ElementLimits(Configuration):
    """Limits of one element of the action.

    `scale` converts the contract's value to the unit of the limits: m of a DELTA, rad/s of a VELOCITY. `low` and `high`
    bound the commanded position; for a VELOCITY or DELTA, they bound the robot's position, which `measured` has to
    name. `velocity`, `acceleration` and `jerk` bound its first three derivatives, per s, s^2 and s^3; for a torque or
    thrust they are its own derivatives. `measured` is the observed element of the position, "joint_position.joint1": a
    POSITION command starts from it, or from `rest` if `measured` is empty, and a measurement that is farther from the
    last one than `velocity` and `following` allow is rejected. A measured position may differ by `following`, in the
    unit of the limits, from all commands of the last `Limits.following_s` and `Limits.lag_s`; by default 0.1 rad, 0.03
    m, or a twentieth of the range. Commands of a VELOCITY or DELTA to a blocked robot do not add up: for these, motion
    in that time is compared, and only if `following` is set.
    """

    kind: Kind = Kind.POSITION
    scale: PositiveFloat = 1.0
    low: Bound = -INF
    high: Bound = INF
    velocity: Limit = INF
    acceleration: Limit = INF
    jerk: Limit = INF
    measured: str = ""
    rest: FiniteFloat = 0.0
    following: PositiveFloat | None = None

    @property
    def limited(self) -> bool:
        """Whether any limit is finite."""
        bounds = (self.low, self.high, self.velocity, self.acceleration, self.jerk)
        return any(math.isfinite(bound) for bound in bounds)

    def __post_init__(self) -> None:
        """Raise UserError for limits that cannot be met."""
        super().__post_init__()
        if not self.low < self.high:
            raise UserError(f"expected low < high, got {self}")
        if self.following is not None and not self.measured:
            raise UserError(f"expected `measured`, the position that `following` compares, got {self}")
        if self.kind is not Kind.POSITION and not self.measured and (self.low, self.high) != (-INF, INF):
            raise UserError(f"expected `measured`, the observed position that {self.low} and {self.high} bound")


@dataclass
class ObservedRange(Configuration):
    """Bounds of an observed element: outside them the robot is stopped until `Safety.reset`.

    If `rate` names the observed derivative, the robot holds as soon as one more command could lead to a state from
    which it can't stop inside: commands reach at most `acceleration`, the robot's own hold at least `deceleration`, per
    s^2. This geofence works for any action.
    """

    low: Bound = -INF
    high: Bound = INF
    rate: str = ""
    acceleration: NonNegativeFloat = 0.0
    deceleration: Limit = INF

    def __post_init__(self) -> None:
        """Raise UserError for an empty range."""
        super().__post_init__()
        if not self.low < self.high:
            raise UserError(f"expected low < high, got {self}")
        if not self.rate and (self.acceleration, self.deceleration) != (0.0, INF):
            raise UserError(f"expected `rate`, the observed derivative that `acceleration` changes, got {self}")


@dataclass
class Limits(Configuration):
    """Limits and time-outs that `safety.Safety` enforces.

    `commands` are limits of action elements by name (by number if the contract has no names); elements without limits
    need low and high in the contract. `observed` bounds observed elements, "joint_torque.joint1" or "position.z". The
    body's z axis may tilt at most `tilt_rad` from the world's, according to the observation `attitude`: a rotation
    matrix with elements named "zz" or a quaternion x, y, z, w. A measurement is stale after `observation_timeout_s`, a
    command after `command_timeout_s`. The computers' clocks differ by at most `clock_error_s`: stamps may be that far
    in the future, and walls are enforced as if measurements were older by as much. The robot completes a command within
    `lag_s` (about four time constants of a first-order lag). Walls, distances and fences are enforced in spite of this
    lag, and in spite of missing commands for up to `command_timeout_s`. After a fault the robot moves again once
    `recovery_s` of control periods in a row were good.
    """

    commands: dict[str, ElementLimits] = field(default_factory=dict)
    observed: dict[str, ObservedRange] = field(default_factory=dict)
    attitude: str = ""
    tilt_rad: Annotated[float, Range(above=0, at_most=math.pi)] = math.pi
    distance: Distance | None = None
    tank: Tank | None = None
    observation_timeout_s: PositiveFloat = 0.1
    command_timeout_s: PositiveFloat = 0.1
    clock_error_s: NonNegativeFloat = 0.05
    lag_s: NonNegativeFloat = 0.0
    following_s: PositiveFloat = 0.3
    recovery_s: NonNegativeFloat = 0.5

    def __post_init__(self) -> None:
        """Raise UserError for times or angles out of range."""
        super().__post_init__()
        if bool(self.attitude) != (self.tilt_rad < math.pi):
            raise UserError("expected `attitude` and `tilt_rad` together: an observation and its largest tilt")


def load_limits(path: Path) -> Limits:
    """Read a YAML file of the fields of `Limits`.

    Raises:
        UserError: for unknown fields, wrong types and impossible limits.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        written = _with_floats_in_rows(OmegaConf.to_container(OmegaConf.load(path)))
        config = OmegaConf.merge(OmegaConf.structured(Limits), written)
        check_ranges(config, f"{path}: ")
        limits = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        raise UserError(f"{path}: {str(error).splitlines()[0]}") from error
    except YAMLError as error:
        raise UserError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    assert isinstance(limits, Limits)
    return limits


def _with_floats_in_rows(tree: Any, depth: int = 0) -> Any:  # noqa: ANN401 - values of YAML
    """Copy of `tree` with floats for integers in lists of lists, where OmegaConf does not convert them."""
    if isinstance(tree, dict):
        return {key: _with_floats_in_rows(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_with_floats_in_rows(value, depth + 1) for value in tree]
    return float(tree) if depth > 1 and isinstance(tree, int) and not isinstance(tree, bool) else tree


def read_limits(path: str) -> Limits:
    """Load the limits of the YAML file at `path`; for "", return only the contract's limits."""
    return load_limits(Path(path)) if path else Limits()
