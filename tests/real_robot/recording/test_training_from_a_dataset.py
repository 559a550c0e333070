"""train.py demonstrations=DATASET: a robot's recordings train a policy for a task with their contract."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from embodied.algorithms.imitation.sft import SFTConfig
from embodied.command_line.config import compose
from embodied.contract import Contract
from embodied.data.demonstrations import folder_of
from embodied.data.episodes import read
from embodied.errors import UserError
from embodied.saving.tree import copy_tree
from policies.mlp import MLPConfig
from real_robot.recording import lerobot_dataset
from real_robot.recording.demonstrations import demonstrations, sources
from real_robot.recording.recorder import Recorder
from real_robot.recording.recording import Recording
from real_robot.robots.robot import SimulatedRobot
from real_robot.safety.safety import State, Verdict
from tests.programs import Completed, run_program
from train import GROUPS, TrainConfig


@pytest.fixture(scope="module")
def flown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with "a.mcap" and "b.mcap": a quadrotor flies three episodes with constant thrust, and two with less."""
    folder = tmp_path_factory.mktemp("flown")
    fly(folder / "a.mcap", 3, 1.0)
    fly(folder / "b.mcap", 2, 0.8)
    return folder


@pytest.fixture(scope="module")
def dataset(flown: Path) -> Path:
    """The three."""
    lerobot_dataset.write([Recording(flown / "a.mcap")], flown / "data")
    return flown / "data"


def fly(path: Path, episodes: int, thrust: float) -> None:
    config, _ = compose(TrainConfig, "train", ["task=quadrotor_hover"], GROUPS)
    environment = config.task.environment(1, config.task.distributions[0], "train", 0)
    hover = np.full(4, thrust * environment.airframe.hover_action, np.float32)
    robot = SimulatedRobot(environment, lambda _: hover)
    with Recorder(path, robot.contract, clock=robot.clock) as recorder:
        for _ in range(episodes):
            reading = robot.reset()
            recorder.begin_episode("hover")
            for _ in range(20):
                now_s = robot.clock()
                robot.write(hover)
                recorder.write(now_s, reading, hover, Verdict(State.ACTIVE, hover))
                reading = robot.read()


def train(*options: str) -> Completed:
    return run_program("train.py", *options, "threads=1", "video=false")


def test_a_recorded_flight_trains_before_rl(dataset: Path, tmp_path: Path):
    small = ["num_envs=8", "env_steps=300", "evaluation_starts=4", "evaluation_envs=4", "task.step_limit=30"]
    completed = train(
        "task=quadrotor_hover",
        *small,
        "sft.steps=60",
        "sft.batch=32",
        f"demonstrations={dataset}",
        f"output={tmp_path / 'run'}",
    )
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


SMALL = ["task=quadrotor_hover", "stages=[sft]", "sft.steps=60", "sft.batch=32", "evaluation_starts=2"]
SMALL += ["evaluation_envs=2", "num_envs=2", "task.step_limit=12", "policy.hidden=[16]"]


def test_several_are_mixed_by_weight_and_a_run_gives_its_own_on(flown: Path, dataset: Path, tmp_path: Path):
    """A dataset, a recording and another run's folder go together, in shares that are asked for."""
    both = [*SMALL, f"demonstrations=[{dataset},{flown / 'b.mcap'}]", "demonstration_weights=[1,3]"]
    first = train(*both, f"output={tmp_path / 'first'}")
    assert first.returncode == 0, first.stderr
    episodes, *_ = read(folder_of(tmp_path / "first"))
    assert episodes.dataset_index.tolist() == [0, 0, 0, 1, 1]
    low, high = episodes.actions[-1, 0], episodes.actions[0, 0]
    mixed = demonstrations([dataset, flown / "b.mcap"], contract(), tmp_path / "first", weights=[1, 3])
    drawn = mixed.sample(4000, 1, torch.Generator().manual_seed(0))["actions"][:, 0, 0]
    assert float((drawn == low).float().mean()) == pytest.approx(0.75, abs=0.03)
    assert low < high
    resumed = train(f"resume={tmp_path / 'first'}", "demonstration_weights=[1,1]")
    assert "the saved run has demonstration_weights=[1.0, 3.0], got [1.0, 1.0]" in resumed.stderr
    own = demonstrations(tmp_path / "first", contract(), tmp_path / "own")  # what a run imitated, given to another
    assert own.weights is None
    for name in ("actions", "first", "ends", "human", "task_index"):
        assert torch.equal(getattr(own, name), getattr(episodes, name))
    assert (own.observation == episodes.observation).all()


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, second[name]) for name, value in first.items())


def contract() -> Contract:
    config, _ = compose(TrainConfig, "train", ["task=quadrotor_hover"], GROUPS)
    whole = config.task.contract(config.task.distributions[0])
    return replace(whole, observation={key: spec for key, spec in whole.observation.items() if not spec.privileged})


def test_a_run_that_stops_goes_on_with_the_same_mixture(flown: Path, dataset: Path, tmp_path: Path):
    mixed = demonstrations([dataset, flown / "b.mcap"], contract(), tmp_path, weights=[1, 3])
    policy = MLPConfig(hidden=[8]).build(contract())
    policy.fit(*mixed.by_weight())
    learner = SFTConfig(steps=20, batch=8).build(policy, torch.Generator().manual_seed(0))
    learner.fit(mixed, 10)
    state = copy_tree(learner.state_dict())
    learner.fit(mixed, 10)
    resumed = SFTConfig(steps=20, batch=8).build(MLPConfig(hidden=[8]).build(contract()), torch.Generator())
    resumed.load_state_dict(state)
    resumed.fit(demonstrations([dataset, flown / "b.mcap"], contract(), tmp_path, weights=[1, 3]), 10)
    assert same(learner.state_dict()["policy"], resumed.state_dict()["policy"])


@pytest.mark.parametrize(
    ("given", "weights", "expected"),
    [
        ([], None, r"expected demonstrations=DIR or 'demonstrations=\[DIR1,DIR2\]', got \[\]"),
        ([1, "a"], None, r"expected demonstrations=DIR .*got \[1, 'a'\]"),
        (["a", "a"], None, "names a folder twice; use demonstration_weights"),
        (["a", "b"], [0.5], r"of 2 numbers above 0, one for each of demonstrations=\['a', 'b'\]; got \[0.5\]"),
        (["a", "b"], [0.5, 0.0], "of 2 numbers above 0"),
        (["a", "b"], [0.5, -1.0], "of 2 numbers above 0"),
        (["a", "b"], [0.5, float("nan")], "of 2 numbers above 0"),
        (None, [0.5], "of 0 numbers above 0, one for each of demonstrations=None"),
    ],
)
def test_impossible_mixtures_are_refused(given: object, weights: list[float] | None, expected: str):
    with pytest.raises(UserError, match=expected):
        sources(given, weights)


def test_datasets_that_do_not_go_together_are_named_with_what_differs(dataset: Path, tmp_path: Path):
    other = tmp_path / "other"
    shutil.copytree(dataset, other)
    (other / "meta/contract.json").unlink()
    info = json.loads((other / "meta/info.json").read_text())
    info["features"]["action"]["names"] = ["a", "b", "c", "d"]
    (other / "meta/info.json").write_text(json.dumps(info))
    with pytest.raises(UserError) as raised:
        demonstrations([dataset, other], contract(), tmp_path / "run")
    line = str(raised.value)
    assert f"{dataset} and {other} cannot be mixed: {other} does not serve the contract (action: expected" in line
    assert "got a, b, c, d" in line
