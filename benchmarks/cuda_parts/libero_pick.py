"""task=libero_pick on mujoco_warp from end to end: a short run of train.py and its report."""

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
    """One run, in this process."""
    with record.row("train.py"):
        train(record, options)


def train(record: Record, options: Options) -> None:
    """Train, then report what the run reports; SFT's success and RL's are of few episodes."""
    import train as program

    folder = options.folder / "run"
    arguments = [*ARGUMENTS, *options.size(FULL, TINY), f"device={options.device}"]
    record.figure("command", "python train.py " + " ".join(arguments))
    if options.tiny:  # episodes of a few control steps, in which the expert cannot succeed
        arguments.append(f"demonstrations={_demonstrated(options.folder / 'demonstrated')}")
    began = time.perf_counter()
    program.run([*arguments, f"output={folder}"])
    record.figure("wall_s", time.perf_counter() - began)
    report(record, folder)


def _demonstrated(folder: Path) -> Path:
    """Folder with a demonstration of the expert."""
    from sims.libero.task import LiberoTask

    LiberoTask(tasks=["0"]).demonstrations(folder, 0)
    return folder


def report(record: Record, folder: Path) -> None:
    """Figures from the run's report.json."""
    found = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    phases = found["wall_s"]
    record.figure("phases_s", phases)
    record.figure("env_steps", found["env_steps"])
    collecting = phases["simulation"] + phases["policy"]
    if collecting > 0:
        # with overlap=true these are the times of waiting for rollouts, less than those of collecting them
        record.figure("env_steps_per_s_of_collecting", found["env_steps"] / collecting)
    record.figure("env_steps_per_s_of_training", found["env_steps"] / (collecting + phases["update"]))
    success = {f"{each['stage']} {each['distribution']}": each["success"] for each in found["evaluations"]}
    record.figure("success", success)
    record.figure("evaluated_episodes", sum(each["episodes"] for each in found["evaluations"]))
