"""Reports of a comparison of back ends: sim_to_real.json, sim_to_real.md and sim_to_real.png, or sim_to_sim."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from embodied.contract import TensorSpec
from embodied.environment import ODD_EVENTS
from embodied.report.curves import draw_marks
from embodied.report.markdown import table
from embodied.saving.files import complete_or_absent
from embodied.saving.json_text import dumps_rows
from embodied.saving.versions import git_commit, versions
from real_robot.sim_to_real.results import BackEndRun, compare, discrepancy

log = logging.getLogger(__name__)
SIM_TO_REAL = "sim_to_real"
SIM_TO_SIM = "sim_to_sim"
TITLES = {SIM_TO_REAL: "From simulation to the robot", SIM_TO_SIM: "From one simulator to another"}
HEADER = [
    "back end",
    "success [95% interval]",
    "gap to the first",
    "action discrepancy",
    "latency p50 / p99 / max (ms)",
]


def write(
    directory: Path, runs: Sequence[BackEndRun], spec: TensorSpec, record: Mapping[str, Any], name: str = SIM_TO_REAL
) -> str:
    """Log a comparison of `runs` and write the three files `name` into `directory`; return a line that names them.

    `record` describes the evaluation.
    """
    rows = compare(runs, spec)
    log.info(text := page(rows))
    figure = _figure(runs, rows, spec)
    report = {**record, "git_commit": git_commit(), "versions": versions(), "back_ends": rows}
    with complete_or_absent(directory / f"{name}.json") as temporary:
        temporary.write_text(dumps_rows(report), encoding="utf-8")
    with complete_or_absent(directory / f"{name}.png") as temporary:
        figure.savefig(temporary, format="png", dpi=120)
    notes = (
        "Gaps are paired on the same initial states. Action discrepancy: root mean square difference of the commands "
        "from those of the first back end in the same episode (of a recording: from the recorded ones), in half "
        "ranges. Latency from measurement to command: median / 99% / maximum."
    )
    with complete_or_absent(directory / f"{name}.md") as temporary:
        temporary.write_text(f"# {TITLES[name]}\n\n{text}\n\n{notes}\n\n![Back ends]({name}.png)\n", encoding="utf-8")
    return f"wrote {directory / name}.md, .json and .png"


def page(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format the rows of `sim_to_real.compare` as a Markdown table."""
    metrics = list(dict.fromkeys(name for row in rows if row["summary"] for name in _metrics(row["summary"])))
    header = [*HEADER[:3], *metrics, *HEADER[3:], "episodes"]
    return table(header, [_cells(row, metrics) for row in rows])


def _cells(row: Mapping[str, Any], metrics: Sequence[str]) -> list[str]:
    summary, gap, difference, latency = (row[key] for key in ("summary", "gap", "action_discrepancy", "latency_s"))
    success = f"{summary['success']:.1%} [{summary['low']:.1%}, {summary['high']:.1%}]" if summary else ""
    points = gap and [100 * gap["success"][key] for key in ("difference", "low", "high")]
    values = [f"{value:.4g}" if summary and (value := summary.get(name)) is not None else "" for name in metrics]
    return [
        row["back_end"],
        success,
        f"{points[0]:+.1f} [{points[1]:+.1f}, {points[2]:+.1f}]" if points else "",
        *values,
        f"{difference['mean']:.2g} (at most {difference['max']:.2g})" if difference else "",
        " / ".join(f"{1e3 * latency[key]:.2f}" for key in ("p50", "p99", "max")) if latency else "",
        str(summary["episodes"]) if summary else "",
    ]


def _metrics(summary: Mapping[str, Any]) -> list[str]:
    others = ("success", "low", "high", "episodes", "step_limit", *ODD_EVENTS, "per_task")
    return [name for name in summary if name not in others]


def _figure(runs: Sequence[BackEndRun], rows: Sequence[Mapping[str, Any]], spec: TensorSpec) -> Any:  # noqa: ANN401
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(13.0, 3.4), layout="constrained")
    success, actions, latency = figure.subplots(1, 3)
    summaries = {row["back_end"]: row["summary"] for row in rows if row["summary"]}
    draw_marks(success, {name: (each["success"], each["low"], each["high"]) for name, each in summaries.items()})
    for run in runs:
        reference_actions = run.expected or (runs[0].actions if run is not runs[0] else {})
        if len(differences := discrepancy(run.actions, reference_actions, spec)):
            actions.plot(
                differences.sort().values, [(i + 1) / len(differences) for i in range(len(differences))], label=run.name
            )
        if run.latency_s is not None:
            latency.hist(1e3 * run.latency_s.numpy(), bins=60, histtype="step", density=True, label=run.name)
    actions.set(title="action discrepancy, share of episodes below", xlabel="half ranges", ylim=(0, 1))
    latency.set(title="latency from measurement to command", xlabel="ms")
    for axis in (actions, latency):
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend()
        else:
            axis.text(0.5, 0.5, "no back end measured it", ha="center", transform=axis.transAxes)
    return figure
