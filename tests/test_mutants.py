"""The faults of `make mutants` match this tree."""

import ast
import json
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.mutants import ROOT, Fault, chosen, faults, merge


def test_every_fault_can_be_put_in() -> None:
    for fault in faults():
        assert fault.find != fault.put, fault
        ast.parse(fault.apply((ROOT / fault.file).read_text()))
        assert all((ROOT / path).is_file() for path in fault.tests.split() if path.endswith(".py")), fault


def test_faults_are_many_and_spread() -> None:
    listed = faults()
    assert len(listed) >= 120
    assert min(Counter(fault.package for fault in listed).values()) >= 12


@pytest.mark.parametrize("text", ["nothing of the kind", "x = 1\nx = 1"])
def test_a_fault_that_is_not_there_once_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"a\.py: what: expected 'x = 1' once"):
        Fault("core", "a.py", "what", "x = 1", "x = 2", "").apply(text)


def test_packages_are_asked_for_by_name_and_faults_by_part_of_it() -> None:
    listed = [
        Fault(package, f"{package}/score.py", "wrong", "a", "b", "") for package in ("core", "learners", "vehicle")
    ]
    assert list(chosen(listed, ["core"])) == ["core"]
    assert list(chosen(listed, ["core", "vehicle/sc"])) == ["core", "vehicle"]
    assert list(chosen(listed, [])) == ["core", "learners", "vehicle"]


def test_the_table_keeps_the_packages_that_were_not_measured_again(tmp_path: Path) -> None:
    table = tmp_path / "mutants.json"
    merge(table, "vehicle", {"caught": 1, "git_commit": "old"})
    merge(table, "core", {"caught": 2, "git_commit": "old"})
    merge(table, "vehicle", {"caught": 3, "git_commit": "new"})
    rows = {"core": {"caught": 2, "git_commit": "old"}, "vehicle": {"caught": 3, "git_commit": "new"}}
    assert json.loads(table.read_text()) == {"packages": rows}
