"""Whatever is wrong with a JSON file from outside is one line."""

import json
from pathlib import Path

import pytest

from embodied.errors import UserError
from embodied.report import finished_run
from embodied.saving import sealed
from embodied.saving.json_text import DEPTH, dumps_rows, loads


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


def test_an_evaluation_takes_one_line_and_nothing_is_lost():
    evaluation = {"task": "hover", "seeds": [0, 1], "success": {"mean": 0.5, "low": None}}
    result = {
        "commit": "abc",
        "rows": [evaluation, evaluation],
        "stages": {"rl": {"nominal": evaluation}},
        "none": [],
    }
    text = dumps_rows(result)
    assert json.loads(text) == result
    row = json.dumps(evaluation)
    assert text.splitlines() == [
        *("{", ' "commit": "abc",', ' "rows": [', f"  {row},", f"  {row}", " ],"),
        *(' "stages": {', '  "rl": {', f'   "nominal": {row}', "  }", " },", ' "none": []', "}"),
    ]
    assert dumps_rows([1, [2]]) == "[1, [2]]\n"
