"""A person's devices through the real interfaces: a terminal, and input events as the kernel writes them."""

import os
import pty
import struct
import threading
from pathlib import Path

import numpy as np
import pytest

from embodied.contract import Contract, TensorSpec
from real_robot.robots.intervention import GAMEPAD, SPACEMOUSE, Controls, InputDevice, Keyboard, Operator

SYN, KEY, REL, ABS = 0, 1, 2, 3


class Now:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Device:
    """An event device that the test writes: a pipe with the kernel's records."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self._keep = os.open(path, os.O_RDWR)
        self.path = path

    def write(self, *events: tuple[int, int, int]) -> None:
        os.write(self._keep, b"".join(struct.pack("llHHi", 1700000000, 5, *event) for event in events))

    def write_bytes(self, data: bytes) -> None:
        os.write(self._keep, data)


@pytest.fixture
def device(tmp_path) -> Device:
    return Device(tmp_path / "event0")


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
    mouse = InputDevice(device.path, SPACEMOUSE, clock=clock)
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


def test_a_gamepad(device):
    pad = InputDevice(device.path, GAMEPAD)
    device.write((ABS, 1, -350), (ABS, 0, 70), (KEY, 0x137, 1), (KEY, 0x137, 2), (SYN, 0, 0))
    assert pad.read() == Controls({"x": 1.0, "y": pytest.approx(-0.2)}, frozenset({"engage"}), frozenset({"engage"}))
    device.write((ABS, 1, 0), (ABS, 0, 0), (KEY, 0x13A, 1), (SYN, 0, 0))
    assert pad.read() == Controls({"x": 0.0, "y": 0.0}, frozenset({"engage", "stop"}), frozenset({"stop"}))


def test_after_lost_events_all_is_at_rest_until_the_next_report(device):
    pad = InputDevice(device.path, GAMEPAD)
    device.write((ABS, 1, -350), (KEY, 0x137, 1), (SYN, 0, 0), (SYN, 3, 0), (ABS, 1, -200), (SYN, 0, 0), (ABS, 4, 350))
    assert pad.read() == Controls({"z": -1.0}, frozenset(), frozenset({"engage"}))


def test_events_may_come_in_pieces_and_in_masses(device):
    pad = InputDevice(device.path, GAMEPAD)
    event = struct.pack("llHHi", 0, 0, ABS, 1, 350)
    device.write_bytes(event[:7])
    assert pad.read() == Controls()
    device.write_bytes(event[7:])
    assert pad.read().axes == {"x": -1.0}
    device.write(*[(ABS, 1, value) for value in range(-350, 351)])
    assert pad.read().axes == {"x": -1.0}
    device.write((ABS, 1, -10_000))
    assert pad.read().axes == {"x": 1.0}


def test_a_device_that_is_not_there_is_reported(tmp_path):
    with pytest.raises(ValueError, match="No such file or directory; is it plugged in"):
        InputDevice(tmp_path / "event7", GAMEPAD)


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
    pad = InputDevice(device.path, GAMEPAD)
    thread = threading.Thread(target=pad.read, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
