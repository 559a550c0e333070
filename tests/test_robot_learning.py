"""The table of learning beside a person: rows that depend on others."""

from pathlib import Path

import pytest

from benchmarks import robot_learning


def test_a_comparison_without_its_row_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(robot_learning, "trained", lambda run, *_: run)
    rows = ["--rows", robot_learning.BEFORE, "--seeds", "0", "--output", str(tmp_path / "rows.json")]
    with pytest.raises(SystemExit, match="needs the person's steps of 'hg_dagger, long help'"):
        robot_learning.main([str(tmp_path), *rows])
