"""reflex.py learns a reflex that evaluate.py and train.py use; mistakes are refused before anything is collected."""

import json
from pathlib import Path

import pytest
import torch

import evaluate
import reflex
import train
from embodied.algorithms.off_policy import risk
from embodied.data.episodes import UNKNOWN, EpisodeWriter
from embodied.data.recording import record_episodes
from embodied.environments.reflex import in_steps
from embodied.errors import UserError
from embodied.saving.sealed import read
from embodied.training.reflex import THRESHOLDS, _Actions
from sims.vehicle.task import NavigateTask
from tests.programs import run_program

TASK = ["task=vehicle_navigate", "task.guard=false", "task.executed=5", "task.step_limit=40", "policy.hidden=[16]"]
SMALL = ["env_steps=1500", "num_envs=16", "evaluation_starts=2", "evaluation_envs=2", "threads=1", "control=false"]
LEARN = ["episodes=24", "num_envs=12", "risk.steps=20", "risk.hidden=[8]", "varied=1.0"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose policy drives like a novice, and a reflex."""
    directory = tmp_path_factory.mktemp("runs") / "drive"
    train.run([*TASK, *SMALL, "algorithm.rollout_length=4", "video=false", f"output={directory}"])
    reflex.run([f"checkpoint={directory}", *LEARN, "threshold=0.0"])
    return directory


def test_an_evaluation_with_a_reflex_reports_what_it_did(run: Path):
    small = ["episodes=3", "num_envs=3", "threads=1", "distributions=[rooms]"]
    evaluate.run([f"checkpoint={run}", *small, f"reflex={run / 'reflex'}"])
    text = (run / "evaluation.json").read_text()
    assert json.loads(text)["reflex"] == str(run / "reflex")
    assert "reflex_steps" in text


def test_the_critic_reads_near_distances_as_the_policy_does(run: Path):
    record = read(run / "reflex" / risk.RECORD, risk.FORMAT)
    assert record["risk"]["reciprocal"] == ["lidar", "remembered"]
    assert record["brake"] == [0.0, 0.0]
    assert risk.load(run / "reflex").contract.executed == 1


def test_an_existing_reflex_and_missing_episodes_are_refused(run: Path, tmp_path: Path):
    with pytest.raises(UserError, match="exists"):
        reflex.run([f"checkpoint={run}", *LEARN])
    with pytest.raises(UserError, match="demonstrations"):
        reflex.run([f"checkpoint={run}", "episodes=0", f"output={tmp_path / 'reflex'}"])
    with pytest.raises(UserError, match="brake"):
        reflex.run([f"checkpoint={run}", "brake=[3.0,0.0]", f"output={tmp_path / 'reflex'}"])
    assert not (tmp_path / "reflex").exists()
    completed = run_program("evaluate.py", f"checkpoint={run}", f"reflex={tmp_path / 'nothing'}", "episodes=1")
    assert completed.returncode == 1
    assert "cannot read a reflex" in completed.stderr + completed.stdout


class Random:
    """A driver that commands at random."""

    def act(self, observation, *, generator):
        forward = torch.rand(len(observation), 1, 1, generator=generator)
        return _Actions(torch.cat((forward, torch.zeros_like(forward)), -1))


def test_it_learns_from_recorded_episodes_alone(run: Path, tmp_path: Path):
    env = in_steps(NavigateTask(guard=False, executed=5, step_limit=60)).environment(12, "rooms", "train")
    episodes = record_episodes(env, Random(), torch.Generator().manual_seed(0))
    episodes.success[0] = UNKNOWN
    with EpisodeWriter(tmp_path / "logs", env.contract) as writer:
        writer.add(episodes)
    logs = [f"checkpoint={run}", "episodes=0", f"demonstrations={tmp_path / 'logs'}", *LEARN[2:4], "threshold=0.4"]
    before = sorted(run.iterdir())
    reflex.run([*logs, f"output={tmp_path / 'learned'}"])
    assert risk.load(tmp_path / "learned").threshold == 0.4
    assert sorted(run.iterdir()) == before
    with pytest.raises(UserError, match="'hold'"):
        reflex.run([*logs, f"output={tmp_path / 'other'}", "risk.signals=[hold]"])


def test_the_threshold_is_chosen_on_other_episodes_or_nothing_is_written(run: Path, tmp_path: Path):
    output = tmp_path / "chosen"
    learn = [f"checkpoint={run}", *LEARN, "validation_starts=8", f"output={output}"]
    written = True
    try:
        reflex.run(learn)
    except UserError:  # no threshold helps this policy
        written = False
    assert output.exists() == written
    if written:
        validation = read(output / risk.RECORD, risk.FORMAT)["validation"]
        assert [each["threshold"] for each in validation] == [None, *THRESHOLDS]
        assert risk.load(output).threshold in THRESHOLDS


def test_a_policy_trains_with_a_reflex(run: Path, tmp_path: Path):
    options = [*TASK, *SMALL, "algorithm.rollout_length=4", "video=false", f"output={tmp_path / 'with'}"]
    train.run([*options, f"reflex={run / 'reflex'}"])
    rows = [json.loads(line) for line in (tmp_path / "with" / "metrics.jsonl").read_text().splitlines()]
    assert any("reflex_steps" in name for row in rows for name in row)
