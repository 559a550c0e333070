"""Runs that start from the weights of another one, and selected stages."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import embodied.training.experiment
from embodied.contract import Contract
from embodied.data.episodes import Episodes
from embodied.errors import UserError
from embodied.saving import checkpoint
from embodied.training.experiment import Experiment, ExperimentConfig
from policies.mlp import MLPConfig
from tests.embodied.reach import Reach
from tests.embodied.training.test_experiment import LEARNERS, POLICY, PPO, SFT_CONFIG, ReachTask, ScratchTask, trainer
from tests.embodied.training.test_loop import Killed, dies


@pytest.fixture(autouse=True)
def no_curves(monkeypatch):
    """Drawing curves takes most of the time of such a small run."""
    monkeypatch.setattr(embodied.training.experiment, "CURVES", {})


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A finished run."""
    directory = tmp_path_factory.mktemp("source")
    trainer(directory, "ppo", iterations=3).run()
    return directory


def run_from(
    start: Path | str | None,
    directory: Path,
    stages: list[str] | None = None,
    *,
    kind: type[Experiment] = Experiment,
    task: ReachTask | None = None,
    policy: MLPConfig = POLICY,
) -> Experiment:
    config = ExperimentConfig(
        num_envs=8,
        env_steps=300,
        checkpoint_every=1,
        evaluation_starts=6,
        evaluation_envs=4,
        video=False,
        sft=SFT_CONFIG,
        start_from=None if start is None else str(start),
        stages=stages,
    )
    record = {"values": {"start_from": config.start_from, "env_steps": 300, "stages": stages}}
    return kind(config, task or ReachTask(), policy, PPO, directory, record=record)


def message(directory: Path) -> dict[str, dict]:
    report = json.loads((directory / "report.json").read_text())
    return {row["stage"]: row for row in report["evaluations"]}


def same(first: dict, second: dict) -> bool:
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


def newest(directory: Path) -> Path:
    return sorted((directory / "checkpoint").glob("[0-9]*"))[-1]


def test_a_run_begins_with_weights_and_statistics_of_another(source: Path, tmp_path: Path) -> None:
    weights = newest(source) / "policy.safetensors"
    for place in (source, newest(source), weights):
        assert same(dict(run_from(place, tmp_path / "unused").policy.state_dict()), checkpoint.load(source).policy)


@pytest.mark.parametrize("file", [False, True])
def test_rl_goes_on_from_there(source: Path, tmp_path: Path, file: bool) -> None:
    run = run_from(newest(source) / "policy.safetensors" if file else source, tmp_path, ["rl"])
    assert run.stages == ["start", "rl", "done"]
    mean = run.policy.mean.clone()
    run.run()
    found = message(tmp_path)
    assert list(found) == ["start", "rl"]
    assert found["start"]["success"] == message(source)["rl"]["success"]  # the same policy on the same episodes
    assert torch.equal(run.policy.mean, mean)  # RL takes no statistics of its own
    gains = json.loads((tmp_path / "report.json").read_text())["gains"]
    assert [gain["over"] for gain in gains] == ["start"]
    assert "RL over start on wide" in (tmp_path / "report.md").read_text()


def test_supervised_training_goes_on_from_there(source: Path, tmp_path: Path) -> None:
    run = run_from(source, tmp_path, ["sft"])
    assert run.stages == ["start", "sft", "done"]
    run.policy.mean.add_(0.5)  # other statistics than those of these demonstrations
    mean, weight = run.policy.mean.clone(), run.policy.actor[0].weight.clone()
    run.run()
    assert list(message(tmp_path)) == ["start", "sft"]
    assert torch.equal(run.policy.mean, mean)
    assert not torch.equal(run.policy.actor[0].weight, weight)
    assert json.loads((tmp_path / "report.json").read_text())["env_steps"] == 0


def test_all_stages_follow_what_a_run_starts_from(source: Path, tmp_path: Path) -> None:
    run_from(source, tmp_path).run()
    assert list(message(tmp_path)) == ["start", "sft", "sft_control", "rl"]


@pytest.mark.parametrize(("stages", "found"), [(["sft"], ["sft"]), (["rl"], ["rl"]), (["sft", "rl"], None)])
def test_the_stages_that_are_asked_for_are_run(tmp_path: Path, stages: list[str], found: list[str] | None) -> None:
    run = run_from(None, tmp_path, stages)
    run.run()
    assert run.policy.fitted
    assert list(message(tmp_path)) == (found or ["sft", "sft_control", "rl"])
    assert run_from(None, tmp_path, stages).stage == "done"  # once more there is nothing to do
    assert list(run_from(None, tmp_path, stages).run().results) == [(stage, "wide") for stage in found or ORDER]


ORDER = ("sft", "rl", "sft_control")


def test_stages_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"expected stages of sft, offline, rl in this order, .*got \['rl', 'sft'\]"):
        ExperimentConfig(stages=["rl", "sft"])
    with pytest.raises(UserError, match=r"task=reach has no demonstrations for stages=\[sft\]; use stages=\[rl\]"):
        run_from(None, tmp_path / "run", ["sft"], task=ScratchTask())
    assert not (tmp_path / "run").exists()


class Coarse(ReachTask):
    """In chunks of one action."""

    def contract(self, distribution: str) -> Contract:
        return Reach(1, executed=1, horizon=1).contract


class Other(ReachTask):
    """At another rate."""

    def contract(self, distribution: str) -> Contract:
        return replace(Reach(1).contract, control_dt_s=0.2)


def test_what_nothing_can_start_from_is_refused_in_one_line(source: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"no weights")
    weights = newest(source) / "policy.safetensors"
    for start, changes, expected in (
        (source, {"task": Coarse()}, r"trained with another contract \(horizon: expected 2, got 1; executed"),
        (source, {"task": Other()}, r"trained with another contract .*control_dt_s"),
        (source, {"policy": MLPConfig(hidden=[5])}, "are of another network"),
        (weights, {"policy": MLPConfig(hidden=[5])}, "are of another network"),
        (weights, {"task": Coarse()}, "are of another network"),
        (tmp_path, {}, "no checkpoint in"),
        (tmp_path / "nowhere.safetensors", {}, "cannot read the weights .*nowhere"),
        (broken, {}, "cannot read the weights .*broken"),
    ):
        with pytest.raises(UserError, match=expected) as error:
            run_from(start, tmp_path / "run", **changes)
        assert "\n" not in str(error.value)
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("stages", [None, ["rl"]])
def test_a_run_resumes_without_what_it_started_from(source: Path, tmp_path: Path, stages: list[str] | None) -> None:
    run_from(shutil.copytree(source, tmp_path / "source"), tmp_path / "whole", stages).run()
    with pytest.raises(Killed):
        run_from(tmp_path / "source", tmp_path / "parts", stages, kind=dies(2)).run()
    shutil.rmtree(tmp_path / "source")
    resumed = run_from(tmp_path / "source", tmp_path / "parts", stages)
    assert resumed.counters["iteration"] == 2
    resumed.run()
    assert message(tmp_path / "parts") == message(tmp_path / "whole")
    first, second = (checkpoint.load(tmp_path / name).policy for name in ("parts", "whole"))
    assert same(first, second)


class Unshown(ReachTask):
    """Nobody may ask for its demonstrations."""

    def demonstrations(self, directory: Path, seed: int) -> Episodes:
        raise AssertionError("these demonstrations take long")


def test_demonstrations_are_only_made_for_what_reads_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_from(None, tmp_path / "run", ["rl"], task=Unshown()).run()
    assert list(message(tmp_path / "run")) == ["rl"]
    config, given = ExperimentConfig(stages=["rl"], num_envs=4), Unshown().demonstrations
    for learner in (LEARNERS["self_imitation"], LEARNERS["ranking"]):
        with pytest.raises(AssertionError, match="take long"):
            Experiment(config, Unshown(), POLICY, learner, tmp_path / "other", record={"values": {}})
    Experiment(config, ReachTask(), POLICY, PPO, tmp_path / "last", record={"values": {}}, demonstrations=given)
    assert "demonstrations= is not read" in caplog.text
