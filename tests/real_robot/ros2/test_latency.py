"""The benchmark of round trips: all of its partners answer."""

import json
from pathlib import Path

from benchmarks.ros2_latency import BOTH, ECHO, POLICY, main


def test_all_partners_answer(hover: Path, tmp_path: Path) -> None:
    options = ["--checkpoint", str(hover), "--rate", "20", "--seconds", "1", "--slice", "1"]
    main([*options, "--output", str(tmp_path / "latency.json")])
    rows = json.loads((tmp_path / "latency.json").read_text())["rows"]
    assert [row["partner"] for row in rows] == [ECHO, POLICY, BOTH]
    for row in rows:
        assert row["periods"] == 20
        # a busy machine may answer late, but not never
        assert row["unanswered"] < 10
        assert 0.0 < row["p50_ms"] < 1000.0
