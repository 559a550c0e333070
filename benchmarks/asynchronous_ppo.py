"""Cost of stale rollouts for PPO: `python benchmarks/asynchronous_ppo.py [--task TASK] [--output FILE]`.

Two collectors in threads, with one thread of computation each, and a learner that takes rollouts up to `staleness`
updates old. The plain objective (naive) has ratios to the policy that collected; the decoupled one is
`algorithm.importance_limit=2`. All rows have the same number of environment steps; libero_pick's begin with one
supervised policy per seed. Success is measured on held-out episodes at the end, with Wilson's 95% interval. `means`
over seeds have intervals for other seeds and starts; differences, paired by seed, have Student's interval over seeds.
Seconds include reinforcement learning only. The curves in the file are success in training against seconds, of every
tenth iteration.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also runs from a clone that is not installed

import torch  # noqa: E402

from embodied.evaluation.evaluation import rate_over_seeds  # noqa: E402
from embodied.evaluation.means import mean_interval  # noqa: E402
from embodied.report.markdown import table  # noqa: E402
from embodied.saving.files import complete_or_absent  # noqa: E402
from embodied.saving.json_text import dumps_rows  # noqa: E402
from embodied.saving.versions import git_commit, versions  # noqa: E402

DECOUPLED = "algorithm.importance_limit=2"
ROWS = {
    "0": ("placement.max_staleness=0",),
    "1, naive": ("placement.max_staleness=1",),
    "1, decoupled": ("placement.max_staleness=1", DECOUPLED),
    "4, naive": ("placement.max_staleness=4",),
    "4, decoupled": ("placement.max_staleness=4", DECOUPLED),
}
"""Options of train.py by staleness and objective."""
TASKS = {
    "vehicle_navigate": (
        "env_steps=2500000",
        "task.map=false",
        "task.guard=false",
        "policy.reciprocal=[lidar]",
        "task.vehicle.speed_min_m_s=0",
        "task.numbers.reward_collision=-8",
    ),
    "libero_pick": (
        "env_steps=300000",
        "task.tasks=[0,1,2,3,4]",
        "task.assets=stand-in",
        "task.episodes=2",
        "task.areas_share=0",
        "evaluation_starts=50",
        "sft.steps=4000",
    ),
}
"""Options of train.py by task."""
MEANS = ("placement/staleness", "rl/importance_truncated", "rl/clip_fraction")
"""Metrics that are averaged over the run."""


def measured(task: str, row: str, seed: int, folder: Path) -> dict[str, Any]:
    """Run one training; returns its final success, seconds, staleness and curve."""
    run = folder / f"{task}_{row.replace(', ', '_')}_{seed}"
    options = [f"task={task}", "algorithm=ppo", *TASKS[task], f"seed={seed}", "threads=1", "video=false"]
    if task == "libero_pick":
        start = folder / f"{task}_start_{seed}"
        if not (start / "report.json").exists():
            trained([*options, "stages=[sft]"], start)
        options += ["stages=[rl]", f"start_from={start}"]
    # one start on other distributions, whose figures are not used here
    quick_options = ["control=false", "comparison_starts=1", "evaluate_every_steps=null", "placement.collectors=2"]
    trained([*options, *quick_options, *ROWS[row]], run)
    report = json.loads((run / "report.json").read_text())
    training_key = ("rl", report["distributions"][0])  # the training's
    evaluation = next(each for each in report["evaluations"] if (each["stage"], each["distribution"]) == training_key)
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    metrics = [each for each in metrics if "rollout/success" in each]  # iterations of reinforcement learning
    wall_s, start_s = report["wall_s"], metrics[0]["time"]
    averages = {
        name.partition("/")[2]: sum(each[name] for each in metrics if name in each) / len(metrics)
        for name in MEANS
        if any(name in each for each in metrics)
    }
    return {
        "task": task,
        "row": row,
        "seed": seed,
        "distribution": evaluation["distribution"],
        **{key: evaluation[key] for key in ("success", "low", "high", "episodes")},
        **averages,
        "seconds": round(sum(wall_s[phase] for phase in ("simulation", "policy", "update")), 1),
        "env_steps": report["env_steps"],
        "dropped_rollouts": report["dropped_rollouts"],
        "curve": [[each["step"], round(each["time"] - start_s, 1), each["rollout/success"]] for each in metrics[::10]],
    }


def trained(options: Sequence[str], run: Path) -> None:
    """Run `train.py` from the beginning with its output in `run`."""
    shutil.rmtree(run, ignore_errors=True)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "train.py", *options, f"output={run}"], cwd=ROOT, env=environment, check=True)


def means(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean success over seeds of each task and row, and its paired differences from the task's other rows."""
    by_row: dict[tuple[str, str], dict[int, float]] = {}
    episodes: dict[str, int] = {}
    for row in rows:
        by_row.setdefault((row["task"], row["row"]), {})[row["seed"]] = row["success"]
        episodes[row["task"]] = row["episodes"]
    entries = []
    for (task, name), rates in by_row.items():
        over = {
            other: differences(rates, before)
            for (task_of_other, other), before in by_row.items()
            if task_of_other == task and other != name and before.keys() == rates.keys()
        }
        interval = rate_over_seeds([rates[seed] for seed in sorted(rates)], episodes[task])
        measures = dict(zip(("mean", "low", "high"), interval, strict=True))
        entries.append({"task": task, "row": name, "seeds": sorted(rates), **measures, "over": over})
    return entries


def differences(after: dict[int, float], before: dict[int, float]) -> dict[str, float]:
    """Mean difference of rates by seed, with Student's interval over seeds."""
    interval = mean_interval(torch.tensor([after[seed] - before[seed] for seed in sorted(after)], dtype=torch.float64))
    return dict(zip(("difference", "low", "high"), interval, strict=True))


def shown(rows: Sequence[dict[str, Any]]) -> str:
    """Format the rows as a table."""
    lines = [
        [
            row["task"],
            row["row"],
            str(row["seed"]),
            f"{100 * row['success']:.1f}% [{100 * row['low']:.1f}, {100 * row['high']:.1f}]",
            f"{row['seconds']:.0f}",
            f"{row['staleness']:.2f}",
            f"{row.get('importance_truncated', 0.0):.4f}",
        ]
        for row in rows
    ]
    return table(["task", "staleness", "seed", "success", "s", "mean staleness", "truncated"], lines)


def main() -> None:
    """Measure the rows that are missing in the file, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=list(TASKS), default="vehicle_navigate")
    parser.add_argument("--rows", type=lambda text: text.split(";"), default=list(ROWS), help="names, by ;")
    parser.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs" / "asynchronous_ppo", help="of the runs")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "asynchronous_ppo.json")
    options = parser.parse_args()
    report = json.loads(options.output.read_text()) if options.output.exists() else {"rows": []}
    measured_rows, commit = {(row["task"], row["row"], row["seed"]) for row in report["rows"]}, git_commit()
    for seed in options.seeds:
        for row in options.rows:
            if (options.task, row, seed) in measured_rows:
                continue
            report["rows"].append(measured(options.task, row, seed, options.folder) | {"git_commit": commit})
            report |= {"means": means(report["rows"]), "versions": versions(), "cores": os.cpu_count()}
            with complete_or_absent(options.output) as temporary:
                temporary.write_text(dumps_rows(report))
    sys.stdout.write(shown(report["rows"]) + "\n")


if __name__ == "__main__":
    main()
