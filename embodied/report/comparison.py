"""Comparison of finished runs: runs that differ only in their seed form one row, and rows are compared."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from textwrap import shorten
from typing import Any, TypeVar

import torch
from torch import Tensor

from embodied.errors import UserError
from embodied.evaluation.evaluation import wilson
from embodied.evaluation.means import (
    difference_interval,
    interquartile_interval,
    mean_interval,
    probability_of_improvement,
)
from embodied.report.finished_run import Run, RunOptions, read

SURROUNDINGS = "task.", "latency.", "success_classifier"
"""Beginnings of options that may change evaluations as well as training."""
CHOICES = "task", "policy", "algorithm", "run"
"""Options that choose a part, and the name of a run whose options are unknown."""
Options = Mapping[str, Any]
"""Values by dotted name."""
Interval = dict[str, float | None]
"""Number under its name, and its bounds `low` and `high`; null: no bounds."""
AnyRun = TypeVar("AnyRun", bound=RunOptions)


@dataclass(frozen=True, eq=False)
class Row:
    """Runs that differ only in their seed; the `name` states how they differ from other rows."""

    name: str
    runs: Sequence[Run]

    @property
    def distributions(self) -> list[str]:
        """Distributions evaluated in every run."""
        return [name for name in self.runs[0].results if all(name in run.results for run in self.runs)]

    def scores(self, distribution: str) -> Tensor:
        """Success rates, or mean returns, [runs, tasks]."""
        return torch.stack([run.results[distribution].outcomes.mean(1) for run in self.runs])

    def mean(self, distribution: str) -> Interval:
        """Mean with its interval: over runs Student's, at least as wide as Wilson's of all episodes.

        The mean of one run has the interval of its report.
        """
        first = self.runs[0].results[distribution]
        if len(self.runs) == 1:
            return {"mean": (summary := first.summary())[first.measure], "low": summary["low"], "high": summary["high"]}
        mean, low, high = mean_interval(self.scores(distribution).mean(1))
        if first.measure == "success":
            episode_bounds = self.binomial(distribution)
            low = max(0.0, min(low, episode_bounds[0]))
            high = min(1.0, max(high, episode_bounds[1]))
        return _checked_interval("mean", mean, low, high)

    def binomial(self, distribution: str) -> tuple[float, float]:
        """Wilson's interval of the success rate of all runs' episodes, as if seeds did not matter."""
        success = torch.stack([run.results[distribution].success for run in self.runs])
        return wilson(int(success.sum()), success.numel())

    def interquartile_mean(self, distribution: str) -> Interval | None:
        """Interquartile mean over runs and tasks, with its interval; None for one run.

        Where the middle half of rates does not vary, the mean's interval is used: the episodes may still be few.
        """
        if len(self.runs) == 1:
            return None
        estimate, low, high = interquartile_interval(self.scores(distribution))
        if self.runs[0].results[distribution].measure == "success":
            low = max(0.0, low)
            high = min(1.0, high)
            if high - low < 1e-9:
                bounds = self.mean(distribution)
                low = min(estimate, bounds["low"] or 0.0)
                high = max(estimate, bounds["high"] or 0.0)
        return _checked_interval("iqm", estimate, low, high)

    def average(self, cost: str) -> float | None:
        """Mean over runs of a cost in their reports, summed over phases; None unless every report has it."""
        reported = [run.report[cost] for run in self.runs]
        costs = [sum(each.values()) if isinstance(each, Mapping) else each for each in reported if each is not None]
        return sum(costs) / len(costs) if len(costs) == len(reported) else None

    def summary(self) -> dict[str, Any]:
        """JSON-ready: name, runs, costs, and results on each distribution."""
        return {
            "name": self.name,
            "runs": [
                {"path": str(run.path), "seed": run.report["seed"], "git_commit": run.report["git_commit"]}
                for run in self.runs
            ],
            **{cost: self.average(cost) for cost in ("env_steps", "wall_s", "cpu_s")},
            "results": {
                name: {"mean": self.mean(name), "iqm": self.interquartile_mean(name)} for name in self.distributions
            },
        }


@dataclass(frozen=True, eq=False)
class Comparison:
    """Rows of runs of one task, evaluated in the same way; `options` are those that differ, with every row's value."""

    rows: Sequence[Row]
    options: Mapping[str, Sequence[Any]]
    notes: Sequence[str]

    @property
    def distributions(self) -> list[str]:
        """Distributions evaluated in any row."""
        return list(dict.fromkeys(name for row in self.rows for name in row.distributions))

    @property
    def measure(self) -> str:
        """Measure of episodes: "success" or "return"."""
        return next(iter(self.rows[0].runs[0].results.values())).measure

    def differences(self) -> Iterator[dict[str, Any]]:
        """JSON-ready: for two rows and each distribution of both, the difference and the probability of improvement."""
        for after, before in combinations(self.rows, 2):
            for name in (each for each in after.distributions if each in before.distributions):
                yield {"row": after.name, "over": before.name, "distribution": name, **_difference(after, before, name)}

    def summary(self) -> dict[str, Any]:
        """JSON-ready: task, rows, differences, notes."""
        first = self.rows[0].runs[0].report
        return {
            "task": first["task"],
            "assets": first["assets"],
            "measure": self.measure,
            "rows": [row.summary() for row in self.rows],
            "options": dict(self.options),
            "differences": list(self.differences()),
            "notes": list(self.notes),
        }


def compare(paths: Sequence[str | Path]) -> Comparison:
    """Compare the runs at `paths`: folders of finished runs, or their report.json under any name.

    Raises:
        UserError: on one line, with the reason, for runs that are not finished or cannot be compared.
    """
    if not paths:
        raise UserError("expected runs to compare, such as outputs/<task>/<run>, got none")
    runs = [read(path) for path in paths]
    for first, other in combinations(runs, 2):
        _check_comparable(first, other)
    names, options, groups = grouped(runs)
    for group in groups:
        _check_seeds(group)
    rows = [Row(*row) for row in zip(names, groups, strict=True)]
    has_options = all(run.options for run in runs)
    return Comparison(rows, _differing(options) if has_options else {}, list(_notes(rows, options)))


def grouped(runs: Sequence[AnyRun]) -> tuple[list[str], list[Options], list[list[AnyRun]]]:
    """Groups of runs that differ only in their seed: their names, options and runs.

    A name states how the options differ from those of other groups. Without the options of every run, groups are runs
    of one name.
    """
    has_options = all(run.options for run in runs)
    groups: dict[str, list[AnyRun]] = {}
    for run in runs:
        groups.setdefault(json.dumps(run.options, sort_keys=True) if has_options else run.name, []).append(run)
    options = [group[0].options if has_options else {"run": group[0].name} for group in groups.values()]
    return [_named(own, options) for own in options], options, list(groups.values())


def _differing(options: Sequence[Options]) -> dict[str, list[Any]]:
    """Options that differ among rows, with every row's value, None if it has none.

    Options of a part, such as policy.width, are compared among rows that chose the same part.
    """
    differing = {}
    for name in dict.fromkeys(name for each in options for name in each):
        part = name.partition(".")[0]
        values: dict[str, list[Any]] = {}
        for each in (each for each in options if name in each):
            values.setdefault(str(each.get(part)) if part != name else "", []).append(each[name])
        if any(value != same[0] for same in values.values() for value in same):
            differing[name] = [each.get(name) for each in options]
    return differing


def _named(own: Options, options: Sequence[Options]) -> str:
    """Name of a row with its `own` options: choices, and options that differ among rows with equal choices.

    Other differences between rows of different choices often follow from these.
    """
    choices = [name for name in CHOICES if name in own]
    equal_choices = [each for each in options if all(each.get(name) == own[name] for name in choices)]
    names = [
        *(name for name in choices if name in _differing(options)),
        *(n for n in _differing(equal_choices) if n in own),
    ]
    return " ".join(f"{name}={written(own[name])}" for name in names or choices)


def _check_comparable(first: Run, other: Run) -> None:
    """Raise UserError for two runs of different tasks or assets, or whose evaluations have nothing in common."""
    shared = [name for name in first.results if name in other.results]
    protocol, other_protocol = (_protocol(run, shared) for run in (first, other))
    if different := [fact for fact in protocol if protocol[fact] != other_protocol[fact]]:
        pair = (shorten(str(each[different[0]]), 80) for each in (protocol, other_protocol))
        raise UserError(f"{first.path} and {other.path} cannot be compared: {different[0]} is {' and '.join(pair)}")


def _protocol(run: Run, shared: Sequence[str]) -> dict[str, Any]:
    """Facts that runs must have in common which share these distributions; without any, the distributions."""
    facts = {name: run.report[name] for name in ("task", "assets")}
    for name in shared:
        result = run.results[name]
        facts[f"measure on {name}"] = result.measure
        facts[f"list of tasks on {name}"] = ", ".join(result.tasks)
        facts[f"number of episodes of each task on {name}"] = result.outcomes.shape[1]
        facts[f"step limit on {name}"] = result.step_limit
        facts[f"first initial state on {name}"] = result.first_start
    return facts if shared else facts | {"list of distributions": ", ".join(run.results)}


def _check_seeds(runs: Sequence[Run]) -> None:
    """Raise UserError for runs of one row with the same seed, which are not independent."""
    by_seed: dict[int, Run] = {}
    for run in runs:
        if other := by_seed.get(run.report["seed"]):
            raise UserError(
                f"{other.path} and {run.path} have the same options and seed {run.report['seed']}: give one of them"
            )
        by_seed[run.report["seed"]] = run


def _notes(rows: Sequence[Row], options: Sequence[Options]) -> Iterator[str]:
    """Notes that a reader needs to interpret the numbers."""
    if single := sum(len(row.runs) == 1 for row in rows):
        yield (
            f"{single} of {len(rows)} rows are a single seed: their intervals tell what that run reached. A claim "
            "about options or algorithms needs more seeds (train.py seed=1, seed=2, ...)."
        )
    if any("run" in each for each in options):
        yield "Without every run's checkpoint/ the options are unknown: rows go by the names of files, without seeds."
    if rows[0].runs[0].report["assets"] == "stand-in":
        yield "With stand-in assets: these are not benchmark numbers."
    if any(name.startswith(SURROUNDINGS) for name in _differing(options)):
        yield "Rows differ in options of the task or its latency, which may change what is evaluated, too."
    if len(commits := dict.fromkeys(run.report["git_commit"] for row in rows for run in row.runs)) > 1:
        yield f"The runs are of {len(commits)} versions of the code: {', '.join(map(short, commits))}."


def short(commit: str) -> str:
    """Abbreviated commit."""
    name, dash, dirty = commit.partition("-")
    return name[:10] + dash + dirty


def _difference(after: Row, before: Row, distribution: str) -> dict[str, Any]:
    """Difference of the means, and the probability that a run of `after` is better than one of `before`.

    It is paired if both rows are one run that ran the same starts. Values that need several seeds are null.
    """
    counts = (len(after.runs), len(before.runs))
    better = None
    results = [row.runs[0].results[distribution] for row in (after, before)]
    if counts == (1, 1):
        gain = results[0].gain_over(results[1])
        interval = gain.difference, gain.low, gain.high
    else:
        scores = [row.scores(distribution) for row in (after, before)]
        interval = difference_interval(scores[0].mean(1), scores[1].mean(1))
        if min(counts) > 1:
            better = _checked_interval("probability", *probability_of_improvement(scores[0], scores[1]))
            interval = _widened(interval, after, before, distribution) if results[0].measure == "success" else interval
    return {
        **_checked_interval("difference", *interval),
        "paired": counts == (1, 1) and all(result.repeatable for result in results),
        "improvement": better,
    }


def _widened(
    interval: tuple[float, float, float], after: Row, before: Row, distribution: str
) -> tuple[float, float, float]:
    """Widen an interval over runs to at least that of all their episodes (Newcombe 1998, as for a gain)."""
    difference, low, high = interval
    rates = [float(row.scores(distribution).mean()) for row in (after, before)]
    (up_low, up_high), (down_low, down_high) = (row.binomial(distribution) for row in (after, before))
    spread_down = math.hypot(rates[0] - up_low, down_high - rates[1])
    spread_up = math.hypot(up_high - rates[0], rates[1] - down_low)
    return difference, max(-1.0, min(low, difference - spread_down)), min(1.0, max(high, difference + spread_up))


def _checked_interval(name: str, value: float, low: float, high: float) -> Interval:
    return {key: x if math.isfinite(x) else None for key, x in ((name, value), ("low", low), ("high", high))}


def written(value: Any) -> str:  # noqa: ANN401 - any JSON value
    """Value of an option as typed on the command line."""
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
