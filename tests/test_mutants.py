"""The list of faults that `make mutants` puts into a copy of the tree belongs to this tree."""

import ast
from collections import Counter

import pytest

from benchmarks.mutants import ROOT, Fault, faults


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
