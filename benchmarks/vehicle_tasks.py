"""Vehicle policies and planners on the same unseen worlds: python benchmarks/vehicle_tasks.py RESULT RUN [RUN ...].

RESULT is navigate or race, each RUN a finished run of train.py, one per seed. Policies and planners drive worlds of the
evaluation split that were used neither in training nor in its report, as in `evaluate.py checkpoint=RUN baselines=true
first_start=200 episodes=500` for one run; the planners run only once. Where the task has a guard, all drive behind it
and without it. Prints a table and writes benchmarks/results/vehicle_RESULT.json.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from embodied.command_line.config import compose
from embodied.evaluation.evaluation import EvaluationResult, compare
from embodied.policy import Policy
from embodied.report.report import evaluation_table
from embodied.saving import checkpoint
from embodied.saving.files import complete_or_absent
from embodied.saving.json_text import dumps_rows
from embodied.saving.versions import git_commit, versions
from embodied.task import Task, baseline_policies
from sims.vehicle.task import NavigateTask
from train import GROUPS, TrainConfig

FIRST, EPISODES, NUM_ENVS = 200, 500, 96
"""Worlds 0 to 199 are in the reports of runs and may have influenced settings."""
ALONE = ", without a guard"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all policies and planners, print the table, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", choices=("navigate", "race"))
    parser.add_argument("runs", nargs="+", type=Path)
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    loaded = [load(run) for run in args.runs]
    task = loaded[0][0]
    policies = {f"policy, seed {trained['seed']}": policy for _, policy, trained in loaded}
    named = baseline_policies(task)
    if {task.name for task, _, _ in loaded} != {f"vehicle_{args.result}"} or len(policies) < len(loaded):
        raise SystemExit(f"error: expected runs of vehicle_{args.result}, each with a different seed")
    results = measured(task, policies | named)
    if isinstance(task, NavigateTask):
        unguarded = measured(replace(task, guard=False), policies | named)
        results |= {(who + ALONE, on): result for (who, on), result in unguarded.items()}
    report = {
        "command": f"python benchmarks/vehicle_tasks.py {args.result} RUN ...",
        "git_commit": git_commit(),
        "versions": versions(),
        "first_start": FIRST,
        "episodes": EPISODES,
        "training": [trained for _, _, trained in loaded],
        "evaluations": [row for name in task.distributions for row in rows(name, results, set(named))],
    }
    for name in task.distributions:
        found = {who: result for (who, on), result in results.items() if on == name}
        sys.stdout.write(f"{name}\n{evaluation_table(found)}\n")
    with complete_or_absent(Path(__file__).parent / "results" / f"vehicle_{args.result}.json") as temporary:
        temporary.write_text(dumps_rows(report))


def measured(task: Task, policies: dict[str, Policy]) -> dict[tuple[str, str], EvaluationResult]:
    """Evaluate `policies`; returns results by name and distribution."""
    return compare(
        lambda name: task.environment(NUM_ENVS, name, "eval"),
        task.distributions,
        policies,
        starts_per_task=EPISODES,
        first_start=FIRST,
    )


def load(run: Path) -> tuple[Task, Policy, dict[str, Any]]:
    """Load the task of `run`, its final policy, and its training record."""
    saved = checkpoint.load(run)
    trained = compose(TrainConfig, "train", [], GROUPS, saved.config)[0]
    policy = trained.policy.build(saved.contract)
    saved.restore(policy)
    counters = {name: saved.counters[name] for name in ("env_steps", "cpu_s")}
    return trained.task, policy, {"seed": trained.seed, **counters, "weights_sha256": saved.weights_sha256}


def rows(
    distribution: str, results: dict[tuple[str, str], EvaluationResult], baselines: set[str]
) -> list[dict[str, Any]]:
    """One row per policy and planner; policies' rows include the paired differences from each planner."""
    table, found = [], {who: result for (who, on), result in results.items() if on == distribution}
    for who, result in found.items():
        row = {key: value for key, value in result.summary().items() if key != "per_task"}
        table.append({"who": who, "distribution": distribution, **row})
        if who.removesuffix(ALONE) not in baselines:
            planned = {name: other for name, other in found.items() if name.removesuffix(ALONE) in baselines}
            table[-1]["over"] = {name: vars(result.gain_over(other)) for name, other in planned.items()}
            table[-1]["sooner"] = {name: sooner(result, other) for name, other in planned.items()}
    return table


def sooner(result: EvaluationResult, other: EvaluationResult) -> dict[str, float]:
    """Mean difference of time, s, with a 95% interval, over episodes in which both succeeded."""
    key = next(name for name in result.metrics if name.endswith("time_s"))
    both_succeeded = result.success & other.success
    differences = (result.metrics[key] - other.metrics[key])[both_succeeded]
    # normal approximation: mean ± 1.96 s / sqrt(n)
    half = 1.96 * float(differences.std()) / math.sqrt(len(differences))
    mean = float(differences.mean())
    return {"time_s": mean, "low": mean - half, "high": mean + half, "episodes": len(differences)}


if __name__ == "__main__":
    main()
