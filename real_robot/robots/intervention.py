"""Human intervention with keyboard, gamepad or SpaceMouse, mapped to a robot's action.

Input events are read directly from the kernel (linux/input.h), so no package is needed. The user needs read access to
/dev/input/event*, which the group "input" has.
"""

from __future__ import annotations

import fcntl
import os
import struct
import termios
import time
import tty
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from embodied.contract import Contract
from embodied.errors import UserError
from real_robot.robots.robot import Array, Clock
from real_robot.safety.filters import action_indices

AXES = ("x", "y", "z", "roll", "pitch", "yaw")


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


KEYS = {
    "w": ("x", 1.0), "s": ("x", -1.0), "a": ("y", 1.0), "d": ("y", -1.0), "r": ("z", 1.0), "f": ("z", -1.0),
    "u": ("roll", 1.0), "o": ("roll", -1.0), "i": ("pitch", 1.0), "k": ("pitch", -1.0), "j": ("yaw", 1.0),
    "l": ("yaw", -1.0),
}  # fmt: skip
KEY_BUTTONS = {" ": "gripper", "\n": "success", "\x7f": "failure", "\x1b": "stop"}


class Keyboard:
    """Keys of a terminal; `KEYS` move, space is the gripper, enter success, backspace failure, escape the e-stop.

    A terminal reports key presses but not releases: each press counts for `lasting_s`, longer than the pause before a
    key repeats.

    Raises:
        UserError: if `descriptor` is not a terminal.
    """

    def __init__(self, descriptor: int = 0, *, lasting_s: float = 0.6, clock: Clock = time.monotonic) -> None:
        if not os.isatty(descriptor):
            raise UserError("expected a terminal to read keys from; run it in one, or use a gamepad or SpaceMouse")
        self._descriptor, self._lasting_s, self._clock = descriptor, lasting_s, clock
        self._before = termios.tcgetattr(descriptor)
        self._blocking = os.get_blocking(descriptor)
        tty.setcbreak(descriptor)
        os.set_blocking(descriptor, False)
        self._until: dict[str, tuple[float, float]] = {}  # axis -> deflection, end

    def read(self) -> Controls:
        """The keys pressed recently."""
        now, pressed = self._clock(), set()
        try:
            text = os.read(self._descriptor, 1024).decode(errors="ignore")
        except BlockingIOError:
            text = ""
        for key in text:
            if key in KEYS:
                axis, value = KEYS[key]
                self._until[axis] = value, now + self._lasting_s
            elif key in KEY_BUTTONS:
                pressed.add(KEY_BUTTONS[key])
        axes = {axis: value for axis, (value, end) in self._until.items() if now < end}
        return Controls(axes, frozenset(), frozenset(pressed))

    def close(self) -> None:
        """Restore the terminal's settings."""
        termios.tcsetattr(self._descriptor, termios.TCSADRAIN, self._before)
        os.set_blocking(self._descriptor, self._blocking)


EVENT = struct.Struct("@llHHi")  # struct input_event: seconds, microseconds, type, code, value
SYN, KEY, REL, ABS = 0, 1, 2, 3
SYN_DROPPED = 3
ABSINFO = struct.Struct("@6i")  # struct input_absinfo: value, minimum, maximum, fuzz, flat, resolution


@dataclass(frozen=True)
class Layout:
    """Which codes of linux/input-event-codes.h are which axis, with its sign, and which button.

    `full` is the full deflection of devices that do not report their range, such as a SpaceMouse with relative motion.
    Such a device counts as released after `rest_s` without events, because the kernel drops zeros.
    """

    axes: Mapping[int, tuple[str, float]]
    buttons: Mapping[int, str]
    full: int = 350
    rest_s: float = 0.1


GAMEPAD = Layout(
    {0: ("y", -1.0), 1: ("x", -1.0), 3: ("yaw", -1.0), 4: ("z", -1.0), 16: ("roll", 1.0), 17: ("pitch", 1.0)},
    {0x130: "gripper", 0x131: "failure", 0x133: "success", 0x134: "success", 0x136: "engage", 0x137: "engage",
     0x13A: "stop", 0x13B: "go"},
)  # fmt: skip
"""Sticks move and turn, south is the gripper, east failure, north and west success, shoulders engage, select stops."""
SPACEMOUSE = Layout(
    {0: ("y", -1.0), 1: ("x", -1.0), 2: ("z", -1.0), 3: ("pitch", -1.0), 4: ("roll", -1.0), 5: ("yaw", -1.0)},
    {0x100: "gripper", 0x101: "success"},
)
"""The cap moves and turns, the left button is the gripper, the right one success."""


class InputDevice:
    """A gamepad or SpaceMouse by its event device, /dev/input/by-id/*-event-joystick or *-event-mouse.

    Deflections below `dead` count as zero.

    Raises:
        UserError: if the device can't be opened.
    """

    def __init__(self, path: Path, layout: Layout, *, dead: float = 0.1, clock: Clock = time.monotonic) -> None:
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError as error:
            raise UserError(
                f"can't read {path}: {error.strerror}; is it plugged in, and you in group input?"
            ) from error
        self._layout, self._dead, self._clock = layout, dead, clock
        self._ranges = {code: self._range(code) for code in layout.axes}
        self._rest()
        self._rest_at: float | None = None
        self._partial, self._dropping = b"", False

    def read(self) -> Controls:
        """Process all pending events."""
        pressed: set[str] = set()
        for kind, code, value in self._events():
            if self._dropping:  # the kernel's queue overflowed: its events are invalid until the next report
                self._dropping = (kind, code) != (SYN, 0)
            elif kind == SYN and code == SYN_DROPPED:
                self._rest()
                self._dropping = True
            elif kind in (REL, ABS) and code in self._layout.axes:
                self._deflect(kind, code, value)
            elif kind == KEY and code in self._layout.buttons:
                self._press(self._layout.buttons[code], value, pressed)
        if self._rest_at is not None and self._clock() >= self._rest_at:
            self._axes, self._rest_at = {}, None
        return Controls(dict(self._axes), frozenset(self._held), frozenset(pressed))

    def close(self) -> None:
        """Close the event device."""
        os.close(self._descriptor)

    def _events(self) -> list[tuple[int, int, int]]:
        chunks = [self._partial]
        while True:
            try:
                chunk = os.read(self._descriptor, 64 * EVENT.size)
            except BlockingIOError:
                break
            if not chunk:
                break
            chunks.append(chunk)
        data = b"".join(chunks)
        whole = len(data) - len(data) % EVENT.size
        self._partial = data[whole:]
        return [event[2:] for event in EVENT.iter_unpack(data[:whole])]

    def _deflect(self, kind: int, code: int, value: int) -> None:
        axis, sign = self._layout.axes[code]
        low, high = (-self._layout.full, self._layout.full) if kind == REL else self._ranges[code]
        deflection = min(max((2.0 * value - low - high) / (high - low), -1.0), 1.0)
        self._axes[axis] = sign * deflection if abs(deflection) > self._dead else 0.0
        if kind == REL:
            self._rest_at = self._clock() + self._layout.rest_s

    def _press(self, button: str, value: int, pressed: set[str]) -> None:
        if value == 1:  # 2 is a repeat
            pressed.add(button)
            self._held.add(button)
        elif value == 0:
            self._held.discard(button)

    def _rest(self) -> None:
        self._axes: dict[str, float] = {}
        self._held: set[str] = set()

    def _range(self, code: int) -> tuple[int, int]:
        """The kernel's range of an absolute axis (EVIOCGABS), or the layout's if the device has none."""
        try:
            info = fcntl.ioctl(self._descriptor, 0x80184540 + code, bytes(ABSINFO.size))
        except OSError:
            return -self._layout.full, self._layout.full
        _, low, high, *_ = ABSINFO.unpack(info)
        return (low, high) if low < high else (-self._layout.full, self._layout.full)


class Operator:
    """Turns a person's input into actions that replace the policy's while they move something.

    Args:
        channel: the input device.
        contract: the robot's.
        axes: action element -> (axis, action at full deflection).
        gripper: the action element that the gripper button toggles between its limits; "" for none.

    Raises:
        UserError: for elements that the action does not have.
    """

    def __init__(
        self, channel: Channel, contract: Contract, axes: Mapping[str, tuple[str, float]], gripper: str = ""
    ) -> None:
        if unknown := {axis for axis, _ in axes.values()} - set(AXES):
            raise UserError(f"unknown axes {sorted(unknown)}; expected some of {AXES}")
        spec = contract.action
        self._channel, self._axes = channel, list(axes.values())
        self._index = action_indices(contract, list(axes))
        self._gripper = int(action_indices(contract, [gripper])[0]) if gripper else None
        if self._gripper is not None and not spec.low:
            raise UserError(f"expected limits of {gripper!r} in the contract, between which the button toggles it")
        self._ends = (spec.low[self._gripper], spec.high[self._gripper]) if self._gripper is not None else (0.0, 0.0)
        self._closed: bool | None = None  # the person's choice; None: the policy's
        self.pressed: frozenset[str] = frozenset()

    def action(self, proposed: Array) -> Array | None:
        """The person's action [A] in place of the policy's `proposed` one, or None if they do not intervene.

        Elements without an axis keep the policy's value.
        """
        controls = self._channel.read()
        self.pressed = controls.pressed
        deflections = [controls.axes.get(axis, 0.0) * full for axis, full in self._axes]
        engaged = any(deflections) or bool({"engage", "gripper"} & (controls.held | controls.pressed))
        if not engaged:
            self._closed = None
            return None
        taken = np.array(proposed, np.float64)
        taken[self._index] = deflections
        if self._gripper is not None:
            taken[self._gripper] = self._turn(taken[self._gripper], "gripper" in controls.pressed)
        return taken

    def wait_for(self, *buttons: str, sleep: Callable[[float], None] = time.sleep) -> str:
        """Block until one of `buttons` is pressed; returns it."""
        while True:
            found = self._channel.read().pressed & set(buttons)
            if found:
                return sorted(found)[0]
            sleep(0.02)

    def close(self) -> None:
        """Release the device."""
        self._channel.close()

    def _turn(self, proposed: float, pressed: bool) -> float:
        low, high = self._ends
        if pressed:
            closed = proposed > 0.5 * (low + high) if self._closed is None else self._closed
            self._closed = not closed
        return proposed if self._closed is None else (high if self._closed else low)
