"""`evaluate.py sim_to_real=...`: the same policy on several back ends, on the same initial states."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import evaluate
import train
from embodied.errors import UserError
from embodied.saving import checkpoint
from policies.registry import trained_policy
from real_robot.recording.recorder import Recorder
from real_robot.robots.robot import SimulatedRobot
from real_robot.safety.safety import State, Verdict
from real_robot.sim_to_real import report
from real_robot.sim_to_real.comparison import ComparisonConfig
from sims.registry import TASKS

FEW = ("episodes=4", "num_envs=4", "threads=1")


@pytest.fixture(scope="module")
def hover(tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("hover") / "run"
    small = [
        "env_steps=20000",
        "num_envs=16",
        "control=false",
        "video=false",
        "evaluation_starts=4",
        "evaluation_envs=4",
    ]
    train.run(["task=quadrotor_hover", *small, f"output={run}"])
    return run


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"sim_to_real": ["simulator", "dream"]},
            "unknown back end 'dream' in sim_to_real; expected some of simulator",
        ),
        ({"sim_to_real": ["simulator"], "sim": ["mujoco", "stock"]}, "compares in one simulator"),
        ({"sim_to_real": ["simulator"], "sim": ["mujoco"]}, ""),
        ({"sim": ["mujoco", "stock"]}, ""),
        ({"sim": ["mujoco", "stock"], "baselines": True}, "back ends run a policy alone"),
        ({"sim": ["mujoco"], "baselines": True}, ""),
        ({"sim_to_real": ["bag"]}, "bag=FILE.mcap"),
        ({"sim_to_real": ["bag"], "bag": "a.mcap"}, ""),
        ({"sim_to_real": ["robot"], "bag": "a.mcap"}, "robot=FILE"),
        ({"sim_to_real": ["robot"], "robot": "a.yaml"}, ""),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict, message: str):
    config = ComparisonConfig(**options)
    if not message:
        config.check()
        return
    with pytest.raises(UserError, match=message):
        config.check()


def test_first_start_and_name_of_a_comparison():
    assert [ComparisonConfig(episodes=5, seed=3, first_start=start).first for start in (None, 0, 7)] == [15, 0, 7]
    assert ComparisonConfig(seed=3).first == 0
    names = [ComparisonConfig(sim_to_real=back_ends).compared for back_ends in (["simulator"], [])]
    assert names == [report.SIM_TO_REAL, report.SIM_TO_SIM]


@pytest.fixture
def bag(hover: Path, tmp_path: Path) -> Path:
    """Half a second of the policy in its simulator, recorded."""
    saved = checkpoint.load(hover)
    policy, task = trained_policy(saved), TASKS["quadrotor_hover_schema"]()
    robot = SimulatedRobot(task.environment(1, "disturbed", "eval"), lambda _: np.zeros(4))
    with Recorder(tmp_path / "bag.mcap", robot.contract, clock=robot.clock) as recorder:
        watched = recorder.watch(policy)
        robot.reset(starts=torch.tensor([0]))
        recorder.begin_episode("hover")
        for _ in range(50):
            reading = robot.read()
            assert reading is not None
            batch = {key: torch.from_numpy(value).unsqueeze(0) for key, value in reading.observation.items()}
            action = watched.act(TensorDict(batch, batch_size=[1]), deterministic=True).actions[0, 0].numpy()
            recorder.write(robot.clock(), reading, action, Verdict(State.ACTIVE, action, "", False))
            robot.write(action)
    return tmp_path / "bag.mcap"


def test_back_ends_run_the_same_initial_states(hover: Path, bag: Path):
    still = 'randomised.quadrotor_hover=["task.randomisation=0.0"]'
    evaluate.run([f"checkpoint={hover}", *FEW, "sim_to_real=[simulator,randomised,bag]", f"bag={bag}", still])
    report = json.loads((hover / "sim_to_real.json").read_text())
    simulator, randomised, replayed = report["back_ends"]
    # Randomised by nothing it is the simulator: every episode, every action.
    assert randomised["summary"] == simulator["summary"]
    assert randomised["action_discrepancy"]["max"] == 0.0
    assert randomised["gap"]["success"]["difference"] == 0.0
    assert replayed["action_discrepancy"] == {"mean": 0.0, "p50": 0.0, "p99": 0.0, "max": 0.0, "count": 1}
    assert (hover / "sim_to_real.png").exists()
    assert "| bag |" in (hover / "sim_to_real.md").read_text()


def test_random_dynamics_make_a_gap(hover: Path):
    evaluate.run([f"checkpoint={hover}", *FEW, "sim_to_real=[simulator,randomised]"])
    randomised = json.loads((hover / "sim_to_real.json").read_text())["back_ends"][1]
    assert randomised["action_discrepancy"]["mean"] > 1e-3


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            ["sim_to_real=[simulator,moon]"],
            "unknown back end 'moon'.*expected some of simulator",
        ),
        (["sim_to_real=[bag]"], "bag=FILE.mcap"),
        (["sim_to_real=[robot]"], "needs its ROS 2 parameters"),
        (["sim_to_real=[bag]", "bag=/nowhere.mcap"], "cannot read /nowhere.mcap"),
        (
            ["sim_to_real=[randomised]", "randomised.quadrotor_hover=[]"],
            "no options to randomise quadrotor_hover",
        ),
    ],
)
def test_what_is_missing_is_reported(hover: Path, options: list[str], expected: str):
    (hover / "sim_to_real.json").unlink(missing_ok=True)
    with pytest.raises(ValueError, match=expected):
        evaluate.run([f"checkpoint={hover}", *FEW, *options])
    assert not (hover / "sim_to_real.json").exists()
