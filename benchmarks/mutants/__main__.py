"""Puts faults into copies of the tree one at a time; reports which of them the tests catch, by package.

Faults are generated for every function and sampled with a seed; those of tests/mutants.yaml, written by hand, come on
top. The tests that execute a function run with its faults, as recorded at the start. Fails if the tests catch
fewer than 90% of a package's sample. The JSON file is updated for the packages that were measured.
"""

import argparse
import hashlib
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import yaml

from benchmarks.mutants.coverage import Coverage
from benchmarks.mutants.operators import Fault, by_hand, generate
from benchmarks.mutants.report import is_enough, merge, row, table
from benchmarks.mutants.workers import Workers

ROOT = Path(__file__).resolve().parents[2]

PACKAGES = {
    "embodied": "tests/embodied tests/placement tests/conformance tests/*.py",
    "policies": "tests/policies tests/conformance/test_policies.py",
    "sims": "tests/sims",
    "sims/libero": "tests/sims/libero tests/sims/*.py",
    "sims/quadrotor": "tests/sims/quadrotor tests/sims/*.py",
    "sims/vehicle": "tests/sims/vehicle tests/sims/*.py",
    "real_robot": "tests/real_robot",
    "real_robot/safety": "tests/real_robot/safety",
}
"""Packages and the tests that are recorded for them. A file belongs to the package with the longest matching path."""

SAMPLE = 40
"""Generated faults of each package, unless options say otherwise."""


def package_of(file: str) -> str:
    """Package of a source or test file."""
    return max((name for name in PACKAGES if file.startswith(name + "/")), key=len)


def generated_faults(root: Path) -> list[Fault]:
    """All faults that the operators generate in the packages' Python files."""
    files = sorted(path for name in PACKAGES if "/" not in name for path in (root / name).rglob("*.py"))
    return [fault for path in files for fault in generate(str(path.relative_to(root)), path.read_text())]


def written_faults(root: Path) -> list[Fault]:
    """All faults of tests/mutants.yaml."""
    listed = yaml.safe_load((root / "tests/mutants.yaml").read_text())
    return [by_hand(file, (root / file).read_text(), entry) for file, entries in listed.items() for entry in entries]


def sample(faults: list[Fault], count: int, seed: int) -> list[Fault]:
    """`count` random faults; those of other functions do not change which of a function's faults are preferred."""
    return sorted(faults, key=lambda fault: hashlib.sha256(f"{seed}:{fault}".encode()).digest())[:count]


def by_package(faults: list[Fault]) -> dict[str, list[Fault]]:
    """The faults of each package."""
    groups: dict[str, list[Fault]] = {name: [] for name in PACKAGES}
    for fault in faults:
        groups[package_of(fault.file)].append(fault)
    return groups


def test_files(root: Path, patterns: list[str]) -> list[str]:
    """Test files that match one of the `patterns`, or lie in a folder that does."""
    paths = {path for pattern in patterns for path in root.glob(pattern)}
    paths |= {path for folder in paths if folder.is_dir() for path in folder.rglob("test_*.py")}
    own = root / "tests/test_mutants.py"
    return sorted(str(path.relative_to(root)) for path in paths - {own} if path.match("test_*.py"))


def _commit() -> str:
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    return subprocess.run(describe, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def _log(line: str) -> None:
    print(line, flush=True)


def selected(arguments: argparse.Namespace) -> list[Fault]:
    """The faults to measure: of each package those that are written by hand and a sample of the generated ones.

    With `names`, only faults whose names contain one of them, and all of these unless `count` limits them.
    """
    groups = []
    for faults in (written_faults(ROOT), generated_faults(ROOT)):
        names = arguments.names or [""]
        groups.append(by_package([fault for fault in faults if any(name in str(fault) for name in names)]))
    written, generated = groups
    count = arguments.count or (sys.maxsize if arguments.names else SAMPLE)
    lists = [written[name] for name in arguments.package]
    lists += [sample(generated[name], count, arguments.seed) for name in arguments.package]
    # One package after another: what the time limit cuts off is missing in all of them.
    return [fault for turn in itertools.zip_longest(*lists) for fault in turn if fault]


def main() -> int:
    """Run the mutation tests; returns 1 if a package's tests catch too few faults."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of the names of faults; default: all faults")
    parser.add_argument("--package", nargs="+", choices=PACKAGES, default=list(PACKAGES), help="default: all")
    parser.add_argument("--count", type=int, help=f"size of a package's sample; default: {SAMPLE}, or all with names")
    parser.add_argument("--tests", nargs="+", help="folders or files of tests to use; default: those of the packages")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument("--minutes", type=float, default=60.0, help="faults that did not run until then are left out")
    parser.add_argument("--budget", type=float, default=20.0, help="CPU time of the tests of one fault, s")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="faults at the same time; default: cores")
    parser.add_argument("--json", type=Path, help="JSON file for the table")
    arguments = parser.parse_args()
    if arguments.json and (arguments.names or arguments.tests):
        parser.error("--json stores samples of whole packages with all their tests: leave it out with names or --tests")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # copies are deleted
    start_s, commit = time.monotonic(), _commit()
    faults = selected(arguments)
    packages = sorted({package_of(fault.file) for fault in faults})
    outcomes: dict[str, dict[Fault, str]] = {package: {} for package in packages}
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        workers = Workers(ROOT, directory, arguments.workers)
        sources = [name for name in PACKAGES if "/" not in name]
        patterns = arguments.tests or [pattern for package in packages for pattern in PACKAGES[package].split()]
        coverage = Coverage(workers.records(test_files(ROOT, patterns), sources, _log))
        first_s = time.monotonic()
        end_s = start_s + 60.0 * arguments.minutes
        for number, (fault, outcome) in enumerate(workers.outcomes(faults, coverage, arguments.budget, end_s), 1):
            outcomes[package_of(fault.file)][fault] = outcome
            left_min = (time.monotonic() - first_s) / number * (len(faults) - number) / 60.0
            _log(f"{number}/{len(faults)}, {left_min:.0f} min left: {outcome.upper()} {fault}, {fault.change}")
    origin = {"seed": arguments.seed, "git_commit": commit, "ros2": find_spec("rclpy") is not None}
    rows = {package: row(each) | origin for package, each in outcomes.items()}
    print(table(rows), f"With{'' if origin['ros2'] else 'out'} tests over ROS 2.", sep="\n\n")
    if arguments.json:
        merge(arguments.json, rows)
    return int(not all(is_enough(entry) for entry in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
