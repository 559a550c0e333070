"""Learning curves of a run in one figure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from embodied.evaluation.means import student
from embodied.saving.files import complete_or_absent
from embodied.saving.metrics import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = 3
BAND_POINTS = 200
"""Number of points of a band over seeds."""
BAND = "95% interval over seeds (of two: their range)"
CURVES = {
    "evaluation/success": "environment steps",
    "evaluation/return": "environment steps",
    "rollout/success": "environment steps",
    "rl/first_attempts_success": "environment steps",
    "rollout/episode_return": "environment steps",
    "rollout/episode_steps": "environment steps",
    "rl/loss": "environment steps",
    "rl/advantage_loss": "environment steps",
    "rl/teacher_objective": "environment steps",
    "rl/kl": "environment steps",
    "rl/clip_fraction": "environment steps",
    "rl/explained_variance": "environment steps",
    "sft/loss": "gradient steps",
    "sft/held_out_loss": "gradient steps",
    "sft_control/loss": "gradient steps",
    "offline/loss": "gradient steps",
    "offline/held_out_loss": "gradient steps",
    "offline/actor_loss": "gradient steps",
    "offline/value_loss": "gradient steps",
}
"""Metrics to plot, if logged, and the label of their horizontal axis."""


def plot_curves(
    directory: Path,
    curves: Mapping[str, str],
    marks: Mapping[str, tuple[float, float, float]],
    measure: str = "success",
    along: Mapping[str, tuple[float, float, float, float]] | None = None,
) -> None:
    """Draw metrics of the run in `directory` into its curves.png, one panel each.

    `curves` maps names of metrics to the label of their horizontal axis. `marks` are evaluations by label: success rate
    (or mean return, see `measure`) and its interval, drawn in a panel of their own. `along` are marks to be drawn with
    the evaluations during training, too: environment steps, rate and interval.
    """
    from matplotlib.figure import Figure  # slow to import

    rows = read_metrics(directory)
    series = {name: [(row["step"], row[name]) for row in rows if name in row] for name in curves}
    series = {name: points for name, points in series.items() if points}
    panels = len(series) + bool(marks)
    if not panels:
        return
    lines = math.ceil(panels / COLUMNS)
    figure = Figure(figsize=(4.2 * min(panels, COLUMNS), 3.0 * lines), layout="constrained")
    axes = list(figure.subplots(lines, min(panels, COLUMNS), squeeze=False).flat)
    if marks:
        draw_marks(axes.pop(0), marks, measure)
    for axis, (name, points) in zip(axes, series.items(), strict=False):
        axis.plot(*zip(*points, strict=True), color="tab:blue", linewidth=1.2)
        axis.set(title=name, xlabel=curves[name])
        if name == f"evaluation/{measure}":
            _draw_intervals(axis, [row for row in rows if name in row], along or {})
        if "success" in name:
            axis.set_ylim(0, 1)
        axis.grid(alpha=0.3)
    for axis in axes[len(series) :]:
        axis.set_visible(False)
    with complete_or_absent(directory / "curves.png") as temporary:
        figure.savefig(temporary, format="png", dpi=120)


def _draw_intervals(
    axis: Axes, rows: Sequence[Mapping[str, float]], along: Mapping[str, tuple[float, float, float, float]]
) -> None:
    """Draw the intervals of evaluations during training, and the evaluations `along` their curve."""
    bounded = [row for row in rows if "evaluation/low" in row]
    bounds = [[row[f"evaluation/{end}"] for row in bounded] for end in ("low", "high")]
    axis.fill_between([row["step"] for row in bounded], bounds[0], bounds[1], color="tab:blue", alpha=0.2, linewidth=0)
    for label, (steps, value, low, high) in along.items():
        axis.errorbar(steps, value, yerr=[[max(0.0, value - low)], [max(0.0, high - value)]], fmt="ko", capsize=3)
        offset, side = (6, "left") if steps == 0 else (-6, "right")
        axis.annotate(label, (steps, value), textcoords="offset points", xytext=(offset, -12), ha=side)


def draw_marks(axis: Axes, marks: Mapping[str, tuple[float, float, float]], measure: str = "success") -> None:
    """Draw success rates, or mean returns (see `measure`), with their intervals (rate, low, high), by label."""
    labels = list(reversed(list(marks)))
    for height, label in enumerate(labels):
        rate, low, high = marks[label]
        axis.errorbar(rate, height, xerr=[[max(0.0, rate - low)], [max(0.0, high - rate)]], fmt="o", capsize=3)
    axis.set_yticks(range(len(marks)), labels)
    axis.set(title=f"evaluation {measure}, 95% intervals", ylim=(-0.6, len(marks) - 0.4))
    if measure == "success":
        axis.set_xlim(0, 1)
    axis.grid(alpha=0.3, axis="x")


def draw_band(axis: Axes, curves: Sequence[np.ndarray], color: str, name: str) -> None:
    """Draw the mean of `curves` [points, 2] over seeds, where all have values, in a `BAND`.

    It is Student's interval of the mean, which would be far too wide for two seeds.
    """
    if len(curves) == 1:
        axis.plot(*curves[0].T, linewidth=1.2, color=color, label=f"{name} (1 seed)")
        return
    x = np.linspace(max(curve[0, 0] for curve in curves), min(curve[-1, 0] for curve in curves), BAND_POINTS)
    values = np.stack([np.interp(x, *curve.T) for curve in curves])
    mean = values.mean(0)
    count = len(curves)
    # mean +- t_{n-1} s / sqrt(n)
    spread = student(count - 1) * values.std(0, ddof=1) / math.sqrt(count)
    low, high = (values.min(0), values.max(0)) if count == 2 else (mean - spread, mean + spread)
    axis.plot(x, mean, linewidth=1.2, color=color, label=f"{name} ({count} seeds)")
    axis.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)
