"""Commit that records and results name."""

import subprocess
from pathlib import Path

import pytest

from embodied.saving import versions


def git(clone: Path, *arguments: str) -> str:
    names = ["-c", "user.name=test", "-c", "user.email=test@example.com", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", *names, *arguments], cwd=clone, check=True, capture_output=True, text=True).stdout


def test_a_commit_is_dirty_by_code_and_not_by_results_that_were_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, result = tmp_path / "embodied" / "saving" / "versions.py", tmp_path / "benchmarks" / "results" / "speed.json"
    monkeypatch.setattr(versions, "__file__", str(code))
    assert versions.git_commit() == "unknown"  # a wheel
    for path in (code, result, tmp_path / "pyproject.toml"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("1")
    git(tmp_path, "init", "-q")
    assert versions.git_commit() == "unknown"  # without a commit
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "first")
    commit = git(tmp_path, "rev-parse", "HEAD").strip()
    assert versions.git_commit() == commit
    result.write_text("2")
    assert versions.git_commit() == commit
    code.write_text("2")
    assert versions.git_commit() == f"{commit}-dirty"
