"""What rollouts of older policies cost PPO: `python benchmarks/asynchronous_ppo.py [--task TASK] [--output FILE]`.

Two collectors in threads, one thread of computation each, and a learner that takes rollouts up to `staleness` updates
old: by the plain objective (naive), whose ratios are to the policy that collected, or the decoupled one
(`algorithm.importance_limit=2`). All rows have as many environment steps; libero_pick's begin with one supervised
policy per seed. Success is that of held-out episodes at the end, with Wilson's 95% interval; `means` of seeds are with
intervals for other seeds and starts, and differences, paired by seed, with Student's over seeds. Seconds are those of
reinforcement learning. The curves in the file are success in training against seconds, of every tenth iteration.
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
"""Options by staleness and objective."""
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
"""Options of each."""
MEANS = ("placement/staleness", "rl/importance_truncated", "rl/clip_fraction")
"""Metrics that are averaged over the run."""


def measured(task: str, row: str, seed: int, folder: Path) -> dict[str, Any]:
    """One run: success at the end, seconds, staleness, and its curve."""
    run = folder / f"{task}_{row.replace(', ', '_')}_{seed}"
    options = [f"task={task}", "algorithm=ppo", *TASKS[task], f"seed={seed}", "threads=1", "video=false"]
    if task == "libero_pick":
        start = folder / f"{task}_start_{seed}"
        if not (start / "report.json").exists():
            trained([*options, "stages=[sft]"], start)
        options += ["stages=[rl]", f"start_from={start}"]
    # what is not read here on one start
    apart = ["control=false", "comparison_starts=1", "evaluate_every_steps=null", "placement.collectors=2"]
    trained([*options, *apart, *ROWS[row]], run)
    report = json.loads((run / "report.json").read_text())
    own = ("rl", report["distributions"][0])  # the training's
    found = next(each for each in report["evaluations"] if (each["stage"], each["distribution"]) == own)
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    metrics = [each for each in metrics if "rollout/success" in each]
    spent, began = report["wall_s"], metrics[0]["time"]
    told = {
        name.partition("/")[2]: sum(each[name] for each in metrics if name in each) / len(metrics)
        for name in MEANS
        if any(name in each for each in metrics)
    }
    return {
        "task": task,
        "row": row,
        "seed": seed,
        "distribution": found["distribution"],
        **{key: found[key] for key in ("success", "low", "high", "episodes")},
        **told,
        "seconds": round(sum(spent[phase] for phase in ("simulation", "policy", "update")), 1),
        "env_steps": report["env_steps"],
        "dropped_rollouts": report["dropped_rollouts"],
        "curve": [[each["step"], round(each["time"] - began, 1), each["rollout/success"]] for each in metrics[::10]],
    }


def trained(options: Sequence[str], run: Path) -> None:
    """`train.py` with its output in `run`, from the beginning."""
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
    """A table of the rows."""
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
    """Measure the rows that the file lacks, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=list(TASKS), default="vehicle_navigate")
    parser.add_argument("--rows", type=lambda text: text.split(";"), default=list(ROWS), help="names, by ;")
    parser.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs" / "asynchronous_ppo", help="of the runs")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "asynchronous_ppo.json")
    options = parser.parse_args()
    about = json.loads(options.output.read_text()) if options.output.exists() else {"rows": []}
    known, commit = {(row["task"], row["row"], row["seed"]) for row in about["rows"]}, git_commit()
    for seed in options.seeds:
        for row in options.rows:
            if (options.task, row, seed) in known:
                continue
            about["rows"].append(measured(options.task, row, seed, options.folder) | {"git_commit": commit})
            about |= {"means": means(about["rows"]), "versions": versions(), "cores": os.cpu_count()}
            with complete_or_absent(options.output) as temporary:
                temporary.write_text(dumps_rows(about))
    sys.stdout.write(shown(about["rows"]) + "\n")


if __name__ == "__main__":
    main()
