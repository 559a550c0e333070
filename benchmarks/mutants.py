"""Which of the faults in tests/mutants/*.yaml the tests catch: each is put into a copy of the tree by itself.

    python benchmarks/mutants.py [--packages vehicle libero] [--json benchmarks/results/mutants.json]

A fault is a realistic mistake: a snippet that occurs once in its file, and what takes its place. The tests that stand
beside it have to pass without it, and one of them to fail with it. Prints what survived and the score of each package,
writes both as JSON, and fails where a package is under 90%.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
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
"""Every run of the tests is a fork of this process, which has what takes seconds to import; nothing of the tree."""
ROOT = Path(__file__).resolve().parent.parent
FAULTS = ROOT / "tests/mutants"
LEAST = 0.9
"""Share of a package's faults that has to be caught."""
PATIENCE, SLACK_S = 10.0, 60.0
"""Tests that run so many times as long as without the fault, and so much longer, hang: that is caught, too."""


@dataclass(frozen=True)
class Fault:
    """One mistake: `find` in `file` becomes `put`, which `tests`, separated by spaces, ought to tell."""

    package: str
    file: str
    what: str
    find: str
    put: str
    tests: str

    def apply(self, text: str) -> str:
        """`text` of the file with the fault.

        Raises:
            ValueError: where the snippet is not there exactly once.
        """
        if (count := text.count(self.find)) != 1:
            raise ValueError(f"{self.package}: {self.what}: expected {self.find!r} once in {self.file}, found {count}")
        return text.replace(self.find, self.put)


def faults(folder: Path = FAULTS) -> list[Fault]:
    """All of the list: a YAML file for each package, in it the source files, their tests and what is done to them."""
    return [
        Fault(path.stem, file, what, find, put, entry["tests"])
        for path in sorted(folder.glob("*.yaml"))
        for file, entry in yaml.safe_load(path.read_text()).items()
        for what, (find, put) in entry["faults"].items()
    ]


def copy_tree(target: Path) -> None:
    """Copy the files that git knows, as they are now, and what is compiled beside them."""
    built = [str(path.relative_to(ROOT)) for path in ROOT.glob("sims/**/*.so")]
    for name in [*filter(None, _git("ls-files", "-z").split("\0")), *built]:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target / name)


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def passes(tree: Path, tests: str, limit_s: float | None = None) -> bool:
    """Whether `tests` pass in `tree`; not where they take longer than `limit_s`.

    Raises:
        ValueError: where pytest finds nothing to run, and without a limit where they fail.
    """
    log = tree / "pytest.log"
    run = multiprocessing.get_context("fork").Process(target=_pytest, args=(tree, tests, log))
    run.start()
    run.join(limit_s)
    if run.exitcode is None:
        assert run.pid is not None
        os.killpg(run.pid, signal.SIGKILL)  # with the programs that tests start
        run.join()
    nothing = run.exitcode in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED)
    if nothing or (run.exitcode and limit_s is None):
        raise ValueError(f"expected {tests} to pass without a fault; mend that first:\n{log.read_text()[-4000:]}")
    return run.exitcode == 0


def _pytest(tree: Path, tests: str, log: Path) -> None:
    os.setsid()
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(tree)
    sys.path.insert(0, str(tree))
    # A cached module is told by its time and size, which a fault may keep.
    sys.dont_write_bytecode = True
    os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    sys.exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests.split()]))


def survivors(tree: Path, listed: list[Fault]) -> Iterator[tuple[Fault, bool]]:
    """Put each fault into `tree` by itself; yields it and whether it is caught.

    Raises:
        ValueError: where the tests fail without a fault.
    """
    usual_s: dict[str, float] = {}
    for fault in listed:
        if fault.tests not in usual_s:
            began = time.monotonic()
            passes(tree, fault.tests)
            usual_s[fault.tests] = time.monotonic() - began
        place = tree / fault.file
        text = place.read_text()
        place.write_text(fault.apply(text))
        try:
            yield fault, not passes(tree, fault.tests, PATIENCE * usual_s[fault.tests] + SLACK_S)
        finally:
            place.write_text(text)


def main() -> int:
    """Measure; returns 1 where a package is under `LEAST`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", nargs="*", help="the files of tests/mutants to measure; all if left out")
    parser.add_argument("--only", default="", help="measure only faults whose description or file contains this")
    parser.add_argument("--json", type=Path, help="write the table here")
    arguments = parser.parse_args()
    listed = [fault for fault in faults() if not arguments.packages or fault.package in arguments.packages]
    listed = [fault for fault in listed if arguments.only in f"{fault.file}: {fault.what}"]
    rows: dict[str, dict] = {fault.package: {"faults": 0, "caught": 0, "survived": []} for fault in listed}
    commit = _git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*").strip()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        copy_tree(Path(directory))
        for fault, caught in survivors(Path(directory), listed):
            row = rows[fault.package]
            row["faults"], row["caught"] = row["faults"] + 1, row["caught"] + caught
            row["survived"] += [] if caught else [f"{fault.file}: {fault.what}"]
            print(f"{'caught' if caught else 'SURVIVED':9} {fault.file}: {fault.what}", flush=True)
    for package, row in rows.items():
        row["score"] = round(row["caught"] / row["faults"], 3)
        print(f"{package:12} {row['caught']:3} of {row['faults']:3} caught, {row['score']:.0%}")
    if arguments.json:
        told = {"git_commit": commit, "wall_s": round(time.monotonic() - began), "packages": rows}
        arguments.json.write_text(json.dumps(told, indent=2) + "\n")
    return int(any(row["score"] < LEAST for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
