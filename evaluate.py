"""Measure a trained policy: python evaluate.py checkpoint=DIR [key=value ...].

DIR is a run, such as outputs/libero_pick/<time>, or one of its checkpoints. Every episode is deterministic: the same
command gives the same numbers. Options, with their defaults, are printed by --help.
"""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import MISSING, OmegaConf

from embodied import checkpoint, program
from embodied.compute import prepare
from embodied.config import compose
from embodied.delay import delayed
from embodied.evaluation import evaluate
from embodied.files import complete_or_absent
from embodied.latency import with_latency
from embodied.report import evaluation_table, git_commit, versions
from train import GROUPS, TrainConfig

log = logging.getLogger("embodied")


@dataclass
class EvaluateConfig:
    """`suite` and `assets` default to those of training, `distributions` to all of the task.

    `episodes` initial states of each task are run, or all where there are fewer; `seed` picks which of the wide
    distribution. `video` or `render` films some. With an `execution` (inpaint, blend, naive, synchronous) inference
    takes `delay_s` while the robot goes on, `executed` actions between observations. `latency.*` as in training.
    """

    checkpoint: str = MISSING
    suite: str | None = None
    assets: str | None = None
    distributions: list[str] | None = None
    episodes: int = 50
    seed: int = 0
    delay_s: float = 0.0
    execution: str | None = None
    executed: int | None = None
    num_envs: int = 100
    device: str = "cpu"
    threads: int | None = None
    video: bool = False
    render: bool = False


def run(arguments: list[str]) -> None:
    """Run all evaluations, print the table, write evaluation.json into the run."""
    late = [argument for argument in arguments if argument.startswith("latency.")]
    config, given = compose(EvaluateConfig, "evaluate", [each for each in arguments if each not in late], {})
    prepare(config.device, config.threads)
    saved = checkpoint.load(config.checkpoint)
    options = ("suite", "assets", "executed")
    changes = [f"task.{name}={value}" for name in options if (value := getattr(config, name)) is not None]
    trained, composed = compose(TrainConfig, "train", changes + late, GROUPS, saved.config)
    task = with_latency(trained.task, trained.latency)
    policy = trained.policy.build(saved.contract).to(config.device)
    saved.restore(policy)
    robot = delayed(policy, config.delay_s, config.execution, executed=config.executed, device=config.device)
    results = {}
    for distribution in config.distributions or task.distributions:
        env = task.environment(config.num_envs, distribution, "eval", device=config.device)
        saved.bind(replace(env.contract, executed=saved.contract.executed) if config.executed else env.contract)
        results[distribution] = evaluate(
            env, robot, starts_per_task=config.episodes, first_start=config.seed * config.episodes,
            device=config.device, progress=distribution,
        )  # fmt: skip
    log.info(evaluation_table(results) + (f"\n{task.asset_kind} assets" if task.asset_kind else ""))
    directory = Path(saved.path or "").parent.parent
    record: dict[str, Any] = given["values"] | {"checkpoint": str(saved.path), "assets": task.asset_kind}
    record |= {name: composed["values"][name] for name in ("task", "latency")}
    record |= {"git_commit": git_commit(), "versions": versions()}
    record["evaluations"] = [{"distribution": name, **result.summary()} for name, result in results.items()]
    with complete_or_absent(directory / "evaluation.json") as temporary:
        temporary.write_text(json.dumps(record, indent=2) + "\n")
    log.info(f"wrote {directory / 'evaluation.json'}")
    if config.video or config.render:
        task.video(directory / "evaluation.mp4", {"policy": policy}, config.device)
        log.info(f"wrote {directory / 'evaluation.mp4'}")


def describe() -> str:
    """Options."""
    return f"{__doc__}\n{OmegaConf.to_yaml(OmegaConf.structured(EvaluateConfig))}"


if __name__ == "__main__":
    sys.exit(program.main(run, describe, sys.argv[1:]))
