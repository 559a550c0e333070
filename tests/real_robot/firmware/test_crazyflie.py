"""The Crazyflie example, compiled against its interface and simulated on this machine."""

import itertools
import shutil
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from embodied.export.conditions import Conditions
from real_robot.firmware.exporting import Export, Target, export
from real_robot.firmware.toolchain import COMMON, call, host_compiler
from tests.real_robot.firmware.compiled import damage
from tests.real_robot.firmware.policies import make

INTERFACE = Path(__file__).with_name("crazyflie_interface")


FORCES, PID = 2.0, 0.0
"""Control modes of the answers: forces of the policy, and those of the firmware's PID controller."""
POSITION, OFF = "1 1 1 0 0 1 0 0 0", "0 0 0 0 0 0 0 0 0"
"""Set-points: modes of x, y, z, roll, pitch, yaw and the quaternion, thrust, and heading in degrees."""


def fly(directory: Path, states: str) -> list[list[float]]:
    """Answers to lines of states: whether it is healthy; then forces, whether PID was restarted, and control mode."""
    source = directory / "crazyflie" / "src" / "controller_policy.c"
    program = directory / "fly"
    call([host_compiler(), *COMMON, f"-I{INTERFACE}", INTERFACE / "fly.c", source, "-o", program, "-lm"], directory)
    (directory / "states").write_text(states)
    lines = call(["sh", "-c", "./fly < states"], directory).splitlines()
    return [[float(word) for word in line.split()] for line in lines]


def rotate(quaternion: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
    """v + 2 q x (q x v + w v), for quaternions w, x, y, z."""
    w, axis = quaternion[0], quaternion[1:]
    return vector + 2 * torch.linalg.cross(axis, torch.linalg.cross(axis, vector) + w * vector)


@pytest.mark.parametrize("kind", ["mlp", "recurrent", "history"])  # which reads no action, the last one, the last three
def test_it_commands_what_the_policy_does_on_the_same_state(tmp_path: Path, kind: str):
    export(make(kind), Export(Target.c), tmp_path / "export")
    generator = torch.Generator().manual_seed(0)
    goal, position, velocity, gyro = (torch.randn(3, generator=generator) for _ in range(4))
    quaternion = torch.nn.functional.normalize(torch.randn(4, generator=generator), dim=0)
    numbers = " ".join(f"{x:.9g}" for x in torch.cat((goal, position, quaternion, velocity, 57.2957795 * gyro)))
    steps = [
        (0, 0),
        (1, 1),
        (2, 1),
        (10, 1),
        (11, 1),
        (20, 1),
        (21, 0),
        (23, 1),
    ]  # time, and whether to fly
    rows = (f"{step} {POSITION if on else OFF} {numbers}" for step, on in steps)
    health, *said = fly(tmp_path / "export", "\n".join(rows))
    assert health == [1.0]
    assert [row[-1] for row in said] == [FORCES if on else PID for _, on in steps]
    policy = make(kind)
    columns = [rotate(quaternion, torch.eye(3)[axis]) for axis in range(3)]
    past = [torch.full((4,), -1.0)] * 3
    observation = {
        "position": (position - goal).clamp(-0.5, 0.5),
        "rotation": torch.stack(columns, 1).flatten(),
        "velocity": velocity,
        "angular_velocity": gyro,
    }
    memory = {"memory": policy.initial_memory(1)} if kind == "recurrent" else {}
    forces = [torch.zeros(4)]
    for _ in range(3):
        observation |= {"previous_action": past[-1], "action_history": torch.cat(past[-3:])}
        rows = TensorDict({key: part.unsqueeze(0) for key, part in observation.items()} | memory, [1])
        decision = policy.act(rows, deterministic=True)
        past.append(decision.actions[0, 0])
        memory = {"memory": decision.sample["memory"]} if kind == "recurrent" else {}
        forces.append((0.5 * (past[-1] + 1.0)).square())
    expected = torch.stack([forces[index] for index in (0, 1, 1, 2, 2, 3, 0, 1)])
    torch.testing.assert_close(torch.tensor(said)[:, :4], expected, atol=2e-6, rtol=0.0)


def line(step: int, setpoint: str = POSITION, position: str = "0.1", attitude: str = "1 0 0 0", gyro: str = "0") -> str:
    return f"{step} {setpoint} 0 0 0 {position} 0.1 -0.2 {attitude} 0.3 0 0 {gyro} 0 0"


def acted(policy, history: list[torch.Tensor], position=(0.1, 0.1, -0.2), velocity=(0.3, 0.0, 0.0)) -> torch.Tensor:
    """The action of `policy` level and without rotation; it becomes the newest of `history`."""
    parts = {"position": torch.tensor(position), "rotation": torch.eye(3).flatten(), "velocity": torch.tensor(velocity)}
    parts |= {"angular_velocity": torch.zeros(3), "action_history": torch.cat(history[-3:])}
    rows = TensorDict({key: part.unsqueeze(0) for key, part in parts.items()}, [1])
    history.append(policy.act(rows, deterministic=True).actions[0, 0])
    return (0.5 * (history[-1] + 1.0)).square()


def test_lost_measurements_hold_it_level_for_half_a_second_and_then_stop_it(tmp_path: Path):
    export(make("history"), Export(Target.c), tmp_path / "export")
    bad = [line(step, position="nan") for step in range(10, 530, 10)]  # 52 actions, of which 0.5 s are flown
    rows = [line(0), *bad, line(530), line(540, OFF), line(550)]
    health, *said = fly(tmp_path / "export", "\n".join(rows))
    assert health == [1.0]
    policy, past = make("history"), [torch.full((4,), -1.0)] * 3
    expected = [acted(policy, past), *(acted(policy, past, (0.0, 0.0, 0.0)) for _ in range(50))]
    torch.testing.assert_close(torch.tensor(said)[:51, :4], torch.stack(expected), atol=2e-6, rtol=0.0)
    assert (torch.tensor(said)[51:55, :4] == 0.0).all()  # off, also when measurements come back, until it is disarmed
    assert said[55][:4] == said[0][:4]  # it begins anew


def test_an_attitude_that_is_lost_is_the_last_one_and_short_gaps_end_nothing(tmp_path: Path):
    export(make("history"), Export(Target.c), tmp_path / "export")
    rows = [line(0)]
    for gap in range(4):  # 0.4 s each, which do not add up
        rows += [line(1000 * gap + step, attitude="nan nan nan nan", gyro="inf") for step in range(10, 410, 10)]
        rows.append(line(1000 * gap + 410))
    _, *said = fly(tmp_path / "export", "\n".join(rows))
    policy, past = make("history"), [torch.full((4,), -1.0)] * 3
    expected = torch.stack([acted(policy, past) for _ in said])  # level as it was, and not turning
    torch.testing.assert_close(torch.tensor(said)[:, :4], expected, atol=2e-6, rtol=0.0)


def test_far_goals_pull_no_more_than_near_ones(tmp_path: Path):
    export(make("mlp"), Export(Target.c), tmp_path / "export")
    _, far, near = fly(tmp_path / "export", "\n".join([line(0, position="-40"), line(10, position="-0.5")]))
    assert far == near


def test_past_actions_begin_as_in_training(tmp_path: Path):
    nominal = Conditions(("one airframe",), ("latency", "randomisation"), first_action=0.25)
    export(make("history"), Export(Target.c, conditions=nominal), tmp_path / "export")
    _, first = fly(tmp_path / "export", line(0))
    expected = acted(make("history"), [torch.full((4,), 0.25)] * 3)
    torch.testing.assert_close(torch.tensor(first)[:4], expected, atol=2e-6, rtol=0.0)


def test_a_damaged_policy_does_not_fly(tmp_path: Path):
    export(make("mlp"), Export(Target.c), tmp_path / "export")
    damage(tmp_path / "export")
    health, forces = fly(tmp_path / "export", f"10 {POSITION}" + " 0" * 16)
    assert health == [0.0]
    assert forces == [0.0, 0.0, 0.0, 0.0, 0.0, FORCES]


OTHERS = {
    "velocities": "2 2 2 0 0 2 0 0 0",
    "velocities at a height": "2 2 1 0 0 2 0 0 0",
    "a gamepad's attitude and thrust": "0 0 0 1 1 2 0 0.5 0",
    "rates and thrust": "0 0 0 2 2 2 0 0.5 0",
    "an attitude and a climb rate": "0 0 2 1 1 2 0 0 0",
    "level after a lost link": "0 0 1 1 1 2 0 0 0",
    "a position and a turn": "1 1 1 0 0 2 0 0 0",
    "a full state": "1 1 1 0 0 0 1 0 0",
    "a position in a plane": "1 1 0 0 0 1 0 0.5 0",
}


@pytest.mark.parametrize("name", OTHERS)
def test_every_other_set_point_is_the_firmwares_to_follow(tmp_path: Path, exported, name: str):
    folder = shutil.copytree(exported("history"), tmp_path / "export")
    rows = [line(0), line(10), line(21, OTHERS[name]), line(22, OTHERS[name]), line(30), line(40, OFF)]
    health, first, second, other, later, again, off = fly(folder, "\n".join(rows))
    thrust = float(OTHERS[name].split()[-2])
    assert health == [1.0]
    assert other == [thrust] * 4 + [1.0, PID]  # it forgot what it integrated in an earlier flight
    assert later == [thrust] * 4 + [0.0, PID]
    assert off == [0.0] * 4 + [1.0, PID]
    assert again == first  # the policy begins anew
    assert again != second
    assert first[-1] == FORCES


def test_every_combination_of_modes_is_followed_by_one_of_the_two_controllers(tmp_path: Path, exported):
    folder = shutil.copytree(exported("mlp"), tmp_path / "export")
    modes = list(itertools.product("012", repeat=7))
    rows = [line(10 * step, f"{' '.join(each)} 0.25 0") for step, each in enumerate(modes)]
    _, *answers = fly(folder, "\n".join(rows))
    for each, answer in zip(modes, answers, strict=True):
        position = each[:5] == ("1", "1", "1", "0", "0") and each[5] != "2" and each[6] == "0"
        assert answer[-1] == (FORCES if position else PID), each
        assert position or answer[:4] == [0.25] * 4, each


def test_a_heading_turns_the_frame_of_the_policy(tmp_path: Path, exported):
    """A drone turned by the heading of its set-point, at a place turned likewise, acts as without a heading."""
    folder = shutil.copytree(exported("mlp"), tmp_path / "export")
    half = torch.deg2rad(torch.tensor(60.0)) / 2.0
    turn = torch.tensor([half.cos(), 0.0, 0.0, half.sin()])
    generator = torch.Generator().manual_seed(1)
    position, velocity = torch.randn(2, 3, generator=generator).mul(0.3).unbind()
    w, x, y, z = torch.nn.functional.normalize(torch.tensor([0.9, 0.2, -0.1, 0.3]), dim=0)
    c, s = turn[0], turn[3]
    turned = torch.stack((c * w - s * z, c * x - s * y, c * y + s * x, c * z + s * w))

    def row(setpoint: str, *parts: torch.Tensor) -> str:
        numbers = " ".join(f"{number:.9g}" for number in torch.cat(parts).tolist())
        return f"0 {setpoint} 0 0 0 {numbers} 10 20 30"

    straight = row(POSITION, position, torch.stack((w, x, y, z)), velocity)
    with_heading = row("1 1 1 0 0 1 0 0 60", rotate(turn, position), turned, rotate(turn, velocity))
    (_, expected), (_, answer) = fly(folder, straight), fly(folder, with_heading)
    torch.testing.assert_close(torch.tensor(answer), torch.tensor(expected), atol=1e-5, rtol=0.0)
    (_, without) = fly(folder, straight.replace("1 1 1 0 0 1 0 0 0", "1 1 1 0 0 1 0 0 60"))
    assert without != expected


def test_a_chunk_is_flown_action_by_action_and_measurements_are_checked_in_between(tmp_path: Path):
    export(make("pairs"), Export(Target.c), tmp_path / "export")
    positions = ["0.1", "0.2", "0.3", "nan", "0.4", "0.1", *["nan"] * 51]
    rows = [line(10 * step, position=position) for step, position in enumerate(positions)]
    rows[5] = line(50, OFF)  # within a chunk, of which nothing is left after it
    health, *answers = fly(tmp_path / "export", "\n".join(rows))
    assert health == [1.0]
    policy, first = make("pairs"), torch.full((4,), -1.0)

    def chunk(past: list[torch.Tensor], position: float) -> list[torch.Tensor]:
        parts = {"position": torch.tensor([position, 0.1, -0.2]) if position else torch.zeros(3)}
        parts |= {"rotation": torch.eye(3).flatten(), "velocity": torch.tensor([0.3, 0.0, 0.0])}
        parts |= {"angular_velocity": torch.zeros(3), "action_history": torch.cat(past[-3:])}
        actions = policy.act(
            TensorDict({key: part.unsqueeze(0) for key, part in parts.items()}, [1]), deterministic=True
        )
        return list(actions.actions[0])

    flown = [first] * 3
    for position in (0.1, 0.3, 0.4):  # the second position and the lost fourth one come within a chunk
        flown += chunk(flown, position)
    forces = [(0.5 * (action + 1.0)).square() for action in flown[3:8]]
    torch.testing.assert_close(torch.tensor(answers)[:5, :4], torch.stack(forces), atol=2e-6, rtol=0.0)
    assert answers[5][-1] == PID
    again = [first] * 3
    for _ in range(25):
        again += chunk(again, 0.0)
    forces = [(0.5 * (action + 1.0)).square() for action in again[3:53]]
    torch.testing.assert_close(torch.tensor(answers)[6:56, :4], torch.stack(forces), atol=2e-6, rtol=0.0)
    assert answers[56][:4] == [0.0] * 4  # half a second without a position


def test_where_it_does_not_fit_it_says_why(tmp_path: Path):
    record = export(make("attention"), Export(Target.c), tmp_path / "attention")
    assert record["examples"]["crazyflie"] == "the state estimate has no neighbours (6, 7) in m world"
    assert not (tmp_path / "attention" / "crazyflie").exists()
    record = export(make("chunks"), Export(Target.c), tmp_path / "chunks")
    assert "expected 4 rotor set-points between -1 and 1, got (5,)" in record["examples"]["crazyflie"]
