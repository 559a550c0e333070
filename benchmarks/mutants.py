"""Mutation tests: checks which faults of tests/mutants/*.yaml the tests catch, one at a time in a copy of the tree.

    python benchmarks/mutants.py [core vehicle] [--json benchmarks/results/mutants.json]

A fault is a realistic mistake: a snippet that occurs once in its file, and its replacement. The tests listed with it
have to pass without it, and one of them has to fail with it. Prints the survivors and the score of each package, and
fails if a package is under 90%. The JSON file is updated after each complete package, with the measured commit;
packages that were not requested, or only in part, keep their entries.
"""

import argparse
import json
import multiprocessing
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import hypothesis
import numpy
import pytest
import tensordict
import torch
import yaml

READY = (hypothesis, numpy, pytest, tensordict, torch)
"""Every test run is a fork of this process, with slow imports preloaded, but no modules of the tree."""
ROOT = Path(__file__).resolve().parent.parent
APART = shutil.ignore_patterns(".git", ".venv*", "__pycache__", "outputs", "build", "dist", ".*_cache", ".hypothesis")
LEAST = 0.9
"""Share of a package's faults that must be caught."""
PATIENCE, SLACK_S = 10.0, 60.0
"""Tests that take this many times as long as without the fault, plus this much, count as hanging, and so as catching
it.
"""


@dataclass(frozen=True)
class Fault:
    """One mistake: `find` in `file` is replaced by `put`; one of `tests`, separated by spaces, has to catch it."""

    package: str
    file: str
    what: str
    find: str
    put: str
    tests: str

    def __str__(self) -> str:
        """Package, file, and description."""
        return f"{self.package} | {self.file}: {self.what}"

    def apply(self, text: str) -> str:
        """Insert the fault into the file's `text`; raises ValueError unless the snippet occurs exactly once."""
        if (count := text.count(self.find)) != 1:
            raise ValueError(f"{self}: expected {self.find!r} once in the file, found {count}")
        return text.replace(self.find, self.put)


def faults() -> list[Fault]:
    """All faults: one YAML file per package, with source files, their tests and the replacements."""
    return [
        Fault(path.stem, file, what, find, put, entry["tests"])
        for path in sorted((ROOT / "tests/mutants").glob("*.yaml"))
        for file, entry in yaml.safe_load(path.read_text()).items()
        for what, (find, put) in entry["faults"].items()
    ]


def passes(tree: Path, tests: str, limit_s: float | None = None) -> bool:
    """Whether `tests` pass in `tree` within `limit_s`; without a limit, raise ValueError unless all pass."""
    log = tree / "pytest.log"
    run = multiprocessing.get_context("fork").Process(target=_pytest, args=(tree, tests, log))
    run.start()
    run.join(limit_s)
    if run.exitcode is None:
        assert run.pid is not None
        os.killpg(run.pid, signal.SIGKILL)  # including programs started by tests
        run.join()
    not_run = run.exitcode in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED)
    if not_run or (run.exitcode and limit_s is None):
        raise ValueError(f"expected {tests} to pass without a fault; fix that first:\n{log.read_text()[-4000:]}")
    return run.exitcode == 0


def _pytest(tree: Path, tests: str, log: Path) -> None:
    os.setsid()
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(tree)
    sys.path.insert(0, str(tree))
    # A cached module is identified by its time and size, which a fault may keep.
    sys.dont_write_bytecode = True
    os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    sys.exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *shlex.split(tests)]))


def measure(tree: Path, listed: list[Fault]) -> Iterator[tuple[Fault, bool]]:
    """Insert each fault into `tree` in turn; yields it and whether its tests, which pass without it, catch it."""
    usual_s: dict[str, float] = {}
    for fault in listed:
        if fault.tests not in usual_s:
            start_s = time.monotonic()
            passes(tree, fault.tests)
            usual_s[fault.tests] = time.monotonic() - start_s
        path = tree / fault.file
        text = path.read_text()
        path.write_text(fault.apply(text))
        try:
            yield fault, not passes(tree, fault.tests, PATIENCE * usual_s[fault.tests] + SLACK_S)
        finally:
            path.write_text(text)


def chosen(listed: list[Fault], names: list[str]) -> dict[str, list[Fault]]:
    """The faults of `listed` selected by `names`, by package; all faults if `names` is empty.

    A name is a package's name or a part of the printed line.
    """
    packages: dict[str, list[Fault]] = {fault.package: [] for fault in listed}
    for fault in listed:
        matches = (name == fault.package if name in packages else name in str(fault) for name in names)
        packages[fault.package] += [fault] if not names or any(matches) else []
    return {package: requested for package, requested in packages.items() if requested}


def merge(table: Path, package: str, row: dict) -> None:
    """Write `row` as the entry of `package` into `table`, a JSON file that may not exist yet; keep other entries."""
    rows = json.loads(table.read_text())["packages"] if table.exists() else {}
    table.write_text(json.dumps({"packages": dict(sorted((rows | {package: row}).items()))}, indent=2) + "\n")


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> int:
    """Run the mutation tests; returns 1 if a package is under `LEAST`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", help="packages, or parts of a fault's printed line; default all")
    parser.add_argument("--json", type=Path, help="JSON file for the table")
    arguments = parser.parse_args()
    listed = faults()
    totals = Counter(fault.package for fault in listed)
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    commit = subprocess.run(describe, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    rows: dict[str, dict] = {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        tree = Path(shutil.copytree(ROOT, directory, ignore=APART, dirs_exist_ok=True))
        for package, requested in chosen(listed, arguments.only).items():
            began_s, survived = _cpu_s(), []
            for fault, caught in measure(tree, requested):
                survived += [] if caught else [str(fault)]
                print(f"{'caught' if caught else 'SURVIVED':8} {fault}", flush=True)
            count = len(requested) - len(survived)
            rows[package] = {"faults": len(requested), "caught": count, "score": round(count / len(requested), 3)}
            if arguments.json and len(requested) == totals[package]:
                entry = {"survived": survived, "git_commit": commit, "cpu_s": round(_cpu_s() - began_s)}
                merge(arguments.json, package, rows[package] | entry)
    for package, row in rows.items():
        print(f"{package:10} {row['caught']:3} of {row['faults']:3} caught, {row['score']:.0%}")
    return int(any(row["score"] < LEAST for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
