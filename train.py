"""Train a robot policy: python train.py task=libero_pick [key=value ...].

All tasks: python train.py list=tasks. All options of one: python train.py --help task=quadrotor_hover policy=mlp.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import MISSING, OmegaConf

from embodied.algorithms.registry import ALGORITHMS
from embodied.command_line import combinations, listing, program
from embodied.command_line.compute import prepare
from embodied.command_line.config import compose, names
from embodied.deployment.latency import LatencyConfig, with_latency
from embodied.saving import checkpoint
from embodied.training.experiment import Experiment, ExperimentConfig
from embodied.training.plan import plan
from embodied.training.run_directory import new_run, resumed_run
from policies.registry import POLICIES
from real_robot.recording.demonstrations import demonstrations, sources
from sims.registry import NEEDS, TASKS, in_processes

log = logging.getLogger("embodied")
GROUPS = {"task": TASKS, "policy": POLICIES, "algorithm": ALGORITHMS}


@dataclass
class TrainConfig(ExperimentConfig):
    """Options of train.py: those of a run, and those of its parts.

    `seed` determines all random numbers. `device` is for policy and learner; PyTorch uses `threads` cores. `wandb`
    names a project, `output` the directory of a new run. `demonstrations` replaces the task's own: LeRobot, HDF5,
    recordings or another run's, or several such [DIR1,DIR2]. `demonstration_weights` are their shares of what is drawn;
    null: by size. `resume` continues a run, or one of its checkpoints, unchanged; `eval_only` evaluates it instead.
    `plan` prints the memory that a run will take, and runs nothing.
    """

    task: Any = MISSING
    policy: Any = MISSING
    algorithm: Any = MISSING
    latency: LatencyConfig = field(default_factory=LatencyConfig)
    seed: int = 0
    device: str = "cpu"
    threads: int | None = None
    wandb: str | None = None
    output: str | None = None
    demonstrations: Any = None
    demonstration_weights: list[float] | None = None
    resume: str | None = None
    eval_only: bool = False
    plan: bool = False


def run(arguments: list[str]) -> None:
    """One training run, from the command line to its report; or, with list=tasks, what there is to train."""
    if arguments == ["list=tasks"]:
        return log.info(listing.tasks(TASKS, NEEDS))
    resumed = next((a.partition("=")[2] for a in arguments if a.startswith("resume=")), None)
    saved = checkpoint.load(resumed).config if resumed else None
    config, record = compose(TrainConfig, "train", arguments, GROUPS, saved)
    shown, weights = sources(config.demonstrations, config.demonstration_weights), config.demonstration_weights
    if config.plan:
        parts = with_latency(config.task, config.latency), config.policy, config.algorithm
        return log.info(plan(config, *parts, device=config.device, demonstrations=shown).table())
    prepare(config.device, config.threads)
    if config.eval_only:
        rest = [each for each in arguments if each.partition("=")[0] not in ("resume", "eval_only", *GROUPS)]
        program.evaluate_instead(Path(__file__).with_name("evaluate.py"), resumed, rest)
    record["values"]["resume"] = None  # not part of the run, which may be resumed several times
    name = Path("outputs") / config.task.name / f"{datetime.now():%Y-%m-%d_%H-%M-%S}_seed{config.seed}"
    with resumed_run(resumed) if resumed else new_run(config.output, name) as directory:
        trainer = Experiment(
            config, with_latency(in_processes(config.task), config.latency), config.policy, config.algorithm,
            directory, record=record, seed=config.seed, device=config.device, wandb_project=config.wandb,
            demonstrations=partial(demonstrations, shown, weights=weights, task=config.task) if shown else None,
        )  # fmt: skip
        (directory / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(record["values"])))
        log.info(trainer.run().summary(directory))


def describe(arguments: list[str]) -> str:
    """Text of --help: the choices, and the options of the chosen ones."""
    config, record = compose(TrainConfig, "train", arguments, GROUPS)
    listed = [f"{group}: {', '.join(names(group, GROUPS))}" for group in GROUPS]
    chosen = " ".join(f"{group}={name}" for group, name in record["choices"].items())
    takes = f"task={(task := record['choices']['task'])} takes {combinations.described(task)}"
    return program.options("\n".join([str(__doc__), *listed, "", takes, "", f"Options of {chosen}:"]), config)


if __name__ == "__main__":
    sys.exit(program.main(run, describe, sys.argv[1:]))
