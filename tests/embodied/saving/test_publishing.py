"""A trained policy for others: what the folder holds, that programs read it, and what is refused."""

import json
from pathlib import Path

import pytest
import torch

import evaluate
import export
import train
from embodied.command_line import program
from embodied.errors import UserError
from embodied.saving import checkpoint
from embodied.saving.publishing import push

RUN = [
    "task=quadrotor_hover",
    "num_envs=16",
    "env_steps=2000",
    "evaluation_starts=4",
    "evaluation_envs=4",
    "task.step_limit=30",
    "video=false",
    "threads=1",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("published") / "run"
    assert program.main(train.run, train.describe, [*RUN, f"output={directory}"]) == 0
    return directory


@pytest.fixture(scope="module")
def published(run: Path) -> Path:
    export.run([f"checkpoint={run}", "target=hub"])
    return run / "export" / "hub"


def test_the_folder_has_the_policy_and_a_card_but_nothing_that_only_training_needs(run: Path, published: Path):
    ours, theirs = checkpoint.load(run), checkpoint.load(published)
    assert ours.state
    assert not theirs.state
    assert ours.policy.keys() == theirs.policy.keys()
    assert all(torch.equal(theirs.policy[name], weight) for name, weight in ours.policy.items())
    assert theirs.contract == ours.contract
    assert sum(path.stat().st_size for path in (published / "checkpoint").rglob("*")) < sum(
        path.stat().st_size for path in checkpoint.newest(run).iterdir()
    )
    text = (published / "README.md").read_text()
    assert text.startswith("---\nlibrary_name: embodied-rl\npipeline_tag: robotics\n")
    assert "| velocity | float32 [3] |" in text
    assert text.endswith((run / "report.md").read_text())
    named = [line.split("](")[1].split(")")[0] for line in text.splitlines() if line.startswith("![")]
    assert all((published / name).exists() for name in named)


def test_programs_read_the_folder_and_training_starts_from_it(published: Path, tmp_path: Path):
    moved = published.rename(tmp_path / "downloaded")
    try:
        evaluate.run([f"checkpoint={moved}", "episodes=4"])
        assert json.loads((moved / "evaluation.json").read_text())
        again = [*RUN, f"start_from={moved}", f"output={tmp_path / 'again'}"]
        assert program.main(train.run, train.describe, again) == 0
    finally:
        moved.rename(published)


def test_a_folder_without_optimisers_is_not_resumed(published: Path, capsys: pytest.CaptureFixture[str]):
    assert program.main(train.run, train.describe, [f"resume={published}", "env_steps=4000"]) == 1
    *_, line = capsys.readouterr().err.strip().splitlines()
    assert "start_from=" in line


def test_what_is_refused_leaves_nothing(run: Path, published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for arguments, message in (
        ([f"output={published}"], "hub exists; choose another output"),
        ([f"output={tmp_path / 'new'}", "opset=17"], "target=hub takes neither weights= nor opset="),
    ):
        before = {path: path.stat().st_mtime_ns for path in published.rglob("*")}
        with pytest.raises(UserError, match=message):
            export.run([f"checkpoint={run}", "target=hub", *arguments])
        assert {path: path.stat().st_mtime_ns for path in published.rglob("*")} == before
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match="is for policy=pi0, got MLPPolicy; use target=hub"):
        export.run([f"checkpoint={run}", "target=transformers", f"output={tmp_path / 'new'}"])
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # where nobody listens
    with pytest.raises(UserError, match="written, but not uploaded to hub=me/robot"):
        push(published, "me/robot")
