"""One metric of several runs in a figure, with bands over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from textwrap import fill

import numpy as np

from embodied.errors import UserError
from embodied.report.comparison import grouped
from embodied.report.curves import BAND, draw_band
from embodied.report.finished_run import REPORT, RunOptions, read_options
from embodied.saving.files import complete_or_absent
from embodied.saving.metrics import METRICS, read_metrics

FORMATS = ".png", ".svg", ".pdf"
GRADIENT_STEPS = "sft/", "sft_control/", "offline/"
"""Beginnings of metrics that are logged by gradient step, not by environment step."""
LEGEND = 60
"""Largest number of letters of a line in the legend."""


class Axis(Enum):
    """Horizontal axis of a plot."""

    ENV_STEPS = "env_steps"
    WALL_S = "wall_s"
    CPU_S = "cpu_s"

    @property
    def label(self) -> str:
        """Label of the axis."""
        kind = {"wall_s": "wall time", "cpu_s": "CPU time"}.get(self.value)
        return f"{kind} of reinforcement learning, s" if kind else "environment steps"


@dataclass(frozen=True, eq=False)
class LoggedRun(RunOptions):
    """Run, finished or not, with the `rows` of its metrics.jsonl."""

    rows: Sequence[dict[str, float]]

    def metrics(self) -> dict[str, list[float]]:
        """Values of each metric, oldest first."""
        values: dict[str, list[float]] = {}
        for row in self.rows:
            for name in row.keys() - {"step", "time"}:
                values.setdefault(name, []).append(row[name])
        return values

    def curve(self, metric: str, x: Axis) -> np.ndarray:
        """Points [points, 2] of `metric` over `x`.

        Raises:
            UserError: if the run did not log the time at its steps.
        """
        points = np.array([(row["step"], row[metric]) for row in self.rows if metric in row]).reshape(-1, 2)
        if x is not Axis.ENV_STEPS and len(points):
            clock = [(row["step"], row[f"time/{x.value}"]) for row in self.rows if f"time/{x.value}" in row]
            if not clock:
                raise UserError(f"{self.path.parent} has no {x.value} in its {METRICS}; use x=env_steps")
            steps, times = np.array(clock).T
            points[:, 0] = np.interp(points[:, 0], steps, times)
        return points


def read(path: str | Path) -> LoggedRun:
    """Read the run in the folder `path`.

    Raises:
        UserError: if it has no metrics.
    """
    if not (rows := read_metrics(path)):
        raise UserError(
            f"no metrics of a run in {path}; expected a folder with {METRICS}, such as outputs/<task>/<run>"
        )
    return LoggedRun(Path(path) / REPORT, read_options(Path(path)), rows)


def metrics(runs: Sequence[LoggedRun]) -> dict[str, list[float]]:
    """Values of each metric in the first of `runs` that has it, sorted by name.

    Raises:
        UserError: without runs.
    """
    if not runs:
        raise UserError("expected runs to plot, such as outputs/<task>/<run>, got none")
    values: dict[str, list[float]] = {}
    for run in runs:
        values = run.metrics() | values
    return dict(sorted(values.items()))


def draw(output: Path, runs: Sequence[LoggedRun], metric: str, x: Axis) -> str:
    """Draw `metric`, which some of `runs` have, over `x` into the file `output`; returns a line with its path.

    Raises:
        UserError: for a metric by gradient step over time, or an unknown format.
    """
    from matplotlib.figure import Figure  # slow to import

    if output.suffix not in FORMATS:
        raise UserError(f"expected an output of {', '.join(FORMATS)}, got {output}")
    by_gradient = metric.startswith(GRADIENT_STEPS)
    if by_gradient and x is not Axis.ENV_STEPS:
        raise UserError(f"{metric} is logged by gradient step, without times; leave out x={x.value}")
    figure = Figure(figsize=(7.0, 4.4), layout="constrained")
    axis = figure.subplots()
    names, _, groups = grouped(runs)
    for number, (name, group) in enumerate(zip(names, groups, strict=True)):
        curves = [curve for curve in (run.curve(metric, x) for run in group) if len(curve)]
        if curves:
            draw_band(axis, curves, f"C{number}", fill(name, LEGEND))
    axis.set(xlabel="gradient steps" if by_gradient else x.label, ylabel=metric)
    axis.set_title(f"mean and {BAND}" if len(runs) > len(groups) else "", fontsize="small")
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")
    output.parent.mkdir(parents=True, exist_ok=True)
    with complete_or_absent(output) as temporary:
        figure.savefig(temporary, format=output.suffix[1:], dpi=150)
    without = [str(run.path.parent) for run in runs if metric not in run.metrics()]
    return f"wrote {output}" + (f"; without {metric}: {', '.join(without)}" if without else "")
