"""The PX4 example, compiled against its interface and flown on this machine."""

import math
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict

from embodied.algorithms.on_policy.bptt import BPTTConfig
from embodied.training.loop import train
from policies.mlp import MLPConfig
from real_robot.firmware.exporting import Export, Target, export
from real_robot.firmware.toolchain import COMMON, call, host_compiler
from sims.quadrotor.environment import QuadrotorEnvironment
from sims.quadrotor.physics.airframes import CRAZYFLIE
from sims.quadrotor.physics.rotors import Rotors, place
from sims.quadrotor.task import HoverTask
from tests.real_robot.firmware.compiled import damage
from tests.real_robot.firmware.policies import make

INTERFACE = Path(__file__).with_name("px4_interface")
MODE = 23
PX4_FLAGS = (
    *("-Wcast-align", "-Wdouble-promotion", "-Wfloat-equal", "-Wlogical-op", "-Wpointer-arith", "-Wshadow"),
    *("-Wno-missing-field-initializers", "-Wno-unused-parameter", "-funsafe-math-optimizations", "-fno-math-errno"),
)
"""What PX4 compiles with, warnings being errors."""
PX4_C_FLAGS = ("-Wbad-function-cast", "-Wnested-externs", "-Wstrict-prototypes")
PX4_QUAD = {0: 0, 1: 2, 2: 3, 3: 1}
"""PX4's numbers of a quadrotor's motors, from the front right across: rotors in our order."""


def geometry(count: int, arm_x: float = 0.2, arm_y: float = 0.25) -> list[tuple[float, float, float]]:
    """Place forward and to the right, and moment of each rotor, as PX4 has them."""
    places = [place(rotor, count) for rotor in range(count)]
    return [(arm_x * x / math.sqrt(2.0), -arm_y * y / math.sqrt(2.0), -0.05 * spin) for x, y, spin in places]


@pytest.fixture(autouse=True, scope="module")
def compiler():
    if shutil.which("g++") is None:
        assert os.environ.get("CI_FIRMWARE") != "required"
        pytest.skip("g++ is not installed: apt-get install g++")


class Vehicle:
    """The compiled module, which answers lines."""

    def __init__(self, program: Path) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([program], stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def tell(self, *lines: str) -> None:
        """Lines that print nothing."""
        self.process.stdin.write("".join(f"{line}\n" for line in lines))
        self.process.stdin.flush()

    def ask(self, line: str) -> list[float]:
        """A line that prints numbers."""
        self.tell(line)
        return [float(word) for word in self.process.stdout.readline().split()]

    def set_up(self, rotors: list[tuple[float, float, float]], **others: float) -> list[float]:
        """Geometry and parameters, then the module's start: its result."""
        self.tell(f"int CA_ROTOR_COUNT {len(rotors)}")
        for number, (x, y, moment) in enumerate(rotors):
            self.tell(
                *(f"param CA_ROTOR{number}_{key} {value}" for key, value in {"PX": x, "PY": y, "KM": moment}.items())
            )
        self.tell(*(f"param {key} {value}" for key, value in others.items()))
        return self.ask("start")

    def ready(self, rotors: list[tuple[float, float, float]], **others: float) -> None:
        """Started, registered, disarmed in another mode."""
        assert self.set_up(rotors, **others) == [0.0]
        self.tell("time 1000000", "status 4 0")
        self.gyro(1000)
        self.tell(f"registered 1 {MODE} 7")
        self.gyro(1001)

    def see(self, position=(0, 0, 0), velocity=(0, 0, 0), attitude=(1, 0, 0, 0), heading: float = 0.0) -> None:
        """Measurements in PX4's frames, north, east and down."""
        self.tell(f"attitude {' '.join(map(repr, map(float, attitude)))}")
        self.tell(f"position 1 {' '.join(repr(float(x)) for x in (*position, *velocity, heading))}")

    def gyro(self, time_ms: float, rate=(0, 0, 0)) -> tuple[int, torch.Tensor]:
        """A run of the module: how often it told the motors something, and the last of that."""
        count, *controls = self.ask(f"gyro {round(1000 * time_ms)} {' '.join(repr(float(x)) for x in rate)}")
        return int(count), torch.tensor(controls)

    def errors(self) -> str:
        """What it has said on the console, after its end."""
        _, said = self.process.communicate(timeout=30)
        return said


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory):
    """Programs by the kind of policy."""
    programs = {}

    def program(kind: str) -> Path:
        if kind not in programs:
            directory = tmp_path_factory.mktemp(kind)
            export(make(kind), Export(Target.c), directory / "export")
            programs[kind] = built(directory)
        return programs[kind]

    return program


def built(directory: Path) -> Path:
    """The program of `directory / "export"`."""
    module = directory / "export" / "px4" / "src" / "modules" / "policy_control"
    for name in re.findall(r"#include <(\w+/[\w/]+\.h(?:pp)?)>", (module / "policy_control.cpp").read_text()):
        header = directory / "include" / name
        header.parent.mkdir(parents=True, exist_ok=True)
        header.write_text('#include "px4.hpp"\n')
    sources = [directory / "export" / "policy.c", directory / "export" / "flight" / "flight.c"]
    call([host_compiler(), *COMMON, *PX4_FLAGS, *PX4_C_FLAGS, "-c", *sources], directory)
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", *PX4_FLAGS, "-fno-exceptions", "-fno-rtti"]
    folders = [f"-I{INTERFACE}", f"-I{directory / 'include'}", f"-I{module}"]
    objects = ["policy.o", "flight.o"]
    call(["g++", *flags, *folders, INTERFACE / "fly.cpp", *objects, "-o", directory / "fly"], directory)
    return directory / "fly"


@pytest.fixture
def vehicle(compiled) -> Iterator[SimpleNamespace]:
    """Makes vehicles, and ends them."""
    made: list[Vehicle] = []

    def make_one(kind: str = "mlp") -> Vehicle:
        made.append(Vehicle(compiled(kind)))
        return made[-1]

    yield make_one
    for each in made:
        each.process.kill()
        each.process.communicate()


def speeds(policy, position, rotation, velocity, rate, past=()) -> torch.Tensor:
    """What `policy` tells four rotors, as shares of the highest speed."""
    parts = {"position": position, "rotation": rotation.flatten(), "velocity": velocity, "angular_velocity": rate}
    if past:
        parts["action_history"] = torch.cat(past[-3:])
    rows = TensorDict({key: torch.as_tensor(part).float().unsqueeze(0) for key, part in parts.items()}, [1])
    return policy.act(rows, deterministic=True).actions[0, 0]


def rotation(quaternion: torch.Tensor) -> torch.Tensor:
    """The rotation matrix of w, x, y, z."""
    w, axis = quaternion[0], quaternion[1:]
    columns = [v + 2 * torch.linalg.cross(axis, torch.linalg.cross(axis, v) + w * v) for v in torch.eye(3)]
    return torch.stack(columns, 1)


def share(action: torch.Tensor, curve: float = 0.0) -> torch.Tensor:
    """PX4's control of a rotor told `action`."""
    speed = 0.5 * (action.clamp(-1.0, 1.0) + 1.0)
    return curve * speed**2 + (1.0 - curve) * speed


SWAP = torch.diag(torch.tensor([1.0, -1.0, -1.0]))
"""Between PX4's axes (forward or north, right or east, down) and ours (forward or north, left or west, up)."""


@pytest.mark.parametrize("curve", [0.0, 0.3])
def test_it_commands_what_the_policy_does_on_the_same_state(vehicle, curve: float):
    generator = torch.Generator().manual_seed(0)
    here, there, velocity, rate = (0.3 * torch.randn(3, generator=generator) for _ in range(4))
    quaternion = torch.nn.functional.normalize(torch.randn(4, generator=generator), dim=0)
    flown, policy, yaw = vehicle(), make("mlp"), 0.8
    quad = geometry(4)
    flown.ready([quad[PX4_QUAD[motor]] for motor in range(4)], THR_MDL_FAC=curve)
    flown.tell(f"status {MODE} 1")
    flown.see(here, velocity, quaternion)
    assert flown.gyro(1010, rate)[0] == 1
    flown.tell("time 1015000", f"setpoint {' '.join(map(repr, there.tolist()))} {yaw}")
    flown.see(here, velocity, quaternion)
    _, control = flown.gyro(1020, rate)
    body = SWAP @ rotation(quaternion) @ SWAP  # from our body to north, west and up
    c, s = math.cos(yaw), math.sin(yaw)
    ahead = torch.tensor([[c, -s, 0.0], [s, c, 0.0], [0.0, 0.0, 1.0]])  # yaw is clockwise: north and west seen from it
    error = (ahead @ SWAP @ (here - there)).clamp(-0.5, 0.5)
    told = speeds(policy, error, ahead @ body, ahead @ SWAP @ velocity, SWAP @ rate)
    expected = torch.stack([told[PX4_QUAD[motor]] for motor in range(4)])
    torch.testing.assert_close(control[:4], share(expected, curve), atol=3e-6, rtol=0.0)
    assert control[4:].isnan().all()
    assert expected.std() > 0.1


@pytest.mark.parametrize("fast", [1.0, 50.0])
@pytest.mark.parametrize("count", [6, 8])
def test_six_and_eight_rotors_take_their_shares_whatever_their_numbers(vehicle, count: int, fast: float):
    flown, policy = vehicle(), make("mlp")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1)).tolist()
    flown.ready([geometry(count)[rotor] for rotor in order])
    flown.tell(f"status {MODE} 1")
    flown.see()
    _, control = flown.gyro(1010, (0.5 * fast, -0.4 * fast, 0.3 * fast))
    told = speeds(policy, torch.zeros(3), torch.eye(3), torch.zeros(3), fast * torch.tensor([0.5, 0.4, -0.3]))
    mixed = torch.stack(Rotors.of(torch.tensor(float(count))).mixed(list(told)))[order]
    torch.testing.assert_close(control[:count], share(mixed), atol=3e-6, rtol=0.0)
    assert control[count:].isnan().all()
    assert (mixed.abs().max() > 1.0) == (fast > 1.0)  # beyond the limits


def test_pairs_on_one_arm_turn_it_as_four_would(vehicle):
    flown, policy = vehicle(), make("mlp")
    quad = geometry(4)
    flown.ready([*quad, *((x, y, -moment) for x, y, moment in quad)])  # below each another that turns the other way
    flown.tell(f"status {MODE} 1")
    flown.see()
    _, control = flown.gyro(1010)
    told = speeds(policy, torch.zeros(3), torch.eye(3), torch.zeros(3), torch.zeros(3))
    yaw = (told * torch.tensor([-1.0, 1.0, -1.0, 1.0])).mean() * torch.tensor([-1.0, 1.0, -1.0, 1.0])
    expected = torch.cat((told, told - 2.0 * yaw))
    torch.testing.assert_close(control[:8], share(expected), atol=3e-6, rtol=0.0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda rotors: rotors[:3], "CA_ROTOR_COUNT from 4 to 8, got 3"),
        (lambda rotors: [(x + 0.1, y, moment) for x, y, moment in rotors], "unevenly"),
        (lambda rotors: [(x, y, abs(moment)) for x, y, moment in rotors], "unevenly"),
        (lambda rotors: [(0.0, y, moment) for _, y, moment in rotors], "unevenly"),
        (lambda rotors: [*rotors[:2], (rotors[2][0], 0.0, rotors[2][2]), rotors[3]], "unevenly"),
    ],
)
def test_rotors_that_it_could_not_fly_with_are_refused(vehicle, change, said: str):
    flown = vehicle()
    assert flown.set_up(change(geometry(4))) == [-1.0]
    assert said in flown.errors()


@pytest.mark.parametrize("axis", ["AX 0.3", "AY -0.3", "AZ 1"])
def test_a_tilted_rotor_is_refused(vehicle, axis: str):
    flown = vehicle()
    flown.tell(f"param CA_ROTOR2_{axis}")
    assert flown.set_up(geometry(4)) == [-1.0]
    assert "rotor 2 is tilted" in flown.errors()


def test_it_asks_until_it_is_a_mode_that_keeps_others_from_the_motors(vehicle):
    flown = vehicle()
    assert flown.set_up(geometry(4)) == [0.0]
    for time_ms, asked in ((10, 1), (500, 1), (1100, 2), (2200, 3)):
        flown.tell("status 0 1")
        assert flown.gyro(time_ms)[0] == 0  # mode 0 is not its own before it has one
        flown.tell("requests")
        name = flown.process.stdout.readline().split()
        assert (int(name[0]), name[1], int(name[2])) == (asked, "Policy11", 0)  # with its check
    flown.tell(f"registered 0 {MODE} 7", f"status {MODE} 1")
    assert flown.gyro(3150)[0] == 0  # refused
    flown.tell(f"registered 1 {MODE} 7", "status 0 1")
    flown.gyro(3160)
    flown.tell("requests")
    count, _, configured, source, flags, *_ = flown.process.stdout.readline().split()
    # Without "allocation"; with "termination", PX4's rate controller would say that there is no thrust.
    assert (int(count), int(configured), int(source), flags) == (3, 1, MODE, "00")


def test_when_it_stops_the_mode_ends(vehicle):
    flown = vehicle()
    flown.ready(geometry(4))
    flown.tell("stop", "requests")
    *_, ended, mode = flown.process.stdout.readline().split()
    assert (ended, mode) == ("1", str(MODE))


def test_stopped_in_flight_it_flies_on_until_the_commander_has_taken_another_mode(vehicle):
    flown = vehicle()
    flown.ready(geometry(4))
    flown.tell(f"status {MODE} 1")
    flown.see()
    assert flown.gyro(1010)[0] == 1
    assert flown.ask("ask 1")[3] == 1.0
    flown.tell("stop")
    told, control = flown.gyro(1020)
    assert told == 1
    assert control[:4].isfinite().all()
    assert flown.ask("ask 2")[3] == 0.0
    flown.tell("status 4 1")
    assert flown.gyro(1030)[0] == 0
    flown.tell("stop", "requests")
    *_, ended, mode = flown.process.stdout.readline().split()
    assert (ended, mode) == ("1", str(MODE))


def test_started_again_it_does_not_take_the_mode_of_before(vehicle):
    flown = vehicle()
    flown.ready(geometry(4))
    flown.tell("stop")
    assert flown.ask("start") == [0.0]
    flown.tell(f"status {MODE} 1")
    assert flown.gyro(1010)[0] == 0  # topics keep their last message, here what the commander replied to the one before
    flown.tell("requests")
    asked, _, configured, *_ = flown.process.stdout.readline().split()
    assert (int(asked), int(configured)) == (2, 1)
    flown.tell("registered 1 24 7", "status 24 1")
    assert flown.gyro(1020)[0] == 1


def test_it_moves_no_motor_in_other_modes_or_disarmed(vehicle):
    flown = vehicle()
    flown.ready(geometry(4))
    flown.see()
    for mode, armed, told in ((4, 0, 0), (4, 1, 0), (MODE, 0, 0), (MODE, 1, 1), (4, 1, 0), (MODE, 0, 0)):
        flown.tell(f"status {mode} {armed}")
        assert flown.gyro(1010)[0] == told


def test_the_land_detector_hears_of_the_thrust(vehicle):
    flown = vehicle()
    flown.ready(geometry(6))
    assert flown.ask("thrust")[0] == 0.0
    flown.tell(f"status {MODE} 1")
    flown.see()
    _, control = flown.gyro(1010)
    count, x, y, z = flown.ask("thrust")
    assert (count, x, y) == (1.0, 0.0, 0.0)
    assert z == pytest.approx(-float(control[:6].mean()), abs=1e-5)
    assert z < -0.1
    for action in range(60):  # nothing is measured: motors stop
        flown.gyro(1300 + 10 * action)
    assert flown.ask("thrust")[1:] == [0.0, 0.0, 0.0]


def test_the_commander_hears_whether_all_is_measured(vehicle):
    flown = vehicle()
    flown.ready(geometry(4))
    flown.gyro(1010)
    assert flown.ask("ask 5") == [1.0, 5.0, 7.0, 0.0, 1.0]  # nothing measured yet
    flown.see()
    flown.gyro(1020)
    assert flown.ask("ask 6") == [1.0, 6.0, 7.0, 1.0, 1.0]
    flown.tell("position 0 0 0 0 0 0 0 0")
    flown.gyro(1030)
    assert flown.ask("ask 7")[3] == 0.0
    flown.see()
    flown.gyro(1040)
    assert flown.ask("ask 8")[3] == 1.0
    flown.gyro(1500)  # and now old
    assert flown.ask("ask 9")[3] == 0.0


def test_it_acts_at_the_policys_rate_and_repeats_in_between(vehicle):
    flown = vehicle("history")  # whose actions change with the past ones
    flown.ready(geometry(4))
    flown.tell(f"status {MODE} 1")
    controls = []
    for time_ms in range(1010, 1050):
        flown.see()
        told, control = flown.gyro(time_ms)
        assert told == 1
        controls.append(control[:4])
    policy, past = make("history"), [torch.full((4,), -1.0)] * 3
    for step in range(4):
        past.append(speeds(policy, torch.zeros(3), torch.eye(3), torch.zeros(3), torch.zeros(3), past))
        # A measurement that comes within a millisecond of its time is early enough.
        for control in controls[max(0, 10 * step - 1) : 10 * step + 9]:
            torch.testing.assert_close(control, share(past[-1]), atol=3e-6, rtol=0.0)
        assert (share(past[-1]) - share(past[-2])).abs().max() > 1e-3


def test_it_holds_the_place_and_heading_where_it_took_over(vehicle):
    flown, yaw = vehicle(), 0.6
    level = (math.cos(yaw / 2), 0, 0, math.sin(yaw / 2))
    flown.ready(geometry(4))
    flown.see((3.0, -4.0, -5.0), attitude=level, heading=yaw)
    flown.tell("setpoint 0 0 0 0")  # from before
    flown.gyro(1010)
    flown.tell(f"status {MODE} 1")
    flown.see((3.0, -4.0, -5.0), attitude=level, heading=yaw)
    _, here = flown.gyro(1020)
    told = speeds(make("mlp"), torch.zeros(3), torch.eye(3), torch.zeros(3), torch.zeros(3))
    torch.testing.assert_close(here[:4], share(told), atol=3e-6, rtol=0.0)
    # The estimator starts anew elsewhere, turned: nothing has moved.
    flown.tell("reset 10 20 -30 0.5")
    turned = (math.cos((yaw + 0.5) / 2), 0, 0, math.sin((yaw + 0.5) / 2))
    flown.see((13.0, 16.0, -35.0), attitude=turned, heading=yaw + 0.5)
    torch.testing.assert_close(flown.gyro(1040)[1][:4], share(told), atol=3e-6, rtol=0.0)


def test_set_points_are_followed_while_they_are_fresh(vehicle):
    flown, policy = vehicle(), make("mlp")

    def expected(north: float) -> torch.Tensor:
        return share(speeds(policy, torch.tensor([north, 0.0, 0.0]), torch.eye(3), torch.zeros(3), torch.zeros(3)))

    flown.ready(geometry(4), POLICY_SP_AGE=0.1)
    flown.see()
    flown.gyro(1005)
    flown.tell(f"status {MODE} 1")
    flown.gyro(1010)
    flown.tell("time 1015000", "setpoint 0.3 nan nan nan")
    flown.see()
    torch.testing.assert_close(flown.gyro(1020)[1][:4], expected(-0.3), atol=3e-6, rtol=0.0)
    flown.tell("time 1030000", "setpoint 0.1 nan nan nan", "time 1300000")  # which it gets to see too late
    flown.see()
    torch.testing.assert_close(flown.gyro(1300)[1][:4], expected(-0.3), atol=3e-6, rtol=0.0)


def test_what_is_old_or_not_valid_is_unknown(vehicle):
    flown, policy, none = vehicle(), make("mlp"), torch.zeros(3)
    flown.ready(geometry(4))
    flown.tell(f"status {MODE} 1")
    flown.see()
    flown.gyro(1010)
    rolled, attitude = torch.tensor([0.8, 0.6, 0.0, 0.0]), "attitude 0.8 0.6 0 0"
    for time_ms, line, error, velocity in (
        (1020, "position 1 0.3 0 0 0.4 0 0 0", (0.3, 0.0, 0.0), (0.4, 0.0, 0.0)),
        (1030, "position 2 0.3 0 0 0.4 0 0 0", (0.3, 0.0, 0.0), (0.0, 0.0, 0.0)),
        (1040, "position 1 0.3 0 0 0.4 0 0 0", (0.3, 0.0, 0.0), (0.4, 0.0, 0.0)),
        (1240, "", (0.0, 0.0, 0.0), (0.0, 0.0, 0.0)),  # the position of 0.2 s ago
    ):
        flown.tell(f"time {1000 * time_ms - 10000}", line)
        flown.tell(f"time {1000 * time_ms}", attitude)
        _, control = flown.gyro(time_ms)
        told = speeds(policy, torch.tensor(error), rotation(rolled), torch.tensor(velocity), none)
        torch.testing.assert_close(control[:4], share(told), atol=3e-6, rtol=0.0)
        assert flown.ask("ask 1")[3] == (velocity[0] > 0.0)
    flown.tell("time 1250000", "position 1 0 0 0 0 0 0 0", attitude)
    flown.gyro(1250)
    assert flown.ask("ask 1")[3] == 1.0
    flown.tell("time 1320000", "position 1 0 0 0 0 0 0 0")  # the attitude of 0.07 s ago
    _, control = flown.gyro(1320)
    torch.testing.assert_close(
        control[:4], share(speeds(policy, none, rotation(rolled), none, none)), atol=3e-6, rtol=0.0
    )
    assert flown.ask("ask 1")[3] == 0.0


def test_without_a_place_to_hold_there_is_no_position_error(vehicle):
    flown = vehicle()
    flown.ready(geometry(4))
    flown.tell(f"status {MODE} 1")
    flown.see((0.3, 0.2, -0.1), heading=math.nan)
    told = speeds(make("mlp"), torch.zeros(3), torch.eye(3), torch.zeros(3), torch.zeros(3))
    torch.testing.assert_close(flown.gyro(1010)[1][:4], share(told), atol=3e-6, rtol=0.0)
    assert flown.ask("ask 1")[3] == 0.0


@pytest.mark.parametrize(("age", "followed"), [(-1.0, False), (0.0, False), (1e36, True), (math.nan, False)])
def test_any_age_of_set_points_may_be_given(vehicle, age: float, followed: bool):
    flown = vehicle()
    flown.ready(geometry(4), POLICY_SP_AGE=age)
    flown.tell(f"status {MODE} 1")
    flown.see()
    flown.gyro(1010)
    flown.tell("time 1015000", "setpoint 0.3 nan inf nan")
    flown.see()
    goal = torch.tensor([-0.3 if followed else 0.0, 0.0, 0.0])
    told = speeds(make("mlp"), goal, torch.eye(3), torch.zeros(3), torch.zeros(3))
    torch.testing.assert_close(flown.gyro(1020)[1][:4], share(told), atol=3e-6, rtol=0.0)


def test_lost_measurements_hold_it_level_for_half_a_second_and_then_stop_it(vehicle):
    flown = vehicle("history")
    flown.ready(geometry(4))
    flown.tell(f"status {MODE} 1")
    flown.see()
    flown.gyro(1010)
    flown.see(attitude=(math.nan,) * 4, position=(math.nan, 0, 0))
    policy, past = make("history"), [torch.full((4,), -1.0)] * 3
    level = (torch.zeros(3), torch.eye(3), torch.zeros(3), torch.zeros(3))
    past.append(speeds(policy, *level, past))
    for action in range(50):
        told, control = flown.gyro(1020 + 10 * action)
        past.append(speeds(policy, *level, past))
        assert told == 1
        torch.testing.assert_close(control[:4], share(past[-1]), atol=3e-6, rtol=0.0)
        assert flown.ask("ask 1")[3] == 0.0  # the commander takes another mode meanwhile
    for time_ms in (1520, 1530, 1600):  # off, also when measurements come back
        told, control = flown.gyro(time_ms)
        assert told == 1
        assert control.isnan().all()
        flown.see()
        assert flown.ask("ask 1")[3] == 0.0
    flown.tell(f"status {MODE} 0")
    flown.gyro(1610)
    assert flown.ask("ask 1")[3] == 1.0
    flown.tell(f"status {MODE} 1")
    flown.see()
    first = share(speeds(policy, *level, [torch.full((4,), -1.0)] * 3))
    torch.testing.assert_close(flown.gyro(1620)[1][:4], first, atol=3e-6, rtol=0.0)  # it begins anew


def test_after_a_loss_it_has_all_of_its_time_again(vehicle):
    flown = vehicle()
    flown.ready(geometry(4))
    flown.tell(f"status {MODE} 1")
    for action in range(60):
        _, control = flown.gyro(1010 + 10 * action)
    assert control.isnan().all()
    flown.tell(f"status {MODE} 0")
    flown.gyro(1610)
    flown.tell(f"status {MODE} 1")
    assert flown.gyro(1620)[1][:4].isfinite().all()


def test_a_hexarotor_that_it_flies_comes_to_its_goal(tmp_path: Path):
    """A policy learns to hover with four rotors; PX4's module flies six with it, in PX4's frames."""
    task = HoverTask(nominal=True)
    policy = MLPConfig(hidden=[64, 64]).build(task.contract("disturbed"))
    for _ in train(
        task.environment(64, "disturbed", "train"), policy, BPTTConfig(learning_rate=7e-3), env_steps=425_000
    ):
        pass
    export(policy, Export(Target.c, conditions=task.conditions), tmp_path / "export")
    flown, count, starts = Vehicle(built(tmp_path)), 6, 5
    flown.ready(geometry(count))
    airframe = replace(CRAZYFLIE, rotors=float(count))
    env = QuadrotorEnvironment(1, airframe=airframe, split="eval", noise=False)
    rotors, time_ms, errors = Rotors.of(torch.tensor(float(count))), 1010, []
    for start in range(starts):
        flown.tell(f"status {MODE} 0")
        flown.gyro(time_ms)
        flown.tell(f"status {MODE} 1")
        env.reset(starts=torch.tensor([start]))
        for _ in range(500):
            body = env.body
            position, velocity, rate = (
                (SWAP @ torch.stack(rows)[:, 0]).tolist()
                for rows in (body.position, body.velocity, body.angular_velocity)
            )
            w, x, y, z = (float(row) for row in body.quaternion)
            heading = -math.atan2(2.0 * (w * z + x * y), 1.0 - 2.0 * (y * y + z * z))
            flown.tell(f"time {1000 * time_ms}", "setpoint 0 0 0 0")
            flown.see(position, velocity, (w, x, -y, -z), heading)
            time_ms += 10
            _, control = flown.gyro(time_ms, rate)
            told = torch.stack(rotors.joined([*control[:count], *[torch.tensor(0.0)] * 2]))
            step = env.step((2.0 * told - 1.0).view(1, 1, 4))
            if step.terminated.any():
                break
        errors.append(float(torch.stack(env.body.position).norm()) if step.success.any() else math.inf)
    assert sorted(errors)[starts // 2] < 0.1, errors
    assert sum(error < 0.2 for error in errors) >= starts - 1, errors


def test_a_damaged_policy_does_not_start(compiled, tmp_path: Path):
    export(make("mlp"), Export(Target.c), tmp_path / "export")
    damage(tmp_path / "export")
    flown = Vehicle(built(tmp_path))
    assert flown.set_up(geometry(4)) == [-1.0]
    assert "damaged" in flown.errors()
