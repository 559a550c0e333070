"""A person's input devices: the keys of a terminal, and gamepads and SpaceMice by python-evdev.

Keys are read from the terminal, not from an event device, so that they also work over SSH and without permissions.
"""

from __future__ import annotations

import errno
import os
import termios
import time
import tty
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from glob import glob
from pathlib import Path
from typing import Any

from embodied.errors import UserError
from embodied.extras import needs_extra
from real_robot.robots.intervention import Channel, Controls
from real_robot.robots.robot import Clock

KEYS = {
    "w": ("x", 1.0),
    "s": ("x", -1.0),
    "a": ("y", 1.0),
    "d": ("y", -1.0),
    "r": ("z", 1.0),
    "f": ("z", -1.0),
    "u": ("roll", 1.0),
    "o": ("roll", -1.0),
    "i": ("pitch", 1.0),
    "k": ("pitch", -1.0),
    "j": ("yaw", 1.0),
    "l": ("yaw", -1.0),
}
KEY_BUTTONS = {" ": "gripper", "\n": "success", "\x7f": "failure", "\x1b": "stop"}
EVENTS = "/dev/input/event*"


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
        self._descriptor = descriptor
        self._lasting_s = lasting_s
        self._clock = clock
        self._before = termios.tcgetattr(descriptor)
        self._blocking = os.get_blocking(descriptor)
        tty.setcbreak(descriptor)
        os.set_blocking(descriptor, False)
        self._until: dict[str, tuple[float, float]] = {}  # axis -> deflection, end

    def read(self) -> Controls:
        """The keys pressed recently.

        Raises:
            OSError: if the terminal was closed.
        """
        now = self._clock()
        pressed = set()
        try:
            text = os.read(self._descriptor, 1024).decode(errors="ignore")
            if not text:  # where no key is pressed, reading would block
                raise OSError(errno.EIO, "the terminal was closed")
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
        with suppress(termios.error):  # it is gone
            termios.tcsetattr(self._descriptor, termios.TCSADRAIN, self._before)
        os.set_blocking(self._descriptor, self._blocking)


@dataclass(frozen=True)
class Layout:
    """Axis with its sign, and button, of each event of a kind of device, by the kernel's event names.

    A device is of this kind if it has all events of `event_names`. `full` is the full deflection of devices that do
    not report their range, such as a SpaceMouse with relative motion. Such a device counts as released after `rest_s`
    without events, because the kernel drops zeros. Where all `stop` buttons are held, that is a press of stop, and
    no press of the last one; those of `released` are pressed when they are let go, unless they were part of a stop.
    """

    axes: Mapping[str, tuple[str, float]]
    buttons: Mapping[str, str]
    event_names: tuple[str, ...]
    stop: frozenset[str] = frozenset({"stop"})
    released: frozenset[str] = frozenset()
    full: int = 350
    rest_s: float = 0.1


GAMEPAD = Layout(
    {
        "ABS_X": ("y", -1.0),
        "ABS_Y": ("x", -1.0),
        "ABS_RX": ("yaw", -1.0),
        "ABS_RY": ("z", -1.0),
        "ABS_HAT0X": ("roll", 1.0),
        "ABS_HAT0Y": ("pitch", 1.0),
    },
    {
        "BTN_SOUTH": "gripper",
        "BTN_EAST": "failure",
        "BTN_NORTH": "success",
        "BTN_WEST": "success",
        "BTN_TL": "engage",
        "BTN_TR": "engage",
        "BTN_SELECT": "stop",
        "BTN_START": "go",
    },
    ("BTN_SOUTH", "ABS_X", "ABS_Y"),
)
"""Sticks move and turn, south is the gripper, east failure, north and west success, shoulders engage, select stops."""
_CAP = {
    "X": ("y", -1.0),
    "Y": ("x", -1.0),
    "Z": ("z", -1.0),
    "RX": ("pitch", -1.0),
    "RY": ("roll", -1.0),
    "RZ": ("yaw", -1.0),
}
SPACEMICE = tuple(
    Layout(
        {f"{kind}_{axis}": to for axis, to in _CAP.items()},
        {"BTN_0": "gripper", "BTN_1": "success"},
        (f"{kind}_RX", f"{kind}_RZ", "BTN_0"),
        stop=frozenset({"gripper", "success"}),
        released=frozenset({"success"}),
    )
    for kind in ("REL", "ABS")
)
"""The cap moves and turns, the left button is the gripper, the right one, let go, success, and both together stop.

Some kernels report its motion as relative.
"""


class EventDevice:
    """A gamepad or SpaceMouse by its event device, such as /dev/input/by-id/*-event-joystick.

    Deflections below `dead` count as zero.

    Raises:
        UserError: if the device can't be opened, or without python-evdev.
    """

    def __init__(self, path: str | Path, layout: Layout, *, dead: float = 0.1, clock: Clock = time.monotonic) -> None:
        evdev = _evdev()
        try:
            self._device = evdev.InputDevice(path)
        except OSError as error:
            raise UserError(f"can't read {path}: {error.strerror}; is it plugged in? {_permission()}") from error
        codes = evdev.ecodes.ecodes
        self._codes = evdev.ecodes
        self._layout = layout
        self._dead = dead
        self._clock = clock
        self._axes_of = {(_kind(evdev, name), codes[name]): to for name, to in layout.axes.items()}
        self._buttons_of = {codes[name]: button for name, button in layout.buttons.items()}
        self._ranges = {code: self._range(code) for kind, code in self._axes_of if kind == evdev.ecodes.EV_ABS}
        self._rest()
        self._rest_at: float | None = None
        self._dropping = False

    def read(self) -> Controls:
        """Process all pending events.

        Raises:
            OSError: if the device was unplugged.
        """
        codes = self._codes
        pressed = set[str]()
        for event in self._events():
            if self._dropping:  # the kernel's queue overflowed: its events are invalid until the next report
                self._dropping = (event.type, event.code) != (codes.EV_SYN, codes.SYN_REPORT)
                if not self._dropping:
                    self._hold_again(pressed)
            elif (event.type, event.code) == (codes.EV_SYN, codes.SYN_DROPPED):
                self._rest()
                self._dropping = True
            elif (event.type, event.code) in self._axes_of:
                self._deflect(event.type, event.code, event.value)
            elif event.type == codes.EV_KEY and event.code in self._buttons_of:
                self._press(self._buttons_of[event.code], event.value, pressed)
        if self._rest_at is not None and self._clock() >= self._rest_at:
            self._axes = {}
            self._rest_at = None
        return Controls(dict(self._axes), frozenset(self._held), frozenset(pressed))

    def close(self) -> None:
        """Close the event device."""
        self._device.close()

    def _events(self) -> list[Any]:
        """All pending events, without waiting."""
        events: list[Any] = []
        while True:
            try:
                batch = list(self._device.read())
            except BlockingIOError:
                return events
            if not batch:
                return events
            events += batch

    def _deflect(self, kind: int, code: int, value: int) -> None:
        """Set an axis to the deflection in [-1, 1] of the event's `value`."""
        axis, sign = self._axes_of[kind, code]
        relative = kind == self._codes.EV_REL
        low, high = (-self._layout.full, self._layout.full) if relative else self._ranges[code]
        # (2 value - low - high) / (high - low) maps [low, high] to [-1, 1]
        deflection = min(max((2.0 * value - low - high) / (high - low), -1.0), 1.0)
        self._axes[axis] = sign * deflection if abs(deflection) > self._dead else 0.0
        if relative:
            # the kernel reports no zero for a relative axis, so rest is assumed after a pause
            self._rest_at = self._clock() + self._layout.rest_s

    def _press(self, button: str, value: int, pressed: set[str]) -> None:
        released = self._layout.released
        if value == 1:  # 2 is a repeat
            self._held.add(button)
            if button in self._layout.stop and self._held >= self._layout.stop:
                self._counted |= self._layout.stop
                pressed.add("stop")
            elif button not in released:
                pressed.add(button)
        elif value == 0 and button in self._held:
            self._held.remove(button)
            if button in released - self._counted:
                pressed.add(button)
            self._counted.discard(button)

    def _hold_again(self, pressed: set[str]) -> None:
        """Take note of sticks and buttons that are held after lost events; no button but stop counts as pressed."""
        for kind, code in self._axes_of:
            if kind == self._codes.EV_ABS:
                with suppress(OSError):  # an axis that the device lacks; one that is gone is noticed by `read`
                    self._deflect(kind, code, self._device.absinfo(code).value)
        self._held = {self._buttons_of[code] for code in self._device.active_keys() if code in self._buttons_of}
        self._counted = set(self._held)
        if self._held >= self._layout.stop:
            pressed.add("stop")

    def _rest(self) -> None:
        self._axes: dict[str, float] = {}
        self._held: set[str] = set()
        self._counted: set[str] = set()  # held buttons whose release does not count

    def _range(self, code: int) -> tuple[int, int]:
        """The kernel's range of an absolute axis, or the layout's if the device has none."""
        try:
            info = self._device.absinfo(code)
        except OSError:
            return -self._layout.full, self._layout.full
        return (info.min, info.max) if info.min < info.max else (-self._layout.full, self._layout.full)


class Device(Enum):
    """Input devices of a person; `LEADER` is a second arm, which needs ROS 2."""

    KEYBOARD = "keyboard"
    GAMEPAD = "gamepad"
    SPACEMOUSE = "spacemouse"
    LEADER = "leader"


LAYOUTS = {Device.GAMEPAD: (GAMEPAD,), Device.SPACEMOUSE: SPACEMICE}


def open_device(device: Device, event: str = "") -> Channel:
    """Open `device`: the keys of this terminal, or the event device `event`, or the first device of its kind.

    Raises:
        UserError: on one line, if there is no such device, `event` is of another kind, or it can't be read.
    """
    if device not in LAYOUTS:
        return Keyboard()
    evdev = _evdev()
    matches = []
    names = []
    for path in [event] if event else sorted(evdev.list_devices(writable=False)):
        try:
            opened = evdev.InputDevice(path)
        except OSError as error:
            raise UserError(f"can't read {path}: {error.strerror}; is it plugged in? {_permission()}") from error
        events = {(kind, code) for kind, codes in opened.capabilities(absinfo=False).items() for code in codes}
        matches += [(path, layout) for layout in LAYOUTS[device] if events >= _needed(evdev, layout)]
        names.append(f"{opened.name} ({path})")
        opened.close()
    if not matches:
        listed = ", ".join(names) or "none"
        raise UserError(f"no {device.value} among the readable input devices: {listed}; plug it in. {_permission()}")
    return EventDevice(*matches[0])


def _needed(evdev: Any, layout: Layout) -> set[tuple[int, int]]:  # noqa: ANN401 - the package
    return {(_kind(evdev, name), evdev.ecodes.ecodes[name]) for name in layout.event_names}


def _kind(evdev: Any, name: str) -> int:  # noqa: ANN401 - the package
    """Type of the event `name`, by its prefix."""
    kinds = {"ABS": evdev.ecodes.EV_ABS, "REL": evdev.ecodes.EV_REL, "BTN": evdev.ecodes.EV_KEY}
    return kinds[name.partition("_")[0]]


def _permission() -> str:
    closed = [path for path in glob(EVENTS) if not os.access(path, os.R_OK)]
    return f"{len(closed)} cannot be read: sudo usermod -aG input $USER, and log in again" if closed else ""


def _evdev() -> Any:  # noqa: ANN401 - the package
    with needs_extra("devices"):
        import evdev
    return evdev
