"""The Crazyflie example, compiled against its interface and simulated on this machine."""

from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from embodied.deployment.conditions import Conditions
from real_robot.firmware.exporting import Export, Target, export
from real_robot.firmware.toolchain import COMMON, call, host_compiler
from tests.real_robot.firmware.compiled import damage
from tests.real_robot.firmware.policies import make

INTERFACE = Path(__file__).with_name("crazyflie_interface")


def fly(directory: Path, states: str) -> list[list[float]]:
    """What the controller says for lines of states: whether it is healthy, then forces and control mode."""
    source = directory / "crazyflie" / "src" / "controller_policy.c"
    program = directory / "fly"
    call([host_compiler(), *COMMON, f"-I{INTERFACE}", INTERFACE / "fly.c", source, "-o", program], directory)
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
    health, *said = fly(tmp_path / "export", "\n".join(f"{step} {mode} {numbers}" for step, mode in steps))
    assert health == [1.0]
    assert {row[-1] for row in said} == {2.0}  # controlModeForce
    policy = make(kind)
    columns = [rotate(quaternion, torch.eye(3)[axis]) for axis in range(3)]
    past = [torch.full((4,), -1.0)] * 3
    observation = {
        "position": (position - goal).clamp(-0.5, 0.5), "rotation": torch.stack(columns, 1).flatten(),
        "velocity": velocity, "angular_velocity": gyro,
    }  # fmt: skip
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


def line(step: int, mode: int = 1, position: str = "0.1", attitude: str = "1 0 0 0", gyro: str = "0") -> str:
    return f"{step} {mode} 0 0 0 {position} 0.1 -0.2 {attitude} 0.3 0 0 {gyro} 0 0"


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
    rows = [line(0), *bad, line(530), line(540, mode=0), line(550)]
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
    health, forces = fly(tmp_path / "export", "10 1" + " 0" * 16)
    assert health == [0.0]
    assert forces == [0.0, 0.0, 0.0, 0.0, 2.0]


def test_where_it_does_not_fit_it_says_why(tmp_path: Path):
    record = export(make("attention"), Export(Target.c), tmp_path / "attention")
    assert record["examples"]["crazyflie"] == "the state estimate has no neighbours (6, 7) in m world"
    assert not (tmp_path / "attention" / "crazyflie").exists()
    record = export(make("chunks"), Export(Target.c), tmp_path / "chunks")
    assert "expected 4 rotor set-points between -1 and 1, got (5,)" in record["examples"]["crazyflie"]
