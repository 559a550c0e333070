"""Lap times of a car that practises alone: `python benchmarks/vehicle_practice.py OUTPUT.json [--seeds 0 1 2]`.

Trains `task=vehicle_practice` with its defaults (RLPD, one demonstrated lap) for 20 simulated minutes, recoveries
included, and evaluates laps after some of them: three laps from rest at 20 starts, without noise. The planners drive
from the same starts.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also runs from a clone that is not installed

import torch  # noqa: E402

from embodied import seeding  # noqa: E402
from embodied.command_line.config import compose  # noqa: E402
from embodied.command_line.train_options import GROUPS, TrainConfig  # noqa: E402
from embodied.environment import Environment  # noqa: E402
from embodied.evaluation.evaluation import evaluate  # noqa: E402
from embodied.policy import Policy  # noqa: E402
from embodied.report.repeating import machine  # noqa: E402
from embodied.saving.files import complete_or_absent  # noqa: E402
from embodied.saving.json_text import dumps_rows  # noqa: E402
from embodied.saving.versions import git_commit, versions  # noqa: E402
from embodied.training.loop import train  # noqa: E402

MINUTES = (2.0, 5.0, 10.0, 15.0, 20.0)
STARTS = 20
SIGNALS = ("recoveries", "recovery_steps", "requests")


def laps(env: Environment, policy: Policy) -> dict[str, Any]:
    """Success, number of episodes and mean time of a lap, s, of `policy` in `env`."""
    summary = evaluate(env, policy, starts_per_task=STARTS).summary()
    return {name: summary[name] for name in ("success", "low", "high", "episodes", "lap_time_s")}


def practised(seed: int) -> dict[str, Any]:
    """Evaluations along 20 minutes of practice, and what happened meanwhile."""
    config, _ = compose(TrainConfig, "train", ["task=vehicle_practice", f"seed={seed}"], GROUPS)
    task = config.task
    seeding.seed_everything(seed)
    env = task.environment(1, "track", "train", seed)
    evaluation = task.environment(STARTS, "track", "eval")
    policy = config.policy.build(env.contract)
    with tempfile.TemporaryDirectory() as folder:
        shown = task.demonstrations(Path(folder), seed)
    began = time.process_time()
    counts = dict.fromkeys(SIGNALS, 0.0)
    episodes = 0
    due = list(MINUTES)
    evaluations = []
    for step in train(env, policy, config.algorithm, env_steps=10**9, seed=seed, demonstrations=shown):
        episodes += step.episodes
        for name in SIGNALS if step.ended else ():
            counts[name] += step.ended[name] * step.episodes
        minutes = (step.env_steps + counts["recovery_steps"]) * env.contract.control_dt_s / 60.0
        if minutes < due[0]:
            continue
        so_far = {"minutes": due.pop(0), "episodes_of_practice": episodes, **{n: round(c) for n, c in counts.items()}}
        evaluations.append(so_far | laps(evaluation, policy))
        print(seed, evaluations[-1], flush=True)
        if not due:
            break
    return {"seed": seed, "cpu_s": round(time.process_time() - began, 1), "practice": evaluations}


def main() -> None:
    """Measure the planners and all seeds, and write the results after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    torch.set_num_threads(1)
    task = compose(TrainConfig, "train", ["task=vehicle_practice"], GROUPS)[0].task
    env = task.environment(STARTS, "track", "eval")
    planners = {name: laps(env, policy) for name, policy in task.baselines().items()}
    header = {"git_commit": git_commit(), "versions": versions(), "machine": machine("cpu"), "planners": planners}
    print(planners, flush=True)
    header["rows"] = []
    for seed in args.seeds:
        header["rows"].append(practised(seed))
        with complete_or_absent(args.output) as temporary:
            temporary.write_text(dumps_rows(header))


if __name__ == "__main__":
    main()
