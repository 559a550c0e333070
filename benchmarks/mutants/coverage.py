"""Which tests execute a function: each test file runs once, and its functions, times and failures are recorded."""

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest

from benchmarks.mutants import trace

SOURCES = frozenset({".py", ".c", ".h", ".yaml"})


@dataclass
class Record:
    """What one test file executes.

    `seconds` holds the tests that pass, with their durations; `failed` those that do not. `calls` holds the tests
    that execute a function, by `file::qualified name`. A function that runs in a fixture of a module or when the test
    file is imported counts for all tests of the file.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    calls: dict[str, list[str]] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write the record as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> "Record":
        """Read a record from `save`."""
        return cls(**json.loads(path.read_text()))


class Recorder:
    """Plugin of pytest: times tests and keeps their names for the functions that `trace` records."""

    def __init__(self) -> None:
        self.record = Record()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Attribute functions to the test."""
        trace.enter(item.nodeid)
        result = yield
        trace.enter("")
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef) -> Iterator[None]:
        """Attribute functions to all tests of the file while a fixture that tests share is made."""
        test = os.environ.get(trace.CONTEXT, "")
        if fixturedef.scope != "function":
            trace.enter("")
        result = yield
        trace.enter(test)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add up the time of a test's phases; a test that fails or is skipped is of no use."""
        if report.failed:
            self.record.failed.append(report.nodeid)
        if report.passed and report.nodeid not in self.record.failed:
            self.record.seconds[report.nodeid] = self.record.seconds.get(report.nodeid, 0.0) + report.duration
        else:
            self.record.seconds.pop(report.nodeid, None)
        if report.when == "teardown" and report.nodeid in self.record.seconds:
            self.record.seconds[report.nodeid] = round(self.record.seconds[report.nodeid], 3)

    def complete(self, log: Path) -> Record:
        """Return the record with the functions that were logged in `log`."""
        calls: defaultdict[str, set[str]] = defaultdict(set)
        for line in log.read_text().splitlines():
            test, file, function = line.split("\t")
            if not file.startswith("tests/"):
                calls[f"{file}::{function}"] |= set(self.record.seconds) if not test else {test}
        tests = self.record.seconds.keys()
        self.record.calls = {function: sorted(names & tests) for function, names in calls.items() if names & tests}
        return self.record


class Coverage:
    """The tests that cover a function, from the records of test files."""

    def __init__(self, records: list[Record]) -> None:
        self._records = records

    def tests(self, function: str, budget_s: float) -> tuple[list[str], float]:
        """Tests for a fault in `function`, `file::qualified name`, and their time without it, s.

        Test files that cover few functions come first, as they are about the function. In each, tests that execute
        the function come first. The others of these test files follow: a function may have run only once for all of
        them, for a cache. Tests that would exceed `budget_s` are left out, but not the first one.
        """
        ranked = []
        for record in self._records:
            direct = record.calls.get(function, ())
            if direct:
                for test, seconds in record.seconds.items():
                    ranked.append((test not in direct, len(record.calls), seconds, test))
        chosen, total_s = [], 0.0
        for _, _, seconds, test in sorted(ranked):
            if not chosen or total_s + seconds <= budget_s:
                chosen.append(test)
                total_s += seconds
        return chosen, total_s


def digest(root: Path, packages: list[str], test_file: str) -> str:
    """Digest of what the record of `test_file` depends on: all sources, helpers of tests and the file itself."""
    sources = [path for name in packages for path in (root / name).rglob("*") if path.suffix in SOURCES]
    helpers = [path for path in (root / "tests").rglob("*.py") if not path.name.startswith("test_")]
    total = hashlib.sha256()
    for path in (*sorted(sources), *sorted(helpers), root / test_file):
        total.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return total.hexdigest()[:24]
