"""Which tests execute a function: each test file runs once, and its functions, times and failures are recorded."""

import hashlib
import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from pathlib import Path

import pytest

from benchmarks.mutants import trace

SOURCES = frozenset({".py", ".c", ".h", ".yaml"})


@dataclass
class Record:
    """Functions that one test file executes.

    `seconds` holds the tests that pass, with their CPU times, s; `failed` those that do not. `calls` holds the tests
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
        self._passed: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Attribute functions to the test, and keep its time if it passes: failed and skipped tests are of no use."""
        trace.enter(item.nodeid)
        begin_s = _cpu_s()
        result = yield
        if item.nodeid in self._passed:
            self.record.seconds[item.nodeid] = round(_cpu_s() - begin_s, 3)
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
        """Keep whether a test passes in all its phases."""
        if report.when == "call" and report.passed:
            self._passed.add(report.nodeid)
        elif report.failed:
            self._passed.discard(report.nodeid)
            self.record.failed.append(report.nodeid)

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


def _cpu_s() -> float:
    """CPU time of this process and its children so far, s: unlike the clock, it does not depend on other programs."""
    return sum(os.times()[:4])


class Coverage:
    """The tests that cover a function, from the records of test files."""

    def __init__(self, records: list[Record]) -> None:
        self._records = records

    def tests(self, function: str, budget_s: float) -> tuple[list[str], float]:
        """Tests for a fault in `function`, `file::qualified name`, and their CPU time without it, s.

        Tests that execute the function come first, among them those of the test file with the name of the source file,
        then those in the nearest folder, then short ones. Others of their test files follow: a function may have run
        only once for all of them, for a cache. Tests that would exceed `budget_s` are left out, but not the first one.
        """
        source = Path(function.partition("::")[0])
        ranked = []
        for record in self._records:
            direct = set(record.calls.get(function, ()))
            for test, seconds in record.seconds.items() if direct else ():
                path = Path(test.partition("::")[0])
                is_namesake = path.stem == f"test_{source.stem}"
                # tests/ mirrors the packages: folders that both paths share
                folders = zip(source.parent.parts, path.parent.parts[1:], strict=False)
                shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], folders))
                ranked.append((test not in direct, not is_namesake, -shared, seconds, test))
        chosen, total_s = [], 0.0
        for *_, seconds, test in sorted(ranked):
            if not chosen or total_s + seconds <= budget_s:
                chosen.append(test)
                total_s += seconds
        return chosen, total_s


def digest(root: Path, packages: list[str], test_file: str) -> str:
    """Digest of what the record of `test_file` depends on: all sources, helpers of tests, the file, the environment."""
    sources = [path for name in packages for path in (root / name).rglob("*") if path.suffix in SOURCES]
    helpers = [path for path in (root / "tests").rglob("*.py") if not path.name.startswith("test_")]
    total = hashlib.sha256(sys.prefix.encode())
    for path in (*sorted(sources), *sorted(helpers), root / test_file):
        total.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return total.hexdigest()[:24]
