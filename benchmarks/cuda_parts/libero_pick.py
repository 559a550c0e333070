"""Runs task=libero_pick on mujoco_warp end to end: a short run of train.py and its report."""

from __future__ import annotations

import json
import time
from pathlib import Path

from benchmarks.cuda_parts.record import Options, Record

ARGUMENTS = (
    *("task=libero_pick", "task.sim=mjwarp", "task.tasks=[0]", "video=false", "control=false"),
    *("evaluate_every_steps=null", "comparison_starts=20", "algorithm.warmup=1"),
)
FULL = (
    *("task.episodes=8", "task.step_limit=150", "sft.steps=400", "num_envs=512", "env_steps=160000"),
    *("evaluation_starts=64", "evaluation_envs=64", "algorithm.imitation.gradient_steps=60"),
    "algorithm.gradient_steps=30",
)
TINY = (
    *("task.step_limit=4", "task.train_step_limit=4", "sft.steps=2", "num_envs=1", "env_steps=8"),
    *("evaluation_starts=1", "evaluation_envs=1", "algorithm.imitation.rollout_length=1", "policy.width=16"),
    *("policy.hidden=32", "algorithm.imitation.gradient_steps=1", "algorithm.gradient_steps=1"),
)


def run(record: Record, options: Options) -> None:
    """Run one training in this process."""
    with record.row("train.py"):
        train(record, options)


def train(record: Record, options: Options) -> None:
    """Train and record the run's report; the success of SFT and RL is of few episodes."""
    import train as program

    folder = options.folder / "run"
    arguments = [*ARGUMENTS, *options.size(FULL, TINY), f"device={options.device}"]
    record.figure("command", "python train.py " + " ".join(arguments))
    if options.tiny:  # episodes of a few control steps, in which the expert cannot succeed
        arguments.append(f"demonstrations={_demonstrated(options.folder / 'demonstrated')}")
    start_s = time.perf_counter()
    program.run([*arguments, f"output={folder}"])
    record.figure("wall_s", time.perf_counter() - start_s)
    report(record, folder)


def _demonstrated(folder: Path) -> Path:
    """Make a folder with a demonstration of the expert."""
    from sims.libero.task import LiberoTask

    LiberoTask(tasks=["0"]).demonstrations(folder, 0)
    return folder


def report(record: Record, folder: Path) -> None:
    """Record figures from the run's report.json."""
    contents = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    phases = contents["wall_s"]
    record.figure("phases_s", phases)
    record.figure("env_steps", contents["env_steps"])
    collecting = phases["simulation"] + phases["policy"]
    if collecting > 0:
        # with overlap=true these are the times of waiting for rollouts, less than those of collecting them
        record.figure("env_steps_per_s_of_collecting", contents["env_steps"] / collecting)
    record.figure("env_steps_per_s_of_training", contents["env_steps"] / (collecting + phases["update"]))
    success = {f"{each['stage']} {each['distribution']}": each["success"] for each in contents["evaluations"]}
    record.figure("success", success)
    record.figure("evaluated_episodes", sum(each["episodes"] for each in contents["evaluations"]))
