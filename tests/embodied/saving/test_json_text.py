"""Whatever is wrong with a JSON file from outside is one line."""

import json
from pathlib import Path

import pytest

from embodied.errors import UserError
from embodied.evaluation import finished_run
from embodied.saving import sealed
from embodied.saving.json_text import DEPTH, loads


@pytest.mark.parametrize("depth", [DEPTH + 1, 900, 100_000])
@pytest.mark.parametrize("pair", ["[]", ('{"a":', "}")])
def test_deep_json_is_refused(depth: int, pair, tmp_path: Path):
    text = pair[0] * depth + ("" if pair == "[]" else "1") + pair[1] * depth
    with pytest.raises(ValueError, match="deep"):
        loads(text)
    (tmp_path / "checkpoint.json").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=r"checkpoint\.json is damaged: nested more than"):
        sealed.read(tmp_path / "checkpoint.json", 2)
    (tmp_path / "report.json").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match="is no report"):
        finished_run.read(tmp_path / "report.json")


def test_other_json_is_read():
    value = {"a": [[[1, 2.5, None, "x"]], {"b": True}], "c": []}
    assert loads(json.dumps(value)) == value
    assert loads("[" * DEPTH + "]" * DEPTH)
