"""Reports of a comparison of runs: compare.md, compare.json and compare.png, and its tables on the console."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from embodied.errors import UserError
from embodied.report.comparison import Comparison, Row, short, written
from embodied.report.curves import BAND, draw_band
from embodied.report.markdown import table, without_empty_columns
from embodied.saving.files import complete_or_absent
from embodied.saving.json_text import dumps_rows
from embodied.saving.metrics import read_metrics
from embodied.saving.versions import git_commit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME = "compare"
METHODS = """\
Brackets are 95% intervals. IQM is the interquartile mean over seeds and tasks, which leaves out the best and the worst
quarter (Agarwal et al. 2021, arXiv 2108.13264), with a bootstrap over seeds, or the mean's interval where it does not
vary. Means of several seeds have Student's interval, that of one seed Wilson's over its episodes, or Student's of its
returns. Differences of the means are paired on the same starts where each row is one run, else Welch's over seeds. P is
the probability that one run of the first row does better on a task than one of the second, averaged over tasks, with
Newcombe's interval (2006). Steps and times are means over seeds; CPU time is that of reinforcement learning."""
WIDTH = 30
"""Largest number of letters of a row's name in a line of the figure."""


def write(directory: Path, comparison: Comparison) -> str:
    """Write the three files into `directory`, replacing an earlier comparison; return the tables for the console.

    Raises:
        UserError: if `directory` is a file.
    """
    if directory.exists() and not directory.is_dir():
        raise UserError(f"{directory} is a file; choose another output")
    directory.mkdir(parents=True, exist_ok=True)
    record = {**comparison.summary(), "git_commit": git_commit()}
    notes = "\n".join(f"- {note}" for note in record["notes"])
    parts = (_reached(record), _differences(record), _costs(record), _options(record), notes)
    tables = [part for part in parts if part]
    page = [
        f"# Comparison on {record['task']}",
        headline(record),
        *tables,
        f"![Comparison]({NAME}.png)",
        METHODS,
        _runs(record),
    ]
    figure = _figure(comparison, record)
    with complete_or_absent(directory / f"{NAME}.json") as temporary:
        temporary.write_text(dumps_rows(record), encoding="utf-8")
    with complete_or_absent(directory / f"{NAME}.png") as temporary:
        figure.savefig(temporary, format="png", dpi=120)
    with complete_or_absent(directory / f"{NAME}.md") as temporary:
        temporary.write_text("\n\n".join(page) + "\n", encoding="utf-8")
    return "\n\n".join([headline(record), *tables, f"wrote {directory / NAME}.md, .json and .png"])


def headline(record: Mapping[str, Any]) -> str:
    """Best row on the first distribution, and whether it is significantly better than the second."""
    rows = {row["name"]: row["results"] for row in record["rows"]}
    distribution = next(iter(record["rows"][0]["results"]))
    means = {name: results[distribution]["mean"]["mean"] for name, results in rows.items() if distribution in results}
    first, *others = sorted(means, key=lambda name: -means[name])
    if not others:
        figure = _interval(rows[first][distribution]["mean"], "mean", record["measure"])
        return f"{first} reached {figure} on {distribution}."
    pair = {first, others[0]}
    gap = next(
        each
        for each in record["differences"]
        if {each["row"], each["over"]} == pair and each["distribution"] == distribution
    )
    return f"{first} is {'' if _significant(gap) else 'not significantly '}better than {others[0]} on {distribution}."


def _significant(gap: Mapping[str, Any]) -> bool:
    """Whether the interval of a difference is known and excludes zero."""
    return gap["low"] is not None and (gap["low"] > 0 or gap["high"] < 0)


def _reached(record: Mapping[str, Any]) -> str:
    kinds = {"iqm": "IQM of ", "mean": "mean "} if any(len(row["runs"]) > 1 for row in record["rows"]) else {"mean": ""}
    header = ["distribution", "row", "seeds", *(f"{kind}{record['measure']}" for kind in kinds.values())]
    rows = [
        [
            *(distribution, row["name"], ", ".join(str(run["seed"]) for run in row["runs"])),
            *(_interval(row["results"][distribution][kind], kind, record["measure"]) for kind in kinds),
        ]
        for distribution in dict.fromkeys(name for row in record["rows"] for name in row["results"])
        for row in record["rows"]
        if distribution in row["results"]
    ]
    return table(header, rows)


def _costs(record: Mapping[str, Any]) -> str:
    rows = []
    for row in record["rows"]:
        costs = [f"{row[cost]:,.0f}" if row[cost] is not None else "" for cost in ("env_steps", "wall_s", "cpu_s")]
        commits = dict.fromkeys(short(run["git_commit"]) for run in row["runs"])
        rows.append([row["name"], *costs, ", ".join(commits)])
    return table(*without_empty_columns(["row", "environment steps", "wall s", "CPU s", "commit"], rows))


def _differences(record: Mapping[str, Any]) -> str:
    rows = [
        [
            f"{each['row']} over {each['over']}",
            each["distribution"],
            _interval(each, "difference", record["measure"])
            + (", paired" if each["paired"] else "")
            + ("" if _significant(each) else ", not significant" if each["low"] is not None else ", interval unknown"),
            _interval(each["improvement"], "probability", "success"),
        ]
        for each in record["differences"]
    ]
    header = ["row over row", "distribution", f"difference of mean {record['measure']}", "P"]
    return table(*without_empty_columns(header, rows)) if rows else ""


def _options(record: Mapping[str, Any]) -> str:
    rows = [[name, *map(written, values)] for name, values in record["options"].items()]
    return table(["what differs", *(row["name"] for row in record["rows"])], rows) if rows else ""


def _interval(interval: Mapping[str, Any] | None, kind: str, measure: str) -> str:
    """Format a number with its bounds, if any: rates in percent, their differences in points, returns unchanged."""
    if not interval:
        return ""
    values = [interval[name] for name in (kind, "low", "high") if interval[name] is not None]
    sign = "+" if kind == "difference" else ""
    if measure == "return":
        words = [f"{value:{sign}.4g}" for value in values]
    else:
        words = [f"{100 * value:{sign}.1f}" for value in values]
        words[0] += " points" if sign else "%"
    return words[0] + (f" [{words[1]}, {words[2]}]" if len(words) == 3 else "")


def _runs(record: Mapping[str, Any]) -> str:
    runs = [(row["name"], run) for row in record["rows"] for run in row["runs"]]
    rows = [[name, str(run["seed"]), run["path"], run["git_commit"]] for name, run in runs]
    return "## Runs\n\n" + table(["row", "seed", "report", "commit"], rows)


def _figure(comparison: Comparison, record: Mapping[str, Any]) -> Any:  # noqa: ANN401 - a Figure, slow to import
    from matplotlib.figure import Figure

    names = [fill(row.name, WIDTH) for row in comparison.rows]
    curves = [_curves(row, record["measure"]) for row in comparison.rows]
    panels = 1 + any(curves)
    lines = len(names) * len(comparison.distributions)
    figure = Figure(figsize=(6.4 * panels, max(4.2, 1.6 + 0.22 * lines)), layout="constrained")
    dots, *others = figure.subplots(1, panels, squeeze=False).flat
    _dots(dots, record, comparison.distributions)
    for axis in others:
        _lines(axis, dict(zip(names, curves, strict=True)), record["measure"])
    handles, labels = dots.get_legend_handles_labels()
    figure.legend(handles, [fill(label, 2 * WIDTH) for label in labels], loc="outside lower center", ncols=2)
    return figure


def _dots(axis: Axes, record: Mapping[str, Any], distributions: Sequence[str]) -> None:
    """Plot a dot with its interval for each row on each distribution, from above.

    Dots are interquartile means if all rows have several seeds.
    """
    rows = record["rows"]
    measure = record["measure"]
    kind = "iqm" if all(len(row["runs"]) > 1 for row in rows) else "mean"
    for number, row in enumerate(rows):
        places = [name for name in distributions if name in row["results"]]
        numbers, lows, highs = ([row["results"][name][kind][each] for name in places] for each in (kind, "low", "high"))
        heights = [distributions.index(name) + 0.7 * ((number + 0.5) / len(rows) - 0.5) for name in places]
        ends = [(n, n) if low is None else (low, high) for n, low, high in zip(numbers, lows, highs, strict=True)]
        error = np.abs(np.array(ends).T - numbers)
        axis.errorbar(
            numbers, heights, xerr=error, fmt="o", markersize=4, capsize=2, color=f"C{number}", label=row["name"]
        )
    axis.set_yticks(range(len(distributions)), distributions)
    axis.set(title=f"{'IQM of' if kind == 'iqm' else 'mean'} {measure}, 95%", ylim=(len(distributions) - 0.5, -0.5))
    if measure == "success":
        axis.set_xlim(-0.02, 1.02)
    axis.grid(alpha=0.3, axis="x")


def _curves(row: Row, measure: str) -> list[np.ndarray]:
    """Learning curves of a row's runs, [points, 2] each: environment steps, and success or return in training."""
    metric = "rollout/success" if measure == "success" else "rollout/episode_return"
    logged = (read_metrics(run.directory) for run in row.runs if run.directory)
    points = ([(each["step"], each[metric]) for each in rows if metric in each] for rows in logged)
    return [np.array(each) for each in points if each]


def _lines(axis: Axes, rows: Mapping[str, Sequence[np.ndarray]], measure: str) -> None:
    """Plot a line for each row, in a band over its seeds."""
    for number, (name, runs) in enumerate(rows.items()):
        if runs:
            draw_band(axis, runs, f"C{number}", name)
    axis.set(xlabel="environment steps")
    axis.set_title(f"{measure} in training,\nmean and {BAND}", fontsize="medium")
    if measure == "success":
        axis.set_ylim(-0.02, 1.02)
    axis.grid(alpha=0.3)
