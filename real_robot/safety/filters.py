"""The filters of a valid command: distance, energy, and the limits of every element, in this order; and the stop."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np

from embodied.contract import Contract
from embodied.errors import UserError
from real_robot.robots.robot import Array
from real_robot.safety.barrier import Barrier, Distance, Motion
from real_robot.safety.element import LimitedElement, observed_element
from real_robot.safety.energy_tank import EnergyTank, Tank
from real_robot.safety.limits import INF, Kind, Limits

LONG_AGO = 1_000_000
"""Number of periods that counts as infinitely many."""


class Filters:
    """Turns a valid action [A] into one inside all limits, and stops the robot within them.

    `at_rest` is the robot's, see `robot.Robot`.

    Raises:
        UserError: for limits of elements that the contract does not have or of another kind, and for elements without
            any.
    """

    def __init__(self, contract: Contract, limits: Limits, at_rest: Sequence[float] | None) -> None:
        self._dt_s = contract.control_dt_s
        self._names = action_names(contract)
        size = len(self._names)
        self._low = np.array(contract.action.low or (-INF,) * size)
        self._high = np.array(contract.action.high or (INF,) * size)
        if unknown := set(limits.commands) - set(self._names):
            raise UserError(
                f"unknown elements {sorted(unknown)} in limits; expected elements of the action: {self._names}"
            )
        self._axes = [
            LimitedElement(
                contract,
                limits,
                index,
                limits.commands[name],
                (self._low[index], self._high[index]),
                at_rest is not None,
            )
            for index, name in enumerate(self._names)
            if name in limits.commands
        ]
        for index, name in enumerate(self._names):
            self._narrow(index, name, limits)
        self._at_rest = None if at_rest is None else np.array(at_rest, np.float64)
        if self._at_rest is not None:
            _check_at_rest(self._names, limits, self._at_rest)
            self._at_rest = np.minimum(np.maximum(self._at_rest, self._low), self._high)
        self._last = np.zeros(size)
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

    def outside(self, observation: dict[str, Array], idle_s: float) -> str:
        """Description of a position too far outside its limits to start, `idle_s` after the last command; or ""."""
        periods = self._periods(idle_s)
        outside = (self._names[axis.index] for axis in self._axes if not axis.startable(observation, periods))
        return next((f"{name} is outside its limits: move it inside by hand" for name in outside), "")

    def start(self, observation: dict[str, Array], idle_s: float) -> None:
        """Start at rest, `idle_s` after the last command."""
        periods = self._periods(idle_s)
        if self._distance:
            self._distance.idle(np.zeros_like(self._last), periods)
        for axis in self._axes:
            axis.start(observation, periods)

    def apply(self, action: Array, observation: dict[str, Array], age_s: float) -> Array:
        """The action [A] to write, given an observation of age `age_s`."""
        command = np.minimum(np.maximum(action, self._low), self._high)
        age = age_s / self._dt_s
        if self._distance:
            command = self._distance.apply(command, observation, age, self._axes)
        if self._tank:
            command = self._tank.apply(command, observation, self._axes)
        values = command.tolist()
        for axis in self._axes:
            values[axis.index] = axis.apply(values[axis.index], observation, age)
        return self._commanded(np.array(values, np.float64))

    def unfollowed(self, observation: dict[str, Array], age_s: float) -> str:
        """Description of an element that does not move as commanded, measured `age_s` ago; "" if there is none."""
        for axis in self._axes:
            if away := axis.lag(observation, age_s / self._dt_s):
                name = self._names[axis.index]
                return f"{name} is {away:.3g} away from where it was commanded to: blocked, or moved by somebody else"
        return ""

    def idle(self, periods: int, silent: bool, stands: bool) -> None:
        """Account for `periods` in which nothing was commanded, see `LimitedElement.idle`."""
        for axis in self._axes:
            axis.idle(periods, silent, stands)
        if self._distance:
            self._distance.idle(self._last * (not stands), periods)

    def mark(self) -> None:
        """A measurement has been accepted, from which `leads` counts."""
        for axis in self._axes:
            axis.mark()

    def leads(self, accepted: dict[str, Array], observation: dict[str, Array], age_s: float) -> bool:
        """Whether commands may have led the robot from an `accepted` measurement to another one, `age_s` old."""
        return all(axis.leads(accepted, observation, age_s / self._dt_s) for axis in self._axes)

    def begin_stop(self) -> bool:
        """Begin the certified stop from the last command; returns whether there is anything to command for it.

        Where a position stands still already, nothing is commanded: it may have been moved meanwhile.
        """
        assert self._at_rest is not None
        rest = self._at_rest.tolist()
        moves = any(not axis.stopped(rest[axis.index]) for axis in self._axes)
        return moves or not np.isnan(self._at_rest).all()

    def stop(self) -> tuple[Array, bool]:
        """The next action [A] of the stop, and whether it is the last one."""
        assert self._at_rest is not None
        values = np.where(np.isnan(self._at_rest), self._last, self._at_rest)
        rest = self._at_rest.tolist()
        ended = True
        for axis in self._axes:
            values[axis.index] = axis.stop(rest[axis.index])
            ended = ended and axis.stopped(rest[axis.index])
        return self._commanded(values), ended

    def _periods(self, idle_s: float) -> int:
        """Number of whole periods in `idle_s`, which is infinite before the first command."""
        return math.floor(min(idle_s / self._dt_s, LONG_AGO))

    def _commanded(self, values: Array) -> Array:
        """The action of `values` within the contract, after the filters have accounted for it."""
        self._last = np.minimum(np.maximum(values, self._low), self._high)
        if self._distance:
            self._distance.move(self._last)
        if self._tank:
            self._tank.spend(self._last)
        return self._last

    def _narrow(self, index: int, name: str, limits: Limits) -> None:
        """Bound the values of an element by its velocity, and check that something bounds it."""
        element_limits = limits.commands.get(name)
        if math.isinf(self._high[index] - self._low[index]) and not (element_limits and element_limits.limited):
            raise UserError(f"no limits for action element {name!r}: give low and high, or name it in `commands`")
        if element_limits and element_limits.kind is not Kind.POSITION:
            fastest = (
                element_limits.velocity
                / element_limits.scale
                * (self._dt_s if element_limits.kind is Kind.DELTA else 1.0)
            )
            self._low[index], self._high[index] = max(self._low[index], -fastest), min(self._high[index], fastest)


def _check_at_rest(names: tuple[str, ...], limits: Limits, at_rest: Array) -> None:
    """Raise UserError for an element that stands still in another way than its kind of limits says."""
    if len(at_rest) != len(names):
        raise UserError(f"expected at_rest of the action's {len(names)} elements, got {len(at_rest)}")
    for name, rest in zip(names, at_rest, strict=True):
        element_limits = limits.commands.get(name)
        if element_limits is None:
            continue
        keeps = math.isnan(rest)
        if keeps != (element_limits.kind is Kind.POSITION) and (keeps or element_limits.measured):
            still = "keeping its value" if keeps else f"the value {rest:g}"
            expected = "POSITION" if keeps else "VELOCITY or DELTA"
            kind = element_limits.kind.name
            raise UserError(f"expected kind {expected} of {name!r}, which this robot stops by {still}, got {kind}")


class _DistanceFilter:
    """Converts between the action's values and velocities for the barrier, and keeps the motion that is not measured.

    Raises:
        UserError: for a distance that needs more braking than the limits of its elements allow.
    """

    def __init__(self, contract: Contract, limits: Limits, distance: Distance, box: tuple[Array, Array]) -> None:
        self._index = action_indices(contract, distance.elements)
        moving = distance.elements[:1] if distance.motion is Motion.STEERED else distance.elements
        _check_rates(limits, moving, "distance")
        _check_braking(limits, moving, distance)
        self._low, self._high = (bound[self._index] for bound in box)
        dt_s = contract.control_dt_s
        self._scale = np.array([_rate_scale(limits, name, dt_s) for name in distance.elements])
        key = distance.position or distance.ranges
        if key not in contract.observation:
            raise UserError(f"no observation {key!r} to keep distance by; expected one of {list(contract.observation)}")
        # While nothing is commanded, a velocity goes on; a displacement does not.
        self._goes_on = any(limits.commands[name].kind is Kind.VELOCITY for name in moving)
        self._barrier = Barrier(distance, dt_s, limits.command_timeout_s if self._goes_on else 0.0)
        self._error = (limits.clock_error_s + limits.lag_s) / dt_s
        oldest = math.ceil((limits.observation_timeout_s + limits.clock_error_s + limits.lag_s) / dt_s) + 1
        self._past = deque[Array](maxlen=oldest)

    def apply(self, command: Array, observation: dict[str, Array], age: float, axes: list[LimitedElement]) -> Array:
        """Change `command` [A], in place, so that it keeps distance; the measurement is `age` periods old."""
        velocity = command[self._index] * self._scale
        low = self._low.copy()
        high = self._high.copy()
        for place, index in enumerate(self._index):
            for axis in axes:
                if axis.index == index:
                    low[place], high[place] = axis.reach()
        recent = list(self._past)[: math.ceil(age + self._error)]
        reach = low * self._scale, high * self._scale
        filtered = self._barrier.filter(velocity, observation, reach, np.array(recent)) / self._scale
        # clipping one element could turn the velocity toward an obstacle; scaling it cannot
        over = _excess(filtered, self._low, self._high)
        command[self._index] = filtered / over if over > 1.0 else filtered
        return command

    def move(self, action: Array) -> None:
        """Account for the command `action` [A]."""
        self._past.appendleft(action[self._index] * self._scale)

    def idle(self, action: Array, periods: int) -> None:
        """Account for `periods` after the command `action` [A] in which velocities go on and displacements do not."""
        velocity = action[self._index] * self._scale * self._goes_on
        self._past.extendleft([velocity] * min(periods, self._past.maxlen or 0))


class _TankFilter:
    """Converts between the action's values and power for the energy tank."""

    def __init__(self, contract: Contract, limits: Limits, tank: Tank) -> None:
        self._index = action_indices(contract, tank.elements)
        _check_rates(limits, tank.elements, "tank")
        self._scale = np.array([_rate_scale(limits, name, contract.control_dt_s) for name in tank.elements])
        self._conjugate = [observed_element(contract, name) for name in tank.conjugate]
        self._dt_s = contract.control_dt_s
        self._effort = [0.0] * len(tank.elements)
        self.tank = EnergyTank(tank)

    def apply(self, command: Array, observation: dict[str, Array], axes: list[LimitedElement]) -> Array:
        """Scale the elements of `command` [A] down, so that they and the stop after them do not overdraw the tank."""
        self._effort = [float(observation[key][index]) for key, index in self._conjugate]
        by_index = {axis.index: axis for axis in axes}
        travels = [by_index[index].travel if index in by_index else _no_travel for index in self._index.tolist()]
        flow = self._flow(command)

        def energy_j(share: float) -> float:
            """Work of the period with `share` of the flow, and of the stop from there."""
            values = (share * command[self._index]).tolist()
            moved = [each * share * self._dt_s for each in flow]
            stops = [travel(value) for travel, value in zip(travels, values, strict=True)]
            return sum(effort * (step + stop) for effort, step, stop in zip(self._effort, moved, stops, strict=True))

        command[self._index] *= self.tank.share(energy_j)
        return command

    def spend(self, written: Array) -> None:
        """Account for a written action [A] with the force that was measured last."""
        self.tank.spend(self._flow(written), self._effort, self._dt_s)

    def _flow(self, action: Array) -> list[float]:
        return (action[self._index] * self._scale).tolist()


def _no_travel(value: float) -> float:
    """Way of an element without limits, which stands still at once."""
    return 0.0


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


def _check_rates(limits: Limits, elements: Sequence[str], user: str) -> None:
    """Raise UserError for elements that are no velocities: standing still must be among what a filter may choose."""
    for name in elements:
        kind = limits.commands[name].kind if name in limits.commands else Kind.POSITION
        if kind is Kind.POSITION:
            raise UserError(
                f"expected kind VELOCITY or DELTA of {name!r} in `commands`, because `{user}` changes velocities; got "
                f"{kind.name}, a commanded value (the default)"
            )


def _check_braking(limits: Limits, elements: Sequence[str], distance: Distance) -> None:
    """Raise UserError if `distance` counts on braking that the limits of `elements` do not allow."""
    for place, name in enumerate(elements):
        element_limits = limits.commands[name]
        arm = distance.ahead_m if distance.motion is Motion.TURNING and place == 1 else 1.0  # of the point that turns
        for derivative in ("acceleration", "jerk"):
            most = arm * getattr(element_limits, derivative)
            counted = getattr(distance, derivative)
            if counted > most:
                raise UserError(
                    f"distance.{derivative} is {counted:g}, but {name!r} is limited to {most:g}: the robot could not"
                    f" stop in time; use distance.{derivative} of at most {most:g}"
                )


def _rate_scale(limits: Limits, name: str, dt_s: float) -> float:
    """Factor from the contract's value of an element to its velocity, or to a steering angle itself."""
    element_limits = limits.commands.get(name)
    if element_limits is None:
        return 1.0
    return element_limits.scale / dt_s if element_limits.kind is Kind.DELTA else element_limits.scale


def _excess(values: Array, low: Array, high: Array) -> float:
    """The largest ratio of a value to its limit on that side: infinite if the limit is zero and the value is not."""
    bounds = np.where(values > 0.0, high, -low)
    with np.errstate(divide="ignore"):
        ratios = np.divide(np.abs(values), bounds, out=np.zeros(len(values)), where=values != 0.0)
    return float(ratios.max())
