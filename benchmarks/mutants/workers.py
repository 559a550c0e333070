"""Processes that record test files and run the tests of faults, each in its own copy of the tree."""

import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from benchmarks.mutants.coverage import Coverage, Record, digest
from benchmarks.mutants.operators import Fault
from benchmarks.mutants.trees import Tree, end_with_parent

_trees: list[Tree] = []
"""The tree of a worker process."""


def _start(root: Path, directory: str) -> None:
    end_with_parent()
    _trees.append(Tree(root, directory))


def _record(test_file: str) -> Record:
    return _trees[0].record(test_file)


def _outcome(fault: Fault, tests: list[str], usual_s: float) -> str:
    return _trees[0].outcome(fault, tests, usual_s)


class Workers:
    """`count` processes for the tree `root`; their copies lie in `directory`."""

    def __init__(self, root: Path, directory: str, count: int) -> None:
        self._root = root
        context = multiprocessing.get_context("fork")
        self._pool = ProcessPoolExecutor(count, context, initializer=_start, initargs=(root, directory))

    def records(self, files: list[str], sources: list[str], log: Callable[[str], None]) -> list[Record]:
        """Records of test files; those of files and `sources` that did not change are kept in build/mutants."""
        records, jobs = [], {}
        for file in files:
            stored = self._root / f"build/mutants/{digest(self._root, sources, file)}.json"
            if stored.exists():
                records.append(Record.load(stored))
            else:
                jobs[self._pool.submit(_record, file)] = file, stored
        for number, job in enumerate(as_completed(jobs), 1):
            (file, stored), record = jobs[job], job.result()
            note = f"; without a fault {len(record.failed)} fail: {record.failed}" if record.failed else ""
            log(f"recorded {number}/{len(jobs)} {file}: {len(record.seconds)} tests{note}")
            record.save(stored)
            records.append(record)
        return records

    def outcomes(
        self, faults: list[Fault], coverage: Coverage, budget_s: float, end_s: float
    ) -> Iterator[tuple[Fault, str]]:
        """Yield each fault with its outcome, until the monotonic time `end_s`."""
        jobs = {}
        for fault in faults:
            tests, usual_s = coverage.tests(fault.covered_by, budget_s)
            if tests:
                jobs[self._pool.submit(_outcome, fault, tests, usual_s)] = fault
            else:
                yield fault, "not covered"
        for job in as_completed(jobs):
            yield jobs[job], job.result()
            if time.monotonic() > end_s:
                break
        self._pool.shutdown(cancel_futures=True)
