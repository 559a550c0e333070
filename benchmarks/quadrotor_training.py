"""Quadrotor results: `python benchmarks/quadrotor_training.py RESULT`, one of `MEASURED`, such as hover.

    [--seeds 0,1,...] [--output FILE] [--options "key=value ..."] [--keep FOLDER]

Writes benchmarks/results/quadrotor_<result>.json, only from a clean commit; trials with other sizes go elsewhere:
`hover --seeds 0 --options "env_steps=20000 evaluation_starts=32" --output /tmp/try.json`.

Every run is `python train.py task=... seed=SEED` as a user types it, in its own process, one after the other. The CPU
seconds of training are report.json's: collection and updates, of all threads. In addition there are those of the whole
command (including imports, evaluation and video), its wall time, and `saved_s`, from the start of the process to the
checkpoint at the end of training. BPTT and distillation use the simulator's gradients, PPO, TD3 and SAC do not.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also runs from a clone that is not installed

from embodied.evaluation.evaluation import rate_over_seeds, wilson  # noqa: E402
from embodied.report.markdown import table  # noqa: E402
from embodied.saving.files import complete_or_absent  # noqa: E402
from embodied.saving.json_text import dumps_rows  # noqa: E402
from embodied.saving.versions import git_commit, versions  # noqa: E402
from sims.swarm.task import SwarmTask  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
NOMINAL = ("task=quadrotor_hover", "task.nominal=true")
BEFORE = ("env_steps=425_000", "num_envs=64", "algorithm.rollout_length=48", "algorithm.learning_rate=7e-3")
LATE = "latency.action_s=[0.0,0.04]"
STEP_LATE = "[0.01,0.01]"
HL_GAUSS = {"td3": ("algorithm", -5, 20), "sac": ("algorithm", -5, 20), "ppo": ("policy.values", -10, 10)}
"""Where the options of critics are, and the range of their values, by algorithm."""


@dataclass(frozen=True)
class Variant:
    """A training setup: `options` of train.py, and further evaluations as options of evaluate.py by name."""

    options: tuple[str, ...]
    analytic_gradients: bool = True
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    evaluations: dict[str, tuple[str, ...]] = field(default_factory=dict)


def of_head(algorithm: str, head: str) -> Variant:
    """Hover in L2F's MDP by `algorithm`, with critics that are trained by the squared error or as classes."""
    options = ()
    if head == "HL-Gauss":
        at, low, high = HL_GAUSS[algorithm]
        options = f"{at}.head=HL_GAUSS", f"{at}.value_low={low}", f"{at}.value_high={high}"
    return Variant((*NOMINAL, f"algorithm={algorithm}", *options), analytic_gradients=False, seeds=(0, 1, 2))


MEASURED = {
    "hover": {"bptt": Variant(("task=quadrotor_hover",))},
    "hover_nominal": {
        "bptt": Variant((*NOMINAL, *BEFORE)),
        "ppo": Variant((*NOMINAL, "algorithm=ppo"), analytic_gradients=False),
        "td3": Variant((*NOMINAL, "algorithm=td3"), analytic_gradients=False),
    },
    **{f"hover_{name}": {head: of_head(name, head) for head in ("squared error", "HL-Gauss")} for name in HL_GAUSS},
    **{name: {name: Variant((f"task=quadrotor_{name}",))} for name in ("track", "recover", "race", "any")},
    "swarm": {"swarm": Variant(("task=quadrotor_swarm",))},
    "latency": {
        "trained": Variant((*NOMINAL, LATE, "latency.observed=true")),
        "not trained": Variant(
            NOMINAL,
            evaluations={
                "commands 0 to 40 ms late": (LATE,),
                "measurements 10 ms late": (f"latency.observation_s={STEP_LATE}",),
                "commands 10 ms late": (f"latency.action_s={STEP_LATE}",),
            },
        ),
    },
}
"""All results in the READMEs, by result and variant."""
SHARES = "survive", "collision_free", "world_collision_free"
"""Metrics that are shares; the last has one outcome for all drones of a world."""
RATES = "success", *SHARES
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Half widths of 95% intervals of a mean of 2 to 10 seeds (Student's t), in standard errors."""
ELSEWHERE = {
    "hover_nominal": [
        {
            "what": "Learning to Fly in Seconds, TD3: its C++ on one shared x86-64 core, 3 seeds, 256 episodes of 5 s",
            "analytic_gradients": False,
            "cpu_s": [35, 39],
            "env_steps": 300_000,
            "survive": [0.79, 0.93],
            "position_error_m": [0.22, 0.33],
            "source": "measured earlier on another machine, not by this program",
        },
        {
            "what": "Learning to Fly in Seconds, TD3: training on an M1 laptop",
            "analytic_gradients": False,
            "wall_s": 18,
            "env_steps": 300_000,
            "source": "claimed in arXiv 2311.13081",
        },
    ],
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all variants, write the JSON after each run, and print the table."""
    args = _parse(arguments)
    commit, runs = git_commit(), []
    for name, variant in MEASURED[args.result].items():
        for seed in variant.seeds if args.seeds is None else args.seeds:
            with tempfile.TemporaryDirectory() as folder:
                run = (args.keep or Path(folder)) / f"{name.replace(' ', '_')}_seed{seed}"
                runs.append({"variant": name, **measure(variant, seed, args.options, run)})
            if runs[-1]["git_commit"] != commit:
                raise SystemExit(f"error: the files are no longer those of {commit}; measure in a separate worktree")
            sys.stderr.write(json.dumps({key: runs[-1][key] for key in ("variant", "seed", *TIMES)}) + "\n")
            report = {
                "result": args.result,
                "command": f"python benchmarks/quadrotor_training.py {args.result}",
                "options": args.options,
                "git_commit": commit,
                "machine": machine(),
                "versions": versions(),
                "rows": rows(runs),
                "runs": runs,
                "elsewhere": ELSEWHERE.get(args.result, []),
            }
            with complete_or_absent(args.output) as temporary:
                temporary.write_text(dumps_rows(report))
    sys.stdout.write(shown(rows(runs)) + "\n")


TIMES = ("cpu_s", "command_cpu_s", "command_wall_s", "saved_s")


def measure(variant: Variant, seed: int, options: Sequence[str], run: Path) -> dict[str, Any]:
    """Train into the folder `run` and run the further evaluations; returns the JSON entry."""
    start_s = time.time()
    cpu_s, wall_s = _spent(["train.py", *variant.options, *options, f"seed={seed}", f"output={run}"])
    report = json.loads((run / "report.json").read_text())
    trained = sorted((run / "checkpoint").iterdir())[-2]  # the last one was saved after the evaluation
    evaluations = {called(row): row for row in report["evaluations"]}
    for name, evaluation_options in variant.evaluations.items():
        episodes = str(next(row["episodes"] for row in report["evaluations"] if row["stage"] == "rl"))
        _spent(
            ["evaluate.py", f"checkpoint={run}", f"episodes={episodes}", f"num_envs={episodes}", *evaluation_options]
        )
        (evaluations[name],) = json.loads((run / "evaluation.json").read_text())["evaluations"]
    return {
        "seed": seed,
        "options": list(variant.options),
        "analytic_gradients": variant.analytic_gradients,
        "git_commit": report["git_commit"],
        "cpu_s": report["cpu_s"],
        "command_cpu_s": cpu_s,
        "command_wall_s": wall_s,
        "saved_s": trained.stat().st_mtime - start_s,
        "phases_wall_s": report["wall_s"],
        "load": os.getloadavg()[0],
        "env_steps": report["env_steps"],
        "evaluations": {name: with_intervals(row) for name, row in evaluations.items()},
    }


def called(row: dict[str, Any]) -> str:
    """Name of an evaluation: the distribution, and the planner if there was one."""
    return row["distribution"] if row["stage"] == "rl" else f"{row['distribution']}, {row['title']}"


def with_intervals(row: dict[str, Any]) -> dict[str, Any]:
    """Copy of an evaluation without its tasks, with Wilson's 95% interval of each metric that is a share."""
    entry = {key: value for key, value in row.items() if key not in ("per_task", "stage", "distribution")}
    for name in SHARES:
        if name in row:
            count = outcomes(name, row["distribution"], row["episodes"])
            entry[f"{name}_95"] = wilson(round(row[name] * count), count)
    return entry


def outcomes(metric: str, distribution: str, episodes: int) -> int:
    """Number of independent outcomes of a share: all drones of a world share one `world_collision_free`."""
    return episodes // SwarmTask.MDPS[distribution].drones if metric == SHARES[-1] else episodes


def rows(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over seeds of every variant and evaluation, and of the times, with 95% intervals.

    `half_width` is Student's, over seeds. Success rates and shares also have `low` and `high`, for other seeds and
    other starts.
    """
    table = []
    for variant in dict.fromkeys(run["variant"] for run in runs):
        mine = [run for run in runs if run["variant"] == variant]
        times = {name: mean(run[name] for run in mine) for name in TIMES}
        for name in mine[0]["evaluations"]:
            evaluations = [run["evaluations"][name] for run in mine]
            numbers = [key for key, value in evaluations[0].items() if isinstance(value, float | None)]
            metrics = {key: mean(row[key] for row in evaluations) for key in numbers if key not in ("low", "high")}
            episodes = evaluations[0]["episodes"]
            for key in RATES:
                if key in metrics and len(mine) > 1:
                    count = outcomes(key, name, episodes)
                    _, metrics[key]["low"], metrics[key]["high"] = rate_over_seeds(
                        [row[key] for row in evaluations], count
                    )
            row = {"variant": variant, "evaluation": name, "seeds": [run["seed"] for run in mine]}
            table.append({**row, "episodes": episodes, **metrics, **times})
    return table


def mean(values: Iterable[float | None]) -> dict[str, Any]:
    """Mean of the values that are not None, their number, and, for two or more, the half width of the interval."""
    present = [value for value in values if value is not None]
    summary: dict[str, Any] = {"mean": statistics.mean(present) if present else None, "seeds": len(present)}
    if 2 <= len(present) <= len(STUDENT) + 1:
        summary["half_width"] = STUDENT[len(present) - 2] * statistics.stdev(present) / math.sqrt(len(present))
    return summary


def shown(found: Sequence[dict[str, Any]]) -> str:
    """Format the rows as Markdown."""
    columns = list(dict.fromkeys(key for row in found for key, value in row.items() if isinstance(value, dict)))
    lines = [[row["variant"], row["evaluation"], *(_cell(row.get(key)) for key in columns)] for row in found]
    return table(["variant", "evaluation", *columns], lines)


def _cell(found: dict[str, Any] | None) -> str:
    if found is None or found["mean"] is None:
        return ""
    if "low" in found:
        return f"{found['mean']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"
    return f"{found['mean']:.3f}" + (f" ± {found['half_width']:.3f}" if "half_width" in found else "")


def _spent(command: Sequence[str]) -> tuple[float, float]:
    """Run one of our programs; returns its CPU seconds and wall seconds, including threads and children."""
    start_s = time.monotonic()
    process = subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"error: python {shlex.join(command)} failed; its last line says why")
    return usage.ru_utime + usage.ru_stime, time.monotonic() - start_s


def machine() -> dict[str, Any]:
    """Processor and cores."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return {"cpu": model, "cores": len(os.sched_getaffinity(0)), "platform": platform.platform()}


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", choices=MEASURED)
    parser.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], help="those of all runs")
    parser.add_argument("--options", type=str.split, default=[], help="more options of train.py, for trials")
    parser.add_argument("--output", type=Path, help="benchmarks/results/quadrotor_<result>.json")
    parser.add_argument("--keep", type=Path, help="a folder in which the runs stay")
    args = parser.parse_args(arguments)
    if args.output is None:
        if args.options:
            parser.error("--options needs --output FILE")
        if (commit := git_commit()).endswith("-dirty") or commit == "unknown":
            parser.error(f"results are measured on a clean commit, this is {commit}; commit, or name --output FILE")
        args.output = RESULTS / f"quadrotor_{args.result}.json"
    return args


if __name__ == "__main__":
    main()
