"""Runs in two processes: a killed one, resumption on as many and on another number, and divided checkpoints."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from embodied.errors import UserError
from embodied.saving import checkpoint
from tests.placement.processes import run_processes
from tests.placement.run import main

ROOT = Path(__file__).parents[2]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Of the newest checkpoint."""
    return {name: value.double() for name, value in checkpoint.load(folder).policy.items()}


def metrics(folder: Path) -> list[dict[str, float]]:
    """All rows, without times."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith("time")} for row in rows]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in two processes that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    process = run_processes(2, main, folder, 480, "mlp")
    assert process.returncode == 0, process.stderr
    return folder


def test_a_killed_process_is_named_on_one_line_and_the_run_goes_on_with_the_same_numbers(
    tmp_path: Path, whole: Path
) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    dying = [*command, "-m", "tests.placement.run", str(tmp_path), "480", "mlp", "die"]
    died = subprocess.run(dying, cwd=ROOT, capture_output=True, text=True)
    assert died.returncode != 0
    lines = [line for line in died.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, died.stderr
    assert lines[0].startswith("error: process 1 of 2 has died; all end; go on from the last checkpoint with resume=")
    again = run_processes(2, main, tmp_path, 480, "mlp")
    assert again.returncode == 0, again.stderr
    found, expected = weights(tmp_path), weights(whole)
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=0.0, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )
    assert [row["step"] for row in metrics(tmp_path)] == [row["step"] for row in metrics(whole)]


def test_a_run_goes_on_in_one_process_and_in_two_again(tmp_path: Path, whole: Path) -> None:
    folder = tmp_path / "run"
    subprocess.run(["cp", "-r", str(whole), str(folder)], check=True)
    steps = []
    for count, more in ((1, 640), (2, 800)):
        before = checkpoint.load(folder).counters["rl_gradient_steps"]
        process = run_processes(count, main, folder, more, "mlp")
        assert process.returncode == 0, process.stderr
        saved = checkpoint.load(folder)
        assert saved.counters["processes"] == count
        steps.append(saved.counters["rl_gradient_steps"] - before)
        assert saved.counters["env_steps"] >= more
    assert min(steps) > 0
    notes = "\n".join(json.loads((folder / "report.json").read_text())["notes"])
    assert "went on in 1 process after 2: running episodes began again" in notes
    assert "went on in 2 processes after 1" in notes


def test_a_divided_model_goes_on_in_one_process_and_its_checkpoint_is_whole_for_other_programs(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = run_processes(2, main, folder, 160, "pi0")
    assert process.returncode == 0, process.stderr
    shutil.copytree(folder, tmp_path / "kept")
    saved = checkpoint.load(tmp_path / "kept")
    assert saved.path is not None
    shards = sorted((saved.path / "shards").glob("*.safetensors"))
    assert len(shards) == 2
    assert all(type(value) is torch.Tensor for value in saved.policy.values())
    assert saved.state["before"]["policy"].keys() == saved.policy.keys()
    alone = run_processes(1, main, folder, 240, "pi0")
    assert alone.returncode == 0, alone.stderr
    assert not (checkpoint.load(folder).path / "shards").exists()
    assert checkpoint.load(folder).counters["env_steps"] >= 240
    shards[1].unlink()
    with pytest.raises(UserError, match=rf"cannot be read \(shards/{shards[1].name}, one of 2 shards, is missing\)"):
        checkpoint.load(saved.path)
