"""Open-loop errors of a run on recorded episodes, in its reports."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from embodied.evaluation.open_loop import OpenLoopResult
from embodied.report.markdown import table
from embodied.saving.files import complete_or_absent
from embodied.saving.json_text import dumps_rows
from embodied.saving.versions import git_commit, versions

log = logging.getLogger(__name__)
CHUNKS = "chunks.png"
HEADER = ["element", "unit", "mean error [95% interval]", "holding the last action", "mean of training"]
NOTHING_EXECUTED = (
    "No episode was executed, so that the success rate is unknown: the errors compare predicted with recorded actions"
    " on the observations of held-out episodes."
)


def headline(summary: Mapping[str, Any]) -> str:
    """Result in a sentence."""
    errors = summary["error_of_range"]
    return (
        f"On {summary['held_out_episodes']} held-out episodes predicted actions are off by {errors['policy']:.1%} of"
        f" their range; holding the last action by {errors['hold']:.1%}."
    )


def remarks(summary: Mapping[str, Any]) -> list[str]:
    """Statement that nothing was executed, and a warning if the policy is not better than the baselines."""
    gain_low = summary["error_of_range"]["gain_low"]
    if gain_low is None:
        return [NOTHING_EXECUTED, "One held-out episode gives no interval: record more."]
    better = ["The policy is not significantly better than the baselines."] if gain_low <= 0 else []
    return [NOTHING_EXECUTED, *better]


def lines(summary: Mapping[str, Any]) -> list[str]:
    """Errors of each element, for the console."""
    return ["  ".join(row) for row in cells(summary)]


def write_evaluation(folder: Path, record: Mapping[str, Any], result: OpenLoopResult) -> str:
    """Log `result`, write it with `record` into `folder`, with the chunks, and return a line with the path."""
    summary = result.summary()
    path = folder / "evaluation.json"
    log.info("\n".join([headline(summary), table(HEADER, cells(summary)), *remarks(summary)]))
    plot_chunks(folder / CHUNKS, result)
    content = {**record, "git_commit": git_commit(), "versions": versions(), "open_loop": summary}
    with complete_or_absent(path) as temporary:
        temporary.write_text(dumps_rows(content), encoding="utf-8")
    return f"wrote {path}"


def section(summary: Mapping[str, Any]) -> str:
    """Section of report.md."""
    picture = f"![Recorded actions, and predicted chunks]({CHUNKS})"
    return f"## Open-loop error\n\n{table(HEADER, cells(summary))}\n\n{caption(summary)}\n\n{picture}"


def caption(summary: Mapping[str, Any]) -> str:
    """Meaning of the errors."""
    return (
        f"Mean absolute errors of whole chunks on {summary['held_out_episodes']} held-out episodes, with intervals over"
        f" episodes, after training on {summary['trained_episodes']} others. Held-out loss:"
        f" {summary['held_out_loss']:.4g}; the learning curves show it over training."
    )


def cells(summary: Mapping[str, Any]) -> list[list[str]]:
    """Cells of the table with `HEADER`: a row for each element of the action."""
    return [[row["name"], row["unit"], *_figures(row)] for row in summary["elements"]]


def _figures(row: Mapping[str, Any]) -> list[str]:
    bounds = "" if row["low"] is None else f" [{row['low']:.3g}, {row['high']:.3g}]"
    return [f"{row['policy']:.3g}{bounds}", f"{row['hold']:.3g}", f"{row['mean']:.3g}"]


def plot_chunks(path: Path, result: OpenLoopResult) -> None:
    """Draw the chunks that `result` shows beside recorded actions: a column an episode, a row an element."""
    from matplotlib.figure import Figure  # slow to import

    rows = len(result.names)
    columns = len(result.shown)
    figure = Figure(figsize=(5.5 * columns, 1.6 * rows + 0.6), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharex="col")
    for column, episode in enumerate(result.shown):
        actions = episode["actions"].numpy()
        chunks = episode["chunks"].numpy()
        time_s = [step * result.control_dt_s for step in range(len(actions) + chunks.shape[1])]
        for row, (name, unit) in enumerate(zip(result.names, result.units, strict=True)):
            axis = axes[row, column]
            axis.plot(time_s[: len(actions)], actions[:, row], color="black", linewidth=1.5, label="recorded")
            for number, first in enumerate(episode["decisions"].tolist()):
                length = min(chunks.shape[1], len(actions) - first)
                label = "predicted chunks" if number == 0 else None
                curve = chunks[number, :length, row]
                axis.plot(time_s[first : first + length], curve, color="tab:orange", linewidth=1.0, label=label)
            axis.set_ylabel(f"{name}\n[{unit}]", fontsize=8)
            axis.grid(alpha=0.3)
        axes[0, column].set_title(f"held-out episode {column + 1}")
        axes[-1, column].set_xlabel("time [s]")
    axes[0, 0].legend(fontsize=8)
    with complete_or_absent(path) as temporary:
        figure.savefig(temporary, format="png", dpi=100)
