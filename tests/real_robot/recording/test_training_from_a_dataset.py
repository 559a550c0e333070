"""train.py demonstrations=DATASET: a robot's recordings train a policy for a task with their contract."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from embodied.command_line.config import compose
from real_robot.recording import lerobot_dataset
from real_robot.recording.recorder import Recorder
from real_robot.recording.recording import Recording
from real_robot.robots.robot import SimulatedRobot
from real_robot.safety.safety import State, Verdict
from train import GROUPS, TrainConfig

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quadrotor hovers for three episodes with constant thrust."""
    folder = tmp_path_factory.mktemp("flown")
    config, _ = compose(TrainConfig, "train", ["task=quadrotor_hover"], GROUPS)
    environment = config.task.environment(1, config.task.distributions[0], "train", 0)
    hover = np.full(4, environment.airframe.hover_action, np.float32)
    robot = SimulatedRobot(environment, lambda _: hover)
    with Recorder(folder / "a.mcap", robot.contract, clock=robot.clock) as recorder:
        for _ in range(3):
            reading = robot.reset()
            recorder.begin_episode("hover")
            for _ in range(20):
                now_s = robot.clock()
                robot.write(hover)
                recorder.write(now_s, reading, hover, Verdict(State.ACTIVE, hover))
                reading = robot.read()
    lerobot_dataset.write([Recording(folder / "a.mcap")], folder / "data")
    return folder / "data"


def train(*options: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "train.py", *options, "threads=1", "video=false"], cwd=ROOT, capture_output=True, text=True,
        check=False, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def test_a_recorded_flight_trains_before_rl(dataset: Path, tmp_path: Path):
    small = ["num_envs=8", "env_steps=300", "evaluation_starts=4", "evaluation_envs=4", "task.step_limit=30"]
    completed = train(
        "task=quadrotor_hover", *small, "sft.steps=60", "sft.batch=32", f"demonstrations={dataset}",
        f"output={tmp_path / 'run'}",
    )  # fmt: skip
    assert completed.returncode == 0, completed.stdout + completed.stderr
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert {row["stage"] for row in report["evaluations"]} == {"sft", "rl", "sft_control"}
    logged = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["sft/loss"] for row in logged if "sft/loss" in row]
    assert losses
    assert losses[-1] < 0.1  # of half action ranges squared: the constant thrust is soon imitated


def test_a_dataset_for_another_task_is_reported_on_one_line(dataset: Path, tmp_path: Path):
    completed = train("task=quadrotor_race", f"demonstrations={dataset}", f"output={tmp_path / 'run'}")
    lines = completed.stderr.strip().splitlines()
    assert completed.returncode == 1
    assert len(lines) == 1
    assert "does not serve the contract" in lines[0]
    assert "missing" in lines[0]
