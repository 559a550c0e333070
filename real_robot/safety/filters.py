"""The filters of a valid command: distance, energy, and the limits of every element, in this order."""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from embodied.contract import Contract
from embodied.errors import UserError
from real_robot.robots.robot import Array
from real_robot.safety.axis import Axis
from real_robot.safety.barrier import Barrier, Distance
from real_robot.safety.energy_tank import EnergyTank, Tank
from real_robot.safety.limits import INF, ElementLimits, Kind, Limits

Element = tuple[str, int]
"""Key of an observation and index in its last axis."""


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
    known = [key for key, spec in contract.observation.items() if not spec.privileged and len(spec.shape) == 1]
    raise UserError(f"no observed element {name!r}; expected key.element with a key of {known}")


class Filters:
    """Turns a valid action [A] into one inside all limits.

    Raises:
        UserError: for limits of elements that the contract does not have, and for elements without any.
    """

    def __init__(self, contract: Contract, limits: Limits) -> None:
        self._dt_s = contract.control_dt_s
        self._oldest = math.ceil(limits.observation_timeout_s / self._dt_s)  # age of a measurement, in periods
        self._names = action_names(contract)
        size = len(self._names)
        self._low = np.array(contract.action.low or (-INF,) * size)
        self._high = np.array(contract.action.high or (INF,) * size)
        self._limits = [limits.commands.get(name) for name in self._names]
        if unknown := set(limits.commands) - set(self._names):
            raise UserError(
                f"unknown elements {sorted(unknown)} in limits; expected elements of the action: {self._names}"
            )
        for name, given, low, high in zip(self._names, self._limits, self._low, self._high, strict=True):
            if math.isinf(high - low) and not (given and given.limited):
                raise UserError(f"no limits for action element {name!r}: give low and high, or name it in `commands`")
        self._axes = [self._element(contract, index) for index, given in enumerate(self._limits) if given]
        for index, given in enumerate(self._limits):
            if given and given.kind is not Kind.POSITION:
                fastest = given.velocity / given.scale * (self._dt_s if given.kind is Kind.DELTA else 1.0)
                self._low[index], self._high[index] = max(self._low[index], -fastest), min(self._high[index], fastest)
        box = self._low, self._high
        self._distance = _DistanceFilter(contract, limits, limits.distance, box) if limits.distance else None
        self._tank = _TankFilter(contract, limits, limits.tank) if limits.tank else None

    @property
    def energy_j(self) -> float:
        """Energy left in the tank; infinite without one."""
        return self._tank.tank.energy_j if self._tank else INF

    def reset(self) -> None:
        """Fill the energy tank."""
        if self._tank:
            self._tank.tank.reset()

    def start(self, observation: dict[str, Array]) -> str:
        """Start at rest from the measurement; returns an error text if the robot is outside its limits, else ""."""
        for axis in self._axes:
            if not axis.start(observation):
                return f"{self._names[axis.index]} is outside its limits: move it inside by hand"
        return ""

    def apply(self, action: Array, observation: dict[str, Array], age_s: float) -> Array:
        """The action [A] to write, given an observation of age `age_s`."""
        wanted = np.minimum(np.maximum(action, self._low), self._high)
        if self._distance:
            wanted = self._distance.apply(wanted, observation, self._axes)
        if self._tank:
            wanted = self._tank.apply(wanted, observation)
        values = wanted.tolist()
        for axis in self._axes:
            values[axis.index] = axis.apply(values[axis.index], observation, age_s / self._dt_s)
        written = np.minimum(np.maximum(np.array(values, np.float64), self._low), self._high)
        if self._tank:
            self._tank.spend(written, observation)
        return written

    def _element(self, contract: Contract, index: int) -> _LimitedElement:
        limits = self._limits[index]
        assert limits is not None
        measured = observed_element(contract, limits.measured) if limits.measured else None
        command = self._low[index], self._high[index]
        return _LimitedElement(index, limits, measured, command, self._dt_s, self._oldest)


class _LimitedElement:
    """An action element and its axis: the contract's units outside, periods inside."""

    def __init__(
        self, index: int, limits: ElementLimits, measured: Element | None, command: tuple[float, float], dt_s: float,
        oldest: int,
    ) -> None:  # fmt: skip
        self.index, self._measured, self._rest = index, measured, limits.rest
        self._steps = deque[float](maxlen=oldest)  # last periods, newest first
        self._position = limits.kind is Kind.POSITION
        self._scale = limits.scale * (dt_s if limits.kind is Kind.VELOCITY else 1.0)
        low, high = (float(bound) * self._scale for bound in command)
        fastest = limits.velocity * dt_s
        b, c = limits.acceleration * dt_s**2, limits.jerk * dt_s**3
        if self._position:
            low, high = max(low, limits.low), min(high, limits.high)
            if not low <= limits.rest <= high and measured is None:
                raise UserError(f"expected rest inside {low} to {high}, got {limits.rest}")
            self._axis = Axis(low, high, -fastest, fastest, b, c)
        else:
            if not low <= 0.0 <= high:
                raise UserError(f"expected a velocity whose limits contain zero, got {command}")
            self._axis = Axis(limits.low, limits.high, max(low, -fastest), min(high, fastest), b, c)

    def start(self, observation: dict[str, Array]) -> bool:
        """Start at rest where the element is measured.

        False if a position is further outside than one period can move.
        """
        axis = self._axis
        self._steps.clear()
        if not self._position:
            axis.start(0.0)
            return True
        position = self._rest if self._measured is None else self._read(observation)
        inside = min(max(position, axis.low), axis.high)
        axis.start(inside)
        return abs(position - inside) <= axis.fastest

    def apply(self, value: float, observation: dict[str, Array], age: float) -> float:
        """The value to command for `value`; the measurement is `age` periods old, and has moved since."""
        axis = self._axis
        if self._position:
            return axis.toward(value * self._scale) / self._scale
        if self._measured is not None:
            axis.p = self._read(observation) + self._moved(age)
        self._steps.appendleft(axis.at_velocity(value * self._scale))
        return axis.w / self._scale

    def reach(self) -> tuple[float, float]:
        """The values that can be commanded next, as far as derivatives are limited."""
        axis = self._axis
        now = axis.p if self._position else axis.w
        b_low, b_high = max(axis.b - axis.most_c, -axis.most_b), min(axis.b + axis.most_c, axis.most_b)
        if self._position:
            low, high = now + axis.w + b_low, now + axis.w + b_high
        else:
            low, high = max(now + b_low, axis.slowest), min(now + b_high, axis.fastest)
        return low / self._scale, high / self._scale

    def _moved(self, age: float) -> float:
        """Motion over the last `age` periods, the oldest of them in part."""
        return sum(step * min(age - number, 1.0) for number, step in enumerate(self._steps) if number < age)

    def _read(self, observation: dict[str, Array]) -> float:
        key, index = self._measured or ("", 0)
        return float(observation[key][index])


class _DistanceFilter:
    """Converts between the action's values and velocities for the barrier."""

    def __init__(self, contract: Contract, limits: Limits, distance: Distance, box: tuple[Array, Array]) -> None:
        self._index = action_indices(contract, distance.elements)
        self._low, self._high = (bound[self._index] for bound in box)
        self._scale = np.array([_rate_scale(limits, name, contract.control_dt_s) for name in distance.elements])
        key = distance.position or distance.ranges
        if key not in contract.observation:
            raise UserError(f"no observation {key!r} to keep distance by; expected one of {list(contract.observation)}")
        self._barrier = Barrier(distance, contract.control_dt_s)

    def apply(self, wanted: Array, observation: dict[str, Array], axes: list[_LimitedElement]) -> Array:
        velocity = wanted[self._index] * self._scale
        low, high = self._low.copy(), self._high.copy()
        for place, index in enumerate(self._index):
            for axis in axes:
                if axis.index == index:
                    low[place], high[place] = axis.reach()
        kept = self._barrier.filter(velocity, observation, (low * self._scale, high * self._scale)) / self._scale
        # clipping one element could turn the velocity toward an obstacle; scaling it cannot
        over = np.maximum(kept / self._high, kept / self._low).max()
        wanted[self._index] = kept / over if over > 1.0 else kept
        return wanted


class _TankFilter:
    """Converts between the action's values and power for the energy tank."""

    def __init__(self, contract: Contract, limits: Limits, tank: Tank) -> None:
        self._index = action_indices(contract, tank.elements)
        self._scale = np.array([_rate_scale(limits, name, contract.control_dt_s) for name in tank.elements])
        self._conjugate = [observed_element(contract, name) for name in tank.conjugate]
        self._dt_s = contract.control_dt_s
        self.tank = EnergyTank(tank)

    def apply(self, wanted: Array, observation: dict[str, Array]) -> Array:
        share = self.tank.share(self._flow(wanted), self._effort(observation), self._dt_s)
        wanted[self._index] *= share
        return wanted

    def spend(self, written: Array, observation: dict[str, Array]) -> None:
        self.tank.spend(self._flow(written), self._effort(observation), self._dt_s)

    def _flow(self, action: Array) -> list[float]:
        return (action[self._index] * self._scale).tolist()

    def _effort(self, observation: dict[str, Array]) -> list[float]:
        return [float(observation[key][index]) for key, index in self._conjugate]


def action_names(contract: Contract) -> tuple[str, ...]:
    """Names of the action's elements, or their numbers if it has none."""
    return contract.action.names or tuple(map(str, range(contract.action.shape[-1])))


def action_indices(contract: Contract, elements: list[str]) -> Array:
    """Indices of `elements` in the action.

    Raises:
        UserError: if one is missing.
    """
    names = action_names(contract)
    if unknown := [element for element in elements if element not in names]:
        raise UserError(f"no action elements {unknown}; expected some of {names}")
    return np.array([names.index(element) for element in elements])


def _rate_scale(limits: Limits, name: str, dt_s: float) -> float:
    """Factor from the contract's value of an element to its velocity, or to the commanded value itself."""
    given = limits.commands.get(name, ElementLimits())
    return given.scale / dt_s if given.kind is Kind.DELTA else given.scale
