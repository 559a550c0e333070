"""Train a robot policy: python train.py task=libero_pick [key=value ...].

Options, with their defaults, are printed by --help; every field of the configuration is one.
"""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from omegaconf import MISSING, OmegaConf

from embodied import checkpoint
from embodied.algorithms.registry import ALGORITHMS
from embodied.config import compose, names
from embodied.logging import setup_console
from embodied.trainer import Stopped, Trainer, TrainerConfig
from policies.registry import POLICIES
from sims.registry import TASKS

log = logging.getLogger("embodied")
GROUPS = {"task": TASKS, "policy": POLICIES, "algorithm": ALGORITHMS}


@dataclass
class TrainConfig(TrainerConfig):
    """Options of train.py: those of a run, and its parts.

    `resume` names the directory of a run to continue with its own configuration; `eval_only` measures it instead.
    """

    task: Any = MISSING
    policy: Any = MISSING
    algorithm: Any = MISSING
    seed: int = 0
    device: str = "cpu"
    threads: int | None = None
    wandb: str | None = None
    output: str | None = None
    resume: str | None = None
    eval_only: bool = False


def main(arguments: list[str]) -> int:
    """Compose, build, run; returns the exit status."""
    setup_console()
    try:
        if {"-h", "--help"} & set(arguments):
            return show_help()
        run(arguments)
    except (ValueError, FloatingPointError) as error:
        log.error(f"error: {error}")
        return 1
    except Stopped as stopped:
        log.info(stopped)
    return 0


def run(arguments: list[str]) -> None:
    """One training run, from the command line to its report."""
    resumed = next((a.partition("=")[2] for a in arguments if a.startswith("resume=")), None)
    saved = checkpoint.load(resumed).config if resumed else None
    config, record = compose(TrainConfig, "train", arguments, GROUPS, saved)
    if config.eval_only:
        if resumed is None:
            raise ValueError("eval_only=true needs the run to measure: resume=DIR")
        os.execv(
            sys.executable, [sys.executable, str(Path(__file__).with_name("evaluate.py")), f"checkpoint={resumed}"]
        )
    # Small matrices gain little from threads, and lose all to them when something else wants a core.
    torch.set_num_threads(config.threads or max(1, len(os.sched_getaffinity(0)) // 2))
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    directory = Path(resumed or config.output or Path("outputs") / config.task.name / stamp)
    if not resumed and (directory / checkpoint.FOLDER).exists():
        raise ValueError(f"{directory} holds a run; continue it with resume={directory}, or choose another output")
    trainer = Trainer(
        config, config.task, config.policy, config.algorithm, directory,
        record=record, seed=config.seed, device=config.device, wandb_project=config.wandb,
    )  # fmt: skip
    (directory / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(record["values"])))
    log.info(trainer.run().summary(directory))


def show_help() -> int:
    """Print tasks and options."""
    _, record = compose(TrainConfig, "train", [], GROUPS)
    lines = [str(__doc__)]
    lines += [f"{group}: {', '.join(names(group, GROUPS))}" for group in GROUPS]
    log.info("\n".join([*lines, "", OmegaConf.to_yaml(OmegaConf.create(record["values"]))]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
