"""Finished runs of train.py, read from their report.json and, for their options, checkpoint.json."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from embodied.commands import command, typed
from embodied.errors import UserError
from embodied.evaluation.evaluation import EvaluationResult
from embodied.saving import checkpoint
from embodied.saving.json_text import loads
from embodied.saving.metrics import METRICS
from embodied.saving.resume import FREE

REPORT = "report.json"
SWEEP = "multirun.yaml"
SUMMARY = "summary.md"
"""Files of a sweep (-m) beside the folders of its runs."""
REQUIRED = "task", "assets", "seed", "git_commit", "env_steps", "wall_s"
FINAL = "rl", "offline", "sft"
"""Stages with the final policy of a run, the later first."""
ASIDE = FREE | {"seed", "plan"}
"""Options that distinguish runs of one experiment, or do not affect results."""


@dataclass(frozen=True, eq=False)
class RunOptions:
    """Run whose report.json is, or will be, at `path`, and its options by dotted name; none if they are unknown."""

    path: Path
    options: Mapping[str, Any]

    @property
    def directory(self) -> Path | None:
        """Folder of the run; None for a report that was moved elsewhere."""
        return self.path.parent if self.path.name == REPORT else None

    @property
    def name(self) -> str:
        """Name of the folder, or of a report that was moved elsewhere, without the seed."""
        return re.sub(r"_?seed_?\d+", "", self.path.resolve().parent.name if self.directory else self.path.stem)


@dataclass(frozen=True, eq=False)
class Run(RunOptions):
    """Finished run with the content of its report.json.

    `results` are the evaluations of its final policy, by distribution.
    """

    report: Mapping[str, Any]
    results: Mapping[str, EvaluationResult]


def run_folders(paths: Iterable[str | Path]) -> list[Path]:
    """Paths of single runs among `paths`, which may also be folders of sweeps (-m), or all that lies in one.

    A sweep is replaced by its runs that have begun; its own files are left out. Everything else stays.
    """
    folders: list[Path] = []
    for path in map(Path, paths):
        if (path / SWEEP).exists():
            folders += sorted(each.parent for each in path.glob(f"*/{METRICS}"))
        elif path.name not in (SWEEP, SUMMARY):
            folders.append(path)
    return folders


def read(path: str | Path) -> Run:
    """Read the run at `path`: its folder, or its report.json under any name.

    Raises:
        UserError: if there is none, it is not finished, or its report cannot be read.
    """
    source = Path(path)
    report = source / REPORT if source.is_dir() else source
    if not report.exists():
        if (source / METRICS).exists() or (source / checkpoint.FOLDER).is_dir():
            resume = f"{command('train')} {typed('resume', source)}"
            raise UserError(f"{source} is not finished (no {REPORT}); {resume} continues it")
        raise UserError(f"no run in {source}; expected a run's folder, such as outputs/<task>/<run>, or its {REPORT}")
    try:
        record = loads(report.read_text(encoding="utf-8"))
        final = next(stage for stage in FINAL if any(row["stage"] == stage for row in record["evaluations"]))
        results = {
            row["distribution"]: evaluation_result(row) for row in record["evaluations"] if row["stage"] == final
        }
        record = {name: record[name] for name in REQUIRED} | {"cpu_s": record.get("cpu_s")}
    except StopIteration:
        raise UserError(f"{report} has no evaluation of a policy after training: nothing to compare") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{report} is no report of train.py ({type(error).__name__}: {error})") from error
    return Run(report, read_options(report.parent) if report.name == REPORT else {}, record, results)


def evaluation_result(row: Mapping[str, Any]) -> EvaluationResult:
    """Build an evaluation from its summary in a report.

    Reports of earlier versions count successes without their starts: they are treated as if no other evaluation had the
    same episodes.
    """
    tasks = tuple(each["task"] for each in row["per_task"])
    task_rows = row["per_task"]
    has_outcomes = all("outcomes" in each for each in task_rows)
    if not has_outcomes and "success" not in row:
        raise ValueError("it is of an earlier version, without the returns of single episodes")
    outcomes = torch.tensor(
        [[float(value) for value in each["outcomes"].split()] for each in task_rows]
        if has_outcomes
        else [
            [float(i < round(each["success"] * each["episodes"])) for i in range(each["episodes"])]
            for each in task_rows
        ],
        dtype=torch.float64,
    )
    return EvaluationResult(
        tasks,
        outcomes > 0 if "success" in row else torch.zeros_like(outcomes, dtype=torch.bool),
        torch.tensor([[each["mean_steps"]] for each in task_rows]).expand_as(outcomes),
        row["step_limit"],
        repeatable=has_outcomes and row.get("repeatable", True),
        returns=None if "success" in row else outcomes,
        first_start=row.get("first_start", 0),
    )


def read_options(directory: Path) -> dict[str, Any]:
    """Choices and options of the run in `directory` by dotted name, without those that may differ in a row.

    They are those of its newest checkpoint, none without one.
    """
    if not (saved := checkpoint.newest(directory)):
        return {}
    config = checkpoint.load_config(saved)
    flat = dict(_flat(config["values"]))
    return {**config["choices"], **{name: value for name, value in flat.items() if name not in ASIDE}}


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
