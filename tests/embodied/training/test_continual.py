"""Tasks in turn by offline=oer: runs that begin with what the run before has kept."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import embodied.training.experiment
from embodied.algorithms.critics import CriticConfig
from embodied.algorithms.offline.iql import IQLConfig
from embodied.algorithms.offline.oer import OERConfig, Selection
from embodied.algorithms.offline.rounds import RoundsConfig
from embodied.contract import TensorSpec
from embodied.data.episodes import read
from embodied.errors import UserError
from embodied.saving import checkpoint
from embodied.training.experiment import Experiment, ExperimentConfig
from embodied.training.kept_episodes import KEPT, read_kept
from embodied.training.stages import offline
from policies.mlp import MLPConfig
from tests.embodied.reach import Reach
from tests.embodied.training.test_stages import Killed, RecordedTask

CONFIG = ExperimentConfig(num_envs=8, evaluation_starts=4, evaluation_envs=4, video=False, stages=["offline"])
OER = OERConfig(steps=20, batch=16, critics=CriticConfig(hidden=[8]), selection=Selection.RANDOM, kept_share=0.1)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frequent checkpoints, and no drawing of curves."""
    monkeypatch.setattr(offline, "SEGMENT", 4)
    monkeypatch.setattr(embodied.training.experiment, "CURVES", {})


def make(directory: Path, before: Path | None = None, kind: type[Experiment] = Experiment, **options) -> Experiment:
    config = replace(CONFIG, start_from=str(before) if before else None, **options)
    return kind(config, RecordedTask(), MLPConfig(hidden=[8]), None, directory, record={"values": {}}, offline=OER)


def test_a_killed_second_task_ends_as_an_uninterrupted_one_without_the_first_run(tmp_path: Path) -> None:
    class Dies(Experiment):
        def _keep(self, parts, due):
            if not died and parts["learner"].gradient_steps == 18:
                died.append(True)
                raise Killed
            super()._keep(parts, due)

    died = []
    make(tmp_path / "first").run()
    make(tmp_path / "whole", tmp_path / "first").run()
    with pytest.raises(Killed):
        make(tmp_path / "parts", tmp_path / "first", Dies).run()
    shutil.move(tmp_path / "first", tmp_path / "elsewhere")
    make(tmp_path / "parts", tmp_path / "first").run()
    weights = [checkpoint.load_weights(tmp_path / name, Reach(1).contract).policy for name in ("whole", "parts")]
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())
    first, whole, parts = (read(tmp_path / name / KEPT)[0] for name in ("elsewhere", "whole", "parts"))
    assert len(first) == round(0.1 * len(RecordedTask().demonstrations(tmp_path, 0)))
    assert whole.dataset_index.bincount().tolist() == [len(first)] * 2
    assert torch.equal(whole.actions[: len(first.actions)], first.actions)
    assert torch.equal(whole.actions, parts.actions)
    # a checkpoint of a run leads to what the run kept
    last = sorted((tmp_path / "whole" / checkpoint.FOLDER).glob("0*"))[-1]
    assert len(read_kept(last, Reach(1).contract)) == len(whole)


def test_what_does_not_fit_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    plain = replace(CONFIG)
    learner = IQLConfig(steps=2, batch=16, critics=CriticConfig(hidden=[8]))
    Experiment(
        plain, RecordedTask(), MLPConfig(hidden=[8]), None, tmp_path / "iql", record={"values": {}}, offline=learner
    ).run()
    with pytest.raises(UserError, match=rf"has no {KEPT}/.*learn the first task without start_from"):
        make(tmp_path / "second", tmp_path / "iql")
    with pytest.raises(UserError, match=r"rounds\.count=1 rounds\.gate=none"):
        make(tmp_path / "rounds", rounds=RoundsConfig(count=2))
    make(tmp_path / "first").run()
    with pytest.raises(UserError, match=r"takes stages=\[offline\]"):
        make(tmp_path / "second", tmp_path / "first", stages=["sft", "offline"])
    assert not (tmp_path / "second").exists()
    contract = Reach(1).contract
    other = replace(contract, action=TensorSpec((1,), low=(-1.0,), high=(1.0,)))
    with pytest.raises(UserError, match="of other observations or actions"):
        read_kept(tmp_path / "first", other)
