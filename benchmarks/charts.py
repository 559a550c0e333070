"""Charts of the documents, drawn from the files in benchmarks/results.

    python -m benchmarks.charts    # writes docs/images/chart_*.svg

A test draws them again: a chart that is older than its figures fails. Ink and paper of a chart follow the reader's
colour scheme, light or dark.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
RESULTS, IMAGES = ROOT / "benchmarks" / "results", ROOT / "docs" / "images"
INK, PAPER, FAINT = "#24292f", "#ffffff", "#b9bec5"
DARK = {INK: "#e3e6ea", PAPER: "#1e2129", FAINT: "#565c66"}
"""Colours in the dark scheme, by those in the light one."""
STAGES = {"sft": ("imitation (SFT)", "#9a7b2f"), "sft_control": ("control", "#4c86c6"), "rl": ("after RL", "#d2552b")}
LIBERO = {
    "pick, wide": ("libero_pick_seed2{}", "wide"),
    "pick, official": ("libero_pick_seed2{}", "official"),
    "pick (2 demos), wide": ("libero_pick_two_seed{}", "wide"),
    "pick (2 demos), official": ("libero_pick_two_seed{}", "official"),
    "pictures, near": ("libero_pictures_ppo_lambda_seed{}", "areas"),
    "pictures, official": ("libero_pictures_ppo_lambda_seed{}", "official"),
    "goal, wide": ("libero_goal_seed{}", "wide"),
    "goal, official": ("libero_goal_seed{}", "official"),
    "spatial, wide": ("libero_spatial_seed{}", "wide"),
    "spatial, official": ("libero_spatial_seed{}", "official"),
}
"""Pattern of the files and distribution of initial states, by name."""
COMPARED = {"libero_pictures_ppo_lambda_seed2": "libero_pictures_ppo_seed2"}
"""Files with the SFT and the control of runs that began at the SFT of another run."""
HOVER = {
    "disturbed": "disturbed, as in Learning to Fly",
    "late_10_ms": "commands 10 ms late",
    "late_20_ms": "commands 20 ms late",
    "late_30_ms_in_all": "30 ms late in all",
    "mass_120_percent": "mass +20%",
    "thrust_85_percent": "thrust -15%",
    "mass_120_thrust_85_percent": "mass +20%, thrust -15%",
    "robust": "all varied, as in training",
    "crazyflie_21": "Crazyflie 2.1, thrown",
    "crazyflie_21_take_off": "Crazyflie 2.1, take-off",
}
"""Titles of the conditions, by name in quadrotor_hover.json."""


def result(name: str) -> dict[str, Any]:
    """Read a file of benchmarks/results."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def libero() -> Figure:
    """Success of SFT, control and RL for each LIBERO task, kind of initial states and seed."""
    rows = [
        (f"{title}, seed {path.stem.rpartition('seed')[2]}", evaluations_of(path.stem), distribution)
        for title, (pattern, distribution) in LIBERO.items()
        for path in sorted(RESULTS.glob(pattern.format("[0-9]") + ".json"))
    ]
    figure, axes = rows_of([title for title, _, _ in rows])
    for offset, (stage, (label, color)) in zip((-0.24, 0.0, 0.24), STAGES.items(), strict=True):
        rates = {
            y + offset: row
            for y, (_, evaluations, distribution) in enumerate(rows)
            for row in evaluations
            if (row["stage"], row["distribution"]) == (stage, distribution)
        }
        intervals(axes, rates, color, label)
    axes.set(xlabel="success, % of held-out episodes, with 95% intervals", xlim=(30, 102))
    figure.legend(loc="outside upper right", ncols=3, frameon=False)
    return figure


def evaluations_of(name: str) -> list[dict[str, Any]]:
    """Read the evaluations of a run, of its SFT and of its control."""
    evaluations = result(name)["evaluations"]
    if name in COMPARED:
        evaluations += [row for row in result(COMPARED[name])["evaluations"] if row["stage"] != "rl"]
    return evaluations


def hover() -> Figure:
    """Survival of the hover policy by condition."""
    rates = {row["evaluation"]: row["survive"] for row in result("quadrotor_hover")["rows"]}
    figure, axes = rows_of(list(HOVER.values()))
    rows = {float(y): {"success": rates[name]["mean"], **rates[name]} for y, name in enumerate(HOVER)}
    intervals(axes, rows, STAGES["rl"][1])
    axes.set(xlabel="episodes survived, %, five seeds, with 95% intervals", xlim=(78, 100.5))
    return figure


def speed() -> Figure:
    """Speed divided by that of the peer: median, lowest and highest of the measured ratios."""
    throughput = result("libero_throughput")["rows"]
    ppo, simulators, datasets = (result(name)["rows"] for name in ("ppo_speed", "simulators", "dataset_speed"))
    delays = {row["partner"]: 1 / row["p99_over_echo"] for row in result("ros2_latency")["rows"]}
    ratios = {
        "LIBERO from state / stock LIBERO": [row["none"]["ratio_cpu"] for row in throughput],
        "LIBERO, pictures / stock LIBERO": [row["every step"]["ratio_cpu"] for row in throughput],
        "LeRobot datasets, video / LeRobot's reader": [
            row["ours/lerobot"] for row in datasets if row["pictures"] == "video"
        ],
        "PPO / rsl_rl": ppo["rsl_rl"]["ratios"],
        "PPO / Stable-Baselines3": ppo["sb3"]["ratios"],
        "robosuite Lift, 4 worlds / robosuite": slowdowns(simulators["robosuite_4"]),
        "PickCube, 8 worlds / ManiSkill": slowdowns(simulators["maniskill_8"]),
        "Humanoid, 16 worlds / Gymnasium": slowdowns(simulators["gym_humanoid_16"]),
        "Pendulum, 1 world / Gymnasium": slowdowns(simulators["gym_pendulum_1"]),
        "ROS 2 policy, p99 / bare rclpy": [delays["policy"]],
        "with safety, p99 / bare rclpy": [delays["policy, safety"]],
    }
    figure, axes = rows_of(list(ratios))
    for y, values in enumerate(ratios.values()):
        middle = statistics.median(values)
        color = STAGES["rl" if middle >= 1.0 else "sft_control"][1]
        axes.plot([min(values), max(values)], [y, y], color=color, linewidth=2.0)
        axes.plot(middle, y, "o", color=color, markersize=5)
        axes.annotate(f"{middle:.2g}", (max(values), y), (6, 0), textcoords="offset points", va="center")
    axes.axvline(1.0, color=INK, linewidth=1.0)
    ticks = (0.25, 0.5, 1, 2, 4, 8, 16, 32)
    axes.set(xscale="log", xlim=(0.2, 50), xlabel="times the peer's speed (1: as fast)")
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    return figure


def slowdowns(row: dict[str, Any]) -> list[float]:
    """Ratios of speed from the overheads of an adapter: steps take 1 + overhead times as long."""
    return [1 / (1 + row["overhead"][name]) for name in ("low", "median", "high")]


def rows_of(titles: Sequence[str]) -> tuple[Figure, Axes]:
    """Make an empty chart with one row for each title, the first on top."""
    figure = Figure(figsize=(6.4, 0.9 + 0.27 * len(titles)), layout="constrained", facecolor=PAPER)
    axes = figure.subplots()
    axes.set_yticks(range(len(titles)), titles)
    axes.set(ylim=(len(titles) - 0.4, -0.6), facecolor=PAPER)
    axes.grid(axis="x", color=FAINT, linewidth=0.5)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return figure, axes


def intervals(axes: Axes, rates: Mapping[float, Mapping[str, float]], color: str, label: str | None = None) -> None:
    """Draw success rates with their intervals, in percent, by height in the chart."""
    low, success, high = ([100 * rate[name] for rate in rates.values()] for name in ("low", "success", "high"))
    axes.hlines(list(rates), low, high, color, linewidth=2.0)
    axes.plot(success, list(rates), "o", color=color, markersize=4.5, label=label)


CHARTS: dict[str, Callable[[], Figure]] = {"libero": libero, "hover": hover, "speed": speed}


def svg(draw: Callable[[], Figure]) -> str:
    """Draw a chart as SVG: the same text for the same figures, with colours that follow the reader's scheme."""
    style = {
        "svg.hashsalt": "embodied",
        "svg.fonttype": "none",
        "font.size": 9.5,
        "text.color": INK,
        "axes.labelcolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
    }
    with mpl.rc_context(style):
        stream = StringIO()
        draw().savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    text = stream.getvalue()
    names = {color: f"--color-{index}" for index, color in enumerate(DARK)}
    for color, name in names.items():
        text = text.replace(color, f"var({name})")
    light = "".join(f"{name}:{color};" for color, name in names.items())
    dark = "".join(f"{name}:{DARK[color]};" for color, name in names.items())
    rule = f"<style>svg{{{light}}}@media(prefers-color-scheme:dark){{svg{{{dark}}}}}</style>"
    head, defs, rest = text.partition(" <defs>\n")
    return f"{head} {rule}\n{defs}{rest}"


def main() -> int:
    """Write all charts."""
    for name, draw in CHARTS.items():
        (IMAGES / f"chart_{name}.svg").write_text(svg(draw))
    return 0


if __name__ == "__main__":
    sys.exit(main())
