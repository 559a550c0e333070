"""Hover learned with and without analytic gradients: `python benchmarks/quadrotor_training.py`.

    [--algorithms bptt,ppo,td3] [--seeds 0,1,2,3,4] [--points 8] [--include FILE ...] [--output FILE]

Every run is that of `python train.py task=quadrotor_hover algorithm=NAME threads=1 seed=SEED`, with its configuration,
its trainer and its evaluation (512 episodes of 5 s under random forces and torques). CPU seconds are those of
report.json: collection and updates, of all threads. On the way the policy is evaluated `points` times on other
episodes, outside of both clocks: CPU-s to 0.1 m is what had been spent where an evaluation first found a mean position
error of at most 0.1 m with at least 90% of its episodes surviving.

BPTT is given the simulator's gradients, PPO and TD3 are not: the table says so, and they compare with each other alone.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also runs from a clone that is not installed

import torch  # noqa: E402

from embodied.compute import prepare  # noqa: E402
from embodied.config import compose  # noqa: E402
from embodied.evaluation import evaluate  # noqa: E402
from embodied.rollout import Collector  # noqa: E402
from embodied.task import Learner  # noqa: E402
from embodied.trainer import Trainer  # noqa: E402
from train import GROUPS, TrainConfig  # noqa: E402

TASK = "quadrotor_hover"
ALGORITHMS = {"bptt": True, "ppo": False, "td3": False}
"""Whether each uses analytic gradients."""
TRAINING = ("simulation", "policy", "update")
ERROR_M, SURVIVE = 0.1, 0.9
PROBED = 128
"""Episodes of an evaluation on the way; they come after the 512 of the last one."""
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Half widths of 95% intervals of a mean, in standard errors, of 2 to 10 seeds."""
ELSEWHERE = [
    {
        "what": "Learning to Fly in Seconds, TD3: its C++ on one shared x86-64 core, 3 seeds, 256 episodes of 5 s",
        "analytic_gradients": False, "cpu_s": [35, 39], "env_steps": 300_000, "survive": [0.79, 0.93],
        "position_error_m": [0.22, 0.33], "source": "measured earlier on another machine, not by this program",
    },
    {
        "what": "Learning to Fly in Seconds, TD3: training on an M1 laptop",
        "analytic_gradients": False, "wall_s": 18, "env_steps": 300_000, "source": "claimed in arXiv 2311.13081",
    },
]  # fmt: skip


class Probed(Trainer):
    """A run that is evaluated `points` times on its way; `curve` tells what was found."""

    def probe(self, points: int) -> None:
        """Evaluate `points` times, evenly over the steps to come."""
        self.curve: list[dict[str, Any]] = []
        self._every = self.config.env_steps / points

    def _iterate(self, learner: Learner, collector: Collector) -> float:
        success = super()._iterate(learner, collector)
        if self.counters["env_steps"] >= self._every * (len(self.curve) + 1):
            env = self.task.environment(PROBED, self.task.distributions[0], "eval")
            first = self.config.evaluation_starts
            found = evaluate(env, self.policy, starts_per_task=PROBED, first_start=first).summary()
            spent = {name: self.counters[name] for name in ("cpu_s", "env_steps")}
            self.curve.append(spent | {name: found[name] for name in ("survive", "position_error_m")})
        return success


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the JSON."""
    options = _options(arguments)
    runs = [run for path in options.include for run in json.loads(path.read_text())["runs"]]
    runs += [measure(name, seed, options.points) for seed in options.seeds for name in options.algorithms]
    found = [name for name in ALGORITHMS if any(run["algorithm"] == name for run in runs)]
    report = {
        "machine": machine(),
        "reached": {"position_error_m": ERROR_M, "survive": SURVIVE, "episodes": PROBED},
        "rows": [summary(name, runs) for name in found], "runs": runs, "elsewhere": ELSEWHERE,
    }  # fmt: skip
    sys.stdout.write(table(report))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=2) + "\n")


def measure(algorithm: str, seed: int, points: int) -> dict[str, Any]:
    """One run of train.py: its report, and its way there."""
    given = [f"task={TASK}", f"algorithm={algorithm}", f"seed={seed}", "threads=1", "video=false"]
    config, record = compose(TrainConfig, "train", given, GROUPS)
    prepare(config.device, config.threads)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Probed(
            config, config.task, config.policy, config.algorithm, Path(folder), record=record, seed=config.seed,
            device=config.device,
        )  # fmt: skip
        trainer.probe(points)
        trainer.run()
        report = json.loads((Path(folder) / "report.json").read_text())
    last = report["evaluations"][-1]
    load = os.getloadavg()[0]
    reached = (row["cpu_s"] for row in trainer.curve if _good(row))
    run = {
        "algorithm": algorithm, "seed": seed, "analytic_gradients": ALGORITHMS[algorithm], "cpu_s": report["cpu_s"],
        "wall_s": sum(trainer.timer.seconds[phase] for phase in TRAINING), "env_steps": report["env_steps"],
        "survive": last["survive"], "position_error_m": last["position_error_m"], "episodes": last["episodes"],
        "cpu_s_to_0.1_m": next(reached, None), "load": load, "curve": trainer.curve,
    }  # fmt: skip
    sys.stderr.write(json.dumps({name: value for name, value in run.items() if name != "curve"}) + "\n")
    return run


def _good(row: dict[str, Any]) -> bool:
    return row["position_error_m"] is not None and row["position_error_m"] <= ERROR_M and row["survive"] >= SURVIVE


MEASURED = ("cpu_s", "wall_s", "env_steps", "survive", "position_error_m", "cpu_s_to_0.1_m", "load")


def summary(algorithm: str, runs: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Means over seeds with 95% intervals (Student); for what some seeds have not, how many have."""
    mine = [run for run in runs if run["algorithm"] == algorithm]
    row: dict[str, Any] = {"algorithm": algorithm, "analytic_gradients": ALGORITHMS[algorithm], "seeds": len(mine)}
    for name in MEASURED:
        values = [run[name] for run in mine if run[name] is not None]
        row[name] = {"mean": statistics.mean(values) if values else None, "seeds": len(values)}
        if 2 <= len(values) <= len(STUDENT) + 1:
            error = statistics.stdev(values) / math.sqrt(len(values))
            row[name]["half_width"] = STUDENT[len(values) - 2] * error
    return row


def table(report: dict[str, Any]) -> str:
    """What was measured, and what others say of theirs."""
    columns = "algorithm", "gradients", "CPU-s", "wall s", "env steps", "survive", "error (m)", "CPU-s to 0.1 m", "load"
    lines = [f"| {' | '.join(columns)} |", "|" + " --- |" * len(columns)]
    formats = (".1f", ".1f", ",.0f", ".3f", ".3f", ".1f", ".1f")
    for row in report["rows"]:
        cells = [_cell(row[name], form, row["seeds"]) for name, form in zip(MEASURED, formats, strict=True)]
        lines.append(
            f"| {row['algorithm']} | {'analytic' if row['analytic_gradients'] else 'none'} | {' | '.join(cells)} |"
        )
    seeds = ", ".join(f"{row['algorithm']} {row['seeds']}" for row in report["rows"])
    lines.append(
        f"mean and 95% interval over seeds ({seeds}); {report['machine']['cores']} cores, one thread of them used"
    )
    for other in report["elsewhere"]:
        figures = ", ".join(f"{name} {value}" for name, value in other.items() if name not in ("what", "source"))
        lines.append(f"{other['source']}: {other['what']}: {figures}")
    return "\n".join(lines) + "\n"


def _cell(found: dict[str, Any], form: str, seeds: int) -> str:
    if found["mean"] is None:
        return "never"
    width = f" ± {found['half_width']:{form}}" if "half_width" in found else ""
    return f"{found['mean']:{form}}{width}" + (f" ({found['seeds']} of {seeds})" if found["seeds"] < seeds else "")


def machine() -> dict[str, Any]:
    """Processor, cores and versions."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return {
        "cpu": model, "cores": len(os.sched_getaffinity(0)), "threads": 1,
        "python": platform.python_version(), "torch": torch.__version__,
    }  # fmt: skip


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", type=_algorithms, default=list(ALGORITHMS), help="names, with commas")
    parser.add_argument("--seeds", type=_seeds, default=list(range(5)), help="numbers, with commas: a run of each")
    parser.add_argument("--include", type=Path, nargs="+", default=[], help="results of earlier calls to add runs from")
    parser.add_argument("--points", type=int, default=8, help="evaluations on the way of a run")
    results = ROOT / "benchmarks" / "results" / "quadrotor_training.json"
    parser.add_argument("--output", type=Path, default=results)
    options = parser.parse_args(arguments)
    if options.points < 1:
        parser.error("--points takes numbers of at least 1")
    return options


def _algorithms(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(ALGORITHMS):
        raise argparse.ArgumentTypeError(f"unknown {', '.join(unknown)}; expected some of {', '.join(ALGORITHMS)}")
    return names


def _seeds(text: str) -> list[int]:
    return [int(seed) for seed in text.split(",") if seed]


if __name__ == "__main__":
    main()
