"""A person's devices through the real interfaces: a terminal, and input events as the kernel writes them."""

import errno
import os
import pty
import struct
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest

from embodied.contract import Contract, TensorSpec
from real_robot.robots.devices import GAMEPAD, SPACEMICE, Device, EventDevice, Keyboard, open_device
from real_robot.robots.intervention import Controls, Leader, Operator, usual_axes

SYN, KEY, REL, ABS = 0, 1, 2, 3


class Now:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Kernel:
    """An event device that the test writes: a pipe with the kernel's records."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self._keep = os.open(path, os.O_RDWR)
        self.path = path

    def write(self, *events: tuple[int, int, int]) -> None:
        os.write(self._keep, b"".join(struct.pack("llHHi", 1700000000, 5, *event) for event in events))


@pytest.fixture
def device(tmp_path, monkeypatch) -> Kernel:
    """Read by python-evdev itself, but for what it asks the kernel about a device, which a pipe can't answer."""
    evdev = pytest.importorskip("evdev", reason="needs the extra devices")

    class Piped(evdev.InputDevice):
        has: ClassVar[list[str]] = ["BTN_SOUTH", "ABS_X", "ABS_Y"]
        active: ClassVar[list[int]] = []

        def __init__(self, path) -> None:
            self.path, self.fd, self.name = path, os.open(path, os.O_RDONLY | os.O_NONBLOCK), "Xbox Pad"

        def capabilities(self, **_):
            kinds = {"BTN": evdev.ecodes.EV_KEY, "ABS": evdev.ecodes.EV_ABS, "REL": evdev.ecodes.EV_REL}
            return {
                kind: [evdev.ecodes.ecodes[name] for name in self.has if name.startswith(prefix)]
                for prefix, kind in kinds.items()
            }

        def active_keys(self) -> list[int]:
            return self.active

    monkeypatch.setattr(evdev, "InputDevice", Piped)
    monkeypatch.setattr(evdev, "list_devices", lambda writable: [str(tmp_path / "event0")])
    return Kernel(tmp_path / "event0")


@pytest.fixture
def terminal():
    main, other = pty.openpty()
    yield main, other
    os.close(main)
    os.close(other)


def test_keys_move_for_a_while_and_buttons_are_reported_once(terminal):
    main, other = terminal
    clock = Now()
    keyboard = Keyboard(other, clock=clock)
    assert keyboard.read() == Controls()
    os.write(main, b"wf \n")
    assert keyboard.read() == Controls({"x": 1.0, "z": -1.0}, frozenset(), frozenset({"gripper", "success"}))
    clock.now = 0.5
    os.write(main, b"s")
    assert keyboard.read() == Controls({"x": -1.0, "z": -1.0})
    clock.now = 0.7
    assert keyboard.read() == Controls({"x": -1.0})
    os.write(main, b"\x1b")
    assert keyboard.read().pressed == {"stop"}
    keyboard.close()


def test_a_terminal_is_put_back_as_it_was(terminal):
    import termios

    _, other = terminal
    before = termios.tcgetattr(other), os.get_blocking(other)
    Keyboard(other).close()
    assert (termios.tcgetattr(other), os.get_blocking(other)) == before


def test_keys_need_a_terminal(tmp_path):
    with (tmp_path / "file").open("w") as file, pytest.raises(ValueError, match="expected a terminal"):
        Keyboard(file.fileno())


def test_a_spacemouse_that_reports_relative_motion(device):
    clock = Now()
    mouse = EventDevice(device.path, SPACEMICE[0], clock=clock)
    device.write((REL, 0, 175), (REL, 1, -350), (REL, 5, 20), (SYN, 0, 0), (KEY, 0x100, 1), (SYN, 0, 0))
    controls = mouse.read()
    assert controls.axes == {"y": -0.5, "x": 1.0, "yaw": 0.0}  # 20 of 350 is in the dead zone
    assert controls.held == controls.pressed == {"gripper"}
    clock.now = 0.09
    device.write((KEY, 0x100, 0), (SYN, 0, 0))
    assert mouse.read() == Controls({"y": -0.5, "x": 1.0, "yaw": 0.0})
    clock.now = 0.11  # at rest the kernel sends nothing
    assert mouse.read() == Controls()
    mouse.close()


LEFT, RIGHT = 0x100, 0x101


@pytest.mark.parametrize("layout", SPACEMICE)
@pytest.mark.parametrize("first", [LEFT, RIGHT])
@pytest.mark.parametrize("at_once", [True, False])
def test_both_buttons_of_a_spacemouse_stop_and_are_no_success(device, layout, first: int, at_once: bool):
    mouse = EventDevice(device.path, layout)
    presses = [(KEY, first, 1), (KEY, LEFT + RIGHT - first, 1)]
    pressed_buttons: set[str] = set()
    device.write(*presses[:1])
    if not at_once:
        pressed_buttons |= mouse.read().pressed
        assert pressed_buttons == ({"gripper"} if first == LEFT else set())
    device.write(*presses[1:])
    pressed_buttons |= mouse.read().pressed
    assert "stop" in pressed_buttons
    device.write((KEY, RIGHT, 0), (KEY, LEFT, 0))
    pressed_buttons |= mouse.read().pressed
    assert "success" not in pressed_buttons
    device.write((KEY, RIGHT, 1))
    assert mouse.read() == Controls({}, frozenset({"success"}))
    device.write((KEY, RIGHT, 0))
    assert mouse.read() == Controls({}, frozenset(), frozenset({"success"}))


def test_a_button_that_is_held_while_events_are_lost_is_still_held_and_a_stop_counts(device):
    pad = EventDevice(device.path, GAMEPAD)
    device.write((KEY, 0x136, 1), (SYN, 0, 0))
    assert pad.read().pressed == {"engage"}
    pad._device.active = [0x136, 0x13A]
    device.write((SYN, 3, 0), (ABS, 1, -200), (SYN, 0, 0))
    assert pad.read() == Controls({}, frozenset({"engage", "stop"}), frozenset({"stop"}))
    device.write((KEY, 0x13A, 0), (SYN, 0, 0))
    assert pad.read() == Controls({}, frozenset({"engage"}))


def test_a_stick_that_is_held_while_events_are_lost_still_drives(device):
    pad = EventDevice(device.path, GAMEPAD)
    device.write((ABS, 1, -350), (SYN, 0, 0))
    person = Operator(pad, ARM, {"x": ("x", 0.5)})
    assert person.action(PROPOSED)[0] == 0.5
    places = {1: -350}  # at its end the stick sends nothing more
    pad._device.absinfo = lambda code: SimpleNamespace(value=places.get(code, 0))
    device.write((SYN, 3, 0), (ABS, 1, -340), (SYN, 0, 0))
    assert person.action(PROPOSED)[0] == 0.5
    places[1] = 0
    device.write((SYN, 3, 0), (SYN, 0, 0))
    assert person.action(PROPOSED) is None


def test_beside_stop_nothing_begins():
    presses = [frozenset({"go", "stop"}), frozenset({"success", "stop"}), frozenset(), frozenset({"go"})]
    person = operator(*[Controls(pressed=pressed) for pressed in presses])
    slept = []
    assert person.wait_for("success", "go", sleep=slept.append) == "go"
    assert len(slept) == 3
    person = operator(Controls(pressed=presses[0]))
    assert person.wait_for("success", "go", "stop", sleep=slept.append) == "stop"


def test_a_gamepad(device):
    pad = EventDevice(device.path, GAMEPAD)
    device.write((ABS, 1, -350), (ABS, 0, 70), (KEY, 0x137, 1), (KEY, 0x137, 2), (SYN, 0, 0))
    assert pad.read() == Controls({"x": 1.0, "y": pytest.approx(-0.2)}, frozenset({"engage"}), frozenset({"engage"}))
    device.write((ABS, 1, 0), (ABS, 0, 0), (KEY, 0x13A, 1), (SYN, 0, 0))
    assert pad.read() == Controls({"x": 0.0, "y": 0.0}, frozenset({"engage", "stop"}), frozenset({"stop"}))


def test_after_lost_events_all_is_at_rest_until_the_next_report(device):
    pad = EventDevice(device.path, GAMEPAD)
    device.write((ABS, 1, -350), (KEY, 0x137, 1), (SYN, 0, 0), (SYN, 3, 0), (ABS, 1, -200), (SYN, 0, 0), (ABS, 4, 350))
    assert pad.read() == Controls({"z": -1.0}, frozenset(), frozenset({"engage"}))


def test_events_may_come_in_masses(device):
    pad = EventDevice(device.path, GAMEPAD)
    device.write(*[(ABS, 1, value) for value in range(-350, 351)])
    assert pad.read().axes == {"x": -1.0}
    device.write((ABS, 1, -10_000))
    assert pad.read().axes == {"x": 1.0}


@pytest.mark.parametrize("layout", [GAMEPAD, SPACEMICE[0], SPACEMICE[1]])
def test_a_device_that_is_unplugged_while_it_drives_is_an_error_and_drives_no_more(device, layout):
    opened = EventDevice(device.path, layout)
    device.write((ABS, 1, -350), (REL, 1, -350), (SYN, 0, 0))
    person = Operator(opened, ARM, {"x": ("x", 0.5)})
    assert person.action(PROPOSED)[0] == 0.5

    def gone():
        raise OSError(errno.ENODEV, "No such device")

    opened._device.read = gone
    for _ in range(2):
        with pytest.raises(OSError, match="No such device"):
            person.action(PROPOSED)


def test_a_device_that_is_not_there_is_reported(device, tmp_path):
    with pytest.raises(ValueError, match="No such file or directory; is it plugged in"):
        EventDevice(tmp_path / "event7", GAMEPAD)
    with pytest.raises(ValueError, match="No such file or directory; is it plugged in"):
        open_device(Device.GAMEPAD, str(tmp_path / "event7"))


def test_devices_are_found_by_what_they_have(device, monkeypatch):
    import evdev

    pad = open_device(Device.GAMEPAD)
    device.write((ABS, 1, -350), (SYN, 0, 0))
    assert pad.read().axes == {"x": 1.0}
    with pytest.raises(ValueError, match=r"no spacemouse among the readable input devices: Xbox Pad \(.*event0\)"):
        open_device(Device.SPACEMOUSE)
    for kind, number in (("REL", REL), ("ABS", ABS)):
        monkeypatch.setattr(evdev.InputDevice, "has", [f"{kind}_RX", f"{kind}_RZ", "BTN_0"])
        mouse = open_device(Device.SPACEMOUSE)
        device.write((number, 5, 350), (SYN, 0, 0))
        assert mouse.read().axes == {"yaw": -1.0}
        mouse.close()
    monkeypatch.setattr(evdev, "list_devices", lambda writable: [])
    with pytest.raises(ValueError, match="no gamepad among the readable input devices: none; plug it in"):
        open_device(Device.GAMEPAD)


def test_what_the_user_may_not_read_is_told(device, monkeypatch):
    import evdev

    monkeypatch.setattr(evdev, "list_devices", lambda writable: [])
    monkeypatch.setattr("real_robot.robots.devices.EVENTS", str(device.path.parent / "event*"))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ValueError, match="1 cannot be read: sudo usermod -aG input"):
        open_device(Device.GAMEPAD)


def test_without_its_extra_it_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "evdev", None)
    with pytest.raises(ValueError, match=r"pip install 'embodied-rl\[devices\]'"):
        open_device(Device.GAMEPAD)


def test_a_terminal_that_was_closed_is_gone():
    main, other = pty.openpty()
    keyboard = Keyboard(other)
    os.close(main)
    with pytest.raises(OSError, match=r"closed|Input/output"):
        keyboard.read()
    keyboard.close()
    os.close(other)


class Scripted:
    """Controls, one after the other."""

    def __init__(self, *controls: Controls) -> None:
        self.controls = list(controls)

    def read(self) -> Controls:
        return self.controls.pop(0) if self.controls else Controls()

    def close(self) -> None: ...


ARM = Contract({}, TensorSpec((4,), names=("x", "y", "z", "gripper"), low=(-1.0,) * 4, high=(1.0,) * 4), 0.05)
PROPOSED = np.array([0.1, 0.2, 0.3, -1.0])


def operator(*controls: Controls) -> Operator:
    return Operator(Scripted(*controls), ARM, {"x": ("x", 0.5), "z": ("pitch", -1.0)}, "gripper")


def test_a_person_replaces_the_elements_that_they_have_an_axis_for():
    person = operator(Controls(), Controls({"x": 1.0, "pitch": 0.25}), Controls({"y": 1.0}))
    assert person.action(PROPOSED) is None
    assert person.action(PROPOSED).tolist() == [0.5, 0.2, -0.25, -1.0]
    assert person.action(PROPOSED) is None  # nothing is on that axis


def test_the_gripper_turns_over_and_stays_until_the_person_lets_go():
    press, move = Controls(pressed=frozenset({"gripper"})), Controls({"x": 1.0})
    person = operator(press, move, press, move, Controls(), move)
    gripper = [None if taken is None else taken[3] for taken in (person.action(PROPOSED) for _ in range(6))]
    assert gripper == [1.0, 1.0, -1.0, -1.0, None, -1.0]


def test_holding_engage_keeps_the_robot_still():
    person = operator(Controls(held=frozenset({"engage"})))
    assert person.action(PROPOSED).tolist() == [0.0, 0.2, 0.0, -1.0]


def test_a_person_alone_moves_everything_and_the_gripper_stays():
    press, move = Controls(pressed=frozenset({"gripper"})), Controls({"x": 1.0})
    axes = {"x": ("x", 0.5), "y": ("y", 0.5), "z": ("pitch", -1.0)}
    alone = Operator(Scripted(Controls(), press, Controls(), move), ARM, axes, "gripper", alone=True)
    taken = [alone.action(None).tolist() for _ in range(4)]
    assert taken == [[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0], [0.5, 0.0, 0.0, 1.0]]
    with pytest.raises(ValueError, match=r"no axis moves y of the action; give axes=\{y: x\}"):
        Operator(Scripted(), ARM, {"x": ("x", 0.5), "z": ("z", 0.5)}, "gripper", alone=True)


def test_usual_axes_reach_a_share_of_the_limits():
    assert usual_axes(ARM, {}, 0.5) == {"x": ("x", 0.5), "y": ("y", 0.5), "z": ("z", 0.5)}
    assert usual_axes(ARM, {"gripper": "roll"}, 1.0)["gripper"] == ("roll", 1.0)
    with pytest.raises(ValueError, match=r"no action elements \['w'\]"):
        usual_axes(ARM, {"w": "x"}, 1.0)
    with pytest.raises(ValueError, match="no limits of the action"):
        usual_axes(Contract({}, TensorSpec((1,), names=("x",)), 0.1), {}, 1.0)


def test_a_leader_is_followed_while_it_measures():
    at = [np.array([0.1, 0.2]), None]
    leader = Leader(lambda: at.pop(0), Scripted(Controls({"x": 1.0}), Controls(pressed=frozenset({"success"}))))
    assert leader.action(None).tolist() == [0.1, 0.2]
    assert leader.action(None) is None
    assert leader.pressed == {"success"}


def test_waiting_for_a_button():
    person = operator(Controls(), Controls(pressed=frozenset({"failure"})), Controls(pressed=frozenset({"success"})))
    slept = []
    assert person.wait_for("success", "go", sleep=slept.append) == "success"
    assert len(slept) == 2


def test_axes_and_elements_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match="unknown axes"):
        Operator(Scripted(), ARM, {"x": ("sideways", 1.0)})
    with pytest.raises(ValueError, match="no action elements"):
        Operator(Scripted(), ARM, {"w": ("x", 1.0)})


def test_reading_never_blocks(device):
    pad = EventDevice(device.path, GAMEPAD)
    thread = threading.Thread(target=pad.read, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
