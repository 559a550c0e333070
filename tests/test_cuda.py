"""The CUDA check: what becomes of parts that fail and hang, and that each part runs on a CPU."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import cuda
from benchmarks.cuda_parts import PARTS, Part
from benchmarks.cuda_parts.record import Record, read

SHARES = {"failing": 30.0, "hanging": 10.0, "good": 30.0}


def parts(*names: str) -> dict[str, Part]:
    return {name: Part(f"tests.cuda_parts.{name}", SHARES[name], name) for name in names}


def ended(pid: int) -> bool:
    """Whether the process is gone, or dead and not yet collected by its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_parts_after_one_that_fails_and_one_that_hangs_go_on(tmp_path, monkeypatch, capsys):
    output, write, complete = tmp_path / "cuda.json", cuda._write, []

    def recording_write(path, report):
        write(path, report)
        complete.append({name: each["outcome"] for name, each in json.loads(path.read_text())["parts"].items()})

    monkeypatch.setattr(cuda, "_write", recording_write)
    report = cuda.check(parts("failing", "hanging", "good"), "cpu", 0.75, output, keep=False, commit="c0ffee")
    outcomes = {"failing": "failed", "hanging": "ended", "good": "passed"}
    assert complete == [dict(list(outcomes.items())[:count]) for count in (1, 2, 3)]
    assert json.loads(output.read_text()) == report
    failing, hanging, good = report["parts"].values()
    assert failing["failures"]["broken"].endswith("RuntimeError: a kernel is missing\n")
    assert not failing["agreement"]["mean"]["agrees"]
    assert failing["figures"] == {"after": 1}
    assert failing["output"].strip().endswith("segmentation fault")
    assert hanging["figures"]["before"] == 2
    assert "in hang" in hanging["output"]  # the stack shows where it was
    assert ended(hanging["figures"]["pid"])
    assert good["agreement"] == {"sum": {"error": 0.0, "tolerance": 0.0, "agrees": True}}
    assert "a_package_that_is_absent" in good["skipped"]["absent"]
    assert "output" not in good
    assert {each["git_commit"] for each in report["parts"].values()} == {"c0ffee"}
    text = cuda.summary(report)
    assert "a kernel is missing" in text
    assert "| good | steps_per_s | 3.5 |" in text
    assert "[3/3] good" in capsys.readouterr().out


def test_a_part_that_is_repeated_leaves_the_others(tmp_path):
    output = tmp_path / "cuda.json"
    cuda.check(parts("good"), "cpu", 1.0, output, keep=False)
    report = cuda.check({"again": parts("good")["good"]}, "cpu", 1.0, output, keep=True)
    assert list(report["parts"]) == ["good", "again"]
    other = json.loads(output.read_text()) | {"card": "another"}
    output.write_text(json.dumps(other))
    assert list(cuda.check(parts("good"), "cpu", 1.0, output, keep=True)["parts"]) == ["good"]


def test_agreement_is_relative_to_the_largest_value(tmp_path):
    record = Record(tmp_path / "record.jsonl")
    record.agree("large", torch.tensor([1000.0, 1.0]), torch.tensor([1001.0, 1.0]), 2e-3)
    record.agree("small", torch.tensor([1e-3]), torch.tensor([3e-3]), 1e-3)
    with (tmp_path / "record.jsonl").open("a") as file:
        file.write('{"kind": "figures", "na')  # cut off by a kill
    entries = read(tmp_path / "record.jsonl")
    assert entries["agreement"]["large"] == {"error": pytest.approx(1e-3), "tolerance": 2e-3, "agrees": True}
    assert not entries["agreement"]["small"]["agrees"]
    assert entries["figures"] == {}


@pytest.mark.evidence
@pytest.mark.parametrize("name", PARTS)
def test_parts_run_on_a_cpu(name: str, tmp_path):
    report = cuda.check({name: PARTS[name]}, "cpu", 5.0, tmp_path / "cuda.json", keep=False)
    result = report["parts"][name]
    assert result["outcome"] == "passed", cuda.summary(report) + result.get("output", "")
    assert result["figures"] or result["agreement"]


def test_bad_options_are_refused_on_one_line(capsys):
    for options, word in (["--minutes", "0"], "--minutes"), (["--only", "nothing"], "nothing"):
        with pytest.raises(SystemExit):
            cuda.main([*options, "--device", "cpu"])
        assert word in capsys.readouterr().err.splitlines()[-1]
