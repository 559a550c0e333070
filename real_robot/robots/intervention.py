"""Maps a person's input to a robot's action, which replaces the policy's action if there is a policy."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from embodied.contract import Contract
from embodied.errors import UserError
from real_robot.robots.robot import Array
from real_robot.safety.filters import action_indices, action_names

AXES = ("x", "y", "z", "roll", "pitch", "yaw")
USUAL = {
    **{axis: axis for axis in AXES},
    **{f"rotation_{axis}": turn for axis, turn in zip("xyz", AXES[3:], strict=True)},
    **{"speed": "x", "yaw_rate": "yaw", "steering_angle": "yaw"},
}
"""Default axis of an action element, by the element's name."""
GRIPPER = "gripper"


@dataclass(frozen=True)
class Controls:
    """Current input: deflections in [-1, 1] by axis, buttons held, and buttons pressed since the last read."""

    axes: dict[str, float] = field(default_factory=dict)
    held: frozenset[str] = frozenset()
    pressed: frozenset[str] = frozenset()


class Channel(Protocol):
    """An input device."""

    def read(self) -> Controls:
        """The current input, without waiting.

        Raises:
            OSError: if the device is gone.
        """
        ...

    def close(self) -> None:
        """Release the device."""
        ...


class Person(Protocol):
    """Source of a person's actions: an `Operator`, or a `Leader`."""

    pressed: frozenset[str]
    """Buttons of the last `action`."""

    def action(self, proposed: Array | None) -> Array | None:
        """The person's action [A], which replaces the policy's `proposed` one, or None if they do not intervene.

        Raises:
            OSError: if the device is gone.
        """
        ...

    def wait_for(self, *buttons: str, sleep: Callable[[float], None] = time.sleep) -> str:
        """Block until one of `buttons` is pressed; returns it."""
        ...

    def close(self) -> None:
        """Release the device."""
        ...


class Operator:
    """Turns a person's input into actions that replace the policy's while they move something.

    Args:
        channel: the input device.
        contract: contract of the robot.
        axes: action element -> (axis, action at full deflection).
        gripper: the action element that the gripper button toggles between its limits; "" for none.
        alone: there is no policy: every action is the person's, and elements at rest are zero, or as close as limits
            allow.

    Raises:
        UserError: for elements that the action does not have, and with `alone` for elements that no axis moves.
    """

    def __init__(
        self,
        channel: Channel,
        contract: Contract,
        axes: Mapping[str, tuple[str, float]],
        gripper: str = "",
        *,
        alone: bool = False,
    ) -> None:
        if unknown := {axis for axis, _ in axes.values()} - set(AXES):
            raise UserError(f"unknown axes {sorted(unknown)}; expected some of {AXES}")
        spec = contract.action
        still = [name for name in action_names(contract) if name not in axes and name != gripper]
        if alone and still:
            raise UserError(
                f"no axis moves {', '.join(still)} of the action; give axes={{{still[0]}: {AXES[0]}}}, or a policy that"
                " does with checkpoint=RUN, or drive an arm's joints by device=leader"
            )
        self._channel = channel
        self._axes = list(axes.values())
        self._alone = alone
        self._index = action_indices(contract, list(axes))
        self._gripper = int(action_indices(contract, [gripper])[0]) if gripper else None
        if self._gripper is not None and not spec.low:
            raise UserError(f"expected limits of {gripper!r} in the contract, between which the button toggles it")
        self._ends = (spec.low[self._gripper], spec.high[self._gripper]) if self._gripper is not None else (0.0, 0.0)
        self._closed: bool | None = None  # the person's choice; None: the policy's
        self._still = np.clip(np.zeros(spec.shape), spec.low or -np.inf, spec.high or np.inf)
        self.pressed: frozenset[str] = frozenset()

    def action(self, proposed: Array | None) -> Array | None:
        """See `Person.action`; elements without an axis keep the policy's value."""
        controls = self._channel.read()
        self.pressed = controls.pressed
        deflections = [controls.axes.get(axis, 0.0) * full for axis, full in self._axes]
        engaged = any(deflections) or bool({"engage", "gripper"} & (controls.held | controls.pressed))
        if not engaged and not self._alone:
            self._closed = None
            return None
        command = np.array(self._still if proposed is None else proposed, np.float64)
        command[self._index] = deflections
        if self._gripper is not None:
            command[self._gripper] = self._turn(command[self._gripper], "gripper" in controls.pressed)
        return command

    def wait_for(self, *buttons: str, sleep: Callable[[float], None] = time.sleep) -> str:
        """See `Person.wait_for`."""
        return wait_for(self._channel, buttons, sleep)

    def close(self) -> None:
        """Release the device."""
        self._channel.close()

    def _turn(self, proposed: float, pressed: bool) -> float:
        """The gripper's command: the button toggles the person's choice, else the policy's is `proposed`."""
        low, high = self._ends
        if pressed:
            # the first press toggles the policy's command, later ones the person's
            closed = proposed > 0.5 * (low + high) if self._closed is None else self._closed
            self._closed = not closed
        return proposed if self._closed is None else (high if self._closed else low)


class Leader:
    """A second arm that a person moves by hand: the robot follows its joints.

    Args:
        positions: returns the newest action [A]; None without one, or if it is old.
        buttons: a device whose buttons begin and judge episodes; its axes have no effect.
    """

    def __init__(self, positions: Callable[[], Array | None], buttons: Channel) -> None:
        self._positions = positions
        self._buttons = buttons
        self.pressed: frozenset[str] = frozenset()

    def action(self, proposed: Array | None) -> Array | None:
        """See `Person.action`: always the leader's joint positions, if there are recent ones."""
        self.pressed = self._buttons.read().pressed
        return self._positions()

    def wait_for(self, *buttons: str, sleep: Callable[[float], None] = time.sleep) -> str:
        """See `Person.wait_for`."""
        return wait_for(self._buttons, buttons, sleep)

    def close(self) -> None:
        """Release the device with the buttons."""
        self._buttons.close()


class Engaging:
    """A `Person` who drives only between two presses of gripper or engage, for a leader arm beside a policy."""

    def __init__(self, person: Person) -> None:
        self._person = person
        self._drives = False
        self.pressed: frozenset[str] = frozenset()

    def action(self, proposed: Array | None) -> Array | None:
        """See `Person.action`.

        Raises:
            OSError: also if the arm is silent while the person drives, in whose place nobody else may.
        """
        command = self._person.action(proposed)
        self.pressed = self._person.pressed
        if self.pressed & {"gripper", "engage"}:
            self._drives = not self._drives
        if self._drives and command is None:
            raise ConnectionError("the leader arm is silent")
        return command if self._drives else None

    def wait_for(self, *buttons: str, sleep: Callable[[float], None] = time.sleep) -> str:
        """See `Person.wait_for`; they do not drive afterwards."""
        self._drives = False
        return self._person.wait_for(*buttons, sleep=sleep)

    def close(self) -> None:
        """Release the device."""
        self._person.close()


def wait_for(channel: Channel, buttons: tuple[str, ...], sleep: Callable[[float], None]) -> str:
    """Block until one of `buttons` is pressed; returns it. Beside stop no other button counts."""
    while True:
        pressed = channel.read().pressed
        if "stop" in pressed:
            pressed = frozenset({"stop"})
        if awaited := pressed & set(buttons):
            return sorted(awaited)[0]
        sleep(0.02)


def usual_axes(contract: Contract, chosen: Mapping[str, str], speed: float) -> dict[str, tuple[str, float]]:
    """Axes for `Operator` by action element: the `chosen` ones, else the defaults in `USUAL`.

    Full deflection is the share `speed` of the upper limit.

    Raises:
        UserError: for an element that the action does not have, or without limits.
    """
    names = action_names(contract)
    spec = contract.action
    if unknown := [element for element in chosen if element not in names]:
        raise UserError(f"no action elements {unknown}; expected some of {names}")
    axes = {name: USUAL[name] for name in names if name in USUAL} | dict(chosen)
    if axes and not spec.high:
        raise UserError("the contract has no limits of the action, which full deflection would reach")
    return {name: (axis, speed * spec.high[names.index(name)]) for name, axis in axes.items()}
