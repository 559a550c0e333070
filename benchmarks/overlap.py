"""What `overlap=true` saves: `python benchmarks/overlap.py [--rows sleeping,libero_pick] [--output FILE]`.

Each row is measured with and without it in turns, so that other work on the machine disturbs both. Seconds are those of
collection and updates alone.

sleeping: PPO on quadrotors whose simulator sleeps as long as an update takes, and takes no CPU, as one with a device of
its own would. libero_pick: `train.py` with its own settings, from one supervised policy, on both cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also runs from a clone that is not installed

from embodied.algorithms.ppo import PPOConfig  # noqa: E402
from embodied.environment import Transition  # noqa: E402
from embodied.evaluation.report import git_commit, table, versions  # noqa: E402
from embodied.rollout.ahead import CollectorAhead  # noqa: E402
from embodied.rollout.rollout import first_decisions  # noqa: E402
from embodied.training.loop import build, iterations  # noqa: E402
from embodied.wrapping import WrappedEnvironment  # noqa: E402
from policies.mlp import MLPConfig  # noqa: E402
from sims.quadrotor.task import HoverTask  # noqa: E402

T, NUM_ENVS, ITERATIONS = 32, 256, 20
PPO = PPOConfig(rollout_length=T, minibatch=512, epochs=4, learning_rate=3e-4, critic_warmup=0)


class Sleeping(WrappedEnvironment):
    """A simulator that takes time, and no CPU."""

    seconds = 0.0
    """Of a step."""

    def step(self, actions: torch.Tensor) -> Transition:
        """As `Environment.step`, later."""
        time.sleep(self.seconds)
        return super().step(actions)


def sleeping(overlap: bool, seconds: float) -> float:
    """Seconds of an iteration of PPO, of which each step sleeps for `seconds`; the first is not counted."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    env = Sleeping(HoverTask().environment(NUM_ENVS, "robust", "train", 0, "cpu"))
    policy = MLPConfig(hidden=[64, 64]).build(env.contract)
    policy.fit(*first_decisions(env, torch.Generator().manual_seed(0), 256))
    learner, alone = build(env, policy, PPO, None, 0)
    env.seconds = seconds
    collector = CollectorAhead(alone, policy) if overlap else alone
    with collector if isinstance(collector, CollectorAhead) else nullcontext():
        steps = iterations(learner, collector, T, 10**9)
        next(steps)
        began = time.perf_counter()
        for _ in islice(steps, ITERATIONS):
            pass
        took = (time.perf_counter() - began) / ITERATIONS
    env.close()
    return took


def libero(overlap: bool, start: Path, env_steps: int) -> float:
    """Seconds of reinforcement learning on libero_pick, from the run `start`."""
    options = ["stages=[rl]", f"start_from={start}", f"env_steps={env_steps}", f"overlap={str(overlap).lower()}"]
    return sum(trained(options)["wall_s"][phase] for phase in ("simulation", "policy", "update"))


def trained(options: list[str], run: Path | None = None) -> dict[str, Any]:
    """The report of `train.py task=libero_pick` with hardly any evaluation."""
    common = ["task=libero_pick", "video=false", "control=false", "evaluation_starts=1", "evaluate_every_steps=null"]
    with tempfile.TemporaryDirectory() as folder:
        run = run or Path(folder, "run")
        command = [sys.executable, "train.py", *common, "task.assets=stand-in", *options, f"output={run}"]
        subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)
        return json.loads((run / "report.json").read_text())


def compared(measure: Callable[[bool], float], runs: int) -> dict[str, Any]:
    """Seconds with and without overlap, in turns, and the ratio of their medians."""
    found: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(runs):
        for overlap, seconds in found.items():
            seconds.append(measure(overlap))
    without, beside = (statistics.median(seconds) for seconds in found.values())
    return {
        "seconds": [round(each, 3) for each in found[False]],
        "seconds_with_overlap": [round(each, 3) for each in found[True]], "ratio": round(beside / without, 3),
    }  # fmt: skip


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=lambda text: text.split(","), default=["sleeping", "libero_pick"])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--env-steps", type=int, default=140_000, help="of each run of libero_pick")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    about: dict[str, Any] = {
        "git_commit": git_commit(), "versions": versions(), "cores": os.cpu_count(), "load_before": os.getloadavg()[0],
    }  # fmt: skip
    if "sleeping" in options.rows:
        awake = sleeping(False, 0.0)  # of which nearly all is the update
        about["sleeping"] = compared(lambda overlap: sleeping(overlap, awake / T), options.runs)
        about["sleeping"] |= {"num_envs": NUM_ENVS, "decisions": T, "sleeps_s": round(awake / T, 5)}
    if "libero_pick" in options.rows:
        with tempfile.TemporaryDirectory() as folder:
            start = Path(folder, "start")
            trained(["stages=[sft]"], start)
            about["libero_pick"] = compared(lambda overlap: libero(overlap, start, options.env_steps), options.runs)
        about["libero_pick"]["env_steps"] = options.env_steps
    about["load_after"] = os.getloadavg()[0]
    rows = [
        [name, *(f"{statistics.median(about[name][key]):.3f}" for key in ("seconds", "seconds_with_overlap")),
         f"{about[name]['ratio']:.2f}"]
        for name in options.rows
    ]  # fmt: skip
    print(table(["", "s", "s with overlap", "ratio"], rows))
    if options.output:
        options.output.write_text(json.dumps(about, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
