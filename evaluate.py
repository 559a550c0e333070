"""Measure a trained policy: python evaluate.py checkpoint=DIR [key=value ...].

DIR is a run, such as outputs/libero_pick/<time>, or one of its checkpoints. Every episode is deterministic: the same
command gives the same numbers. Options, with their defaults, are printed by --help.
"""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from omegaconf import MISSING, OmegaConf

from embodied import checkpoint
from embodied.config import compose
from embodied.evaluation import evaluate
from embodied.files import complete_or_absent
from embodied.logging import setup_console
from embodied.report import evaluation_table
from train import GROUPS, TrainConfig

log = logging.getLogger("embodied")


@dataclass
class EvaluateConfig:
    """`suite` and `assets` default to those of training, `distributions` to all of the task.

    `episodes` initial states of each task are run; `seed` picks which of the wide distribution. `video=true` films
    some of them.
    """

    checkpoint: str = MISSING
    suite: str | None = None
    assets: str | None = None
    distributions: list[str] | None = None
    episodes: int = 50
    seed: int = 0
    num_envs: int = 100
    device: str = "cpu"
    video: bool = False


def main(arguments: list[str]) -> int:
    """Compose, load, measure; returns the exit status."""
    setup_console()
    if {"-h", "--help"} & set(arguments):
        options = "\n".join(f"  {field.name}={field.default}" for field in fields(EvaluateConfig))
        log.info(f"{__doc__}\n{options}")
        return 0
    try:
        config, _ = compose(EvaluateConfig, "evaluate", arguments, {})
        if OmegaConf.is_missing(OmegaConf.structured(config), "checkpoint"):
            raise ValueError("expected checkpoint=DIR, such as outputs/libero_pick/<time>")
        measure(config)
    except (ValueError, FloatingPointError) as error:
        log.error(f"error: {error}")
        return 1
    return 0


def measure(config: EvaluateConfig) -> None:
    """Run all evaluations, print the table, write evaluation.json into the run."""
    saved = checkpoint.load(config.checkpoint)
    changes = [f"task.{name}={value}" for name in ("suite", "assets") if (value := getattr(config, name)) is not None]
    trained, _ = compose(TrainConfig, "train", changes, GROUPS, saved.config)
    task, distributions = trained.task, config.distributions or trained.task.distributions
    policy = trained.policy.build(saved.contract).to(config.device)
    policy.load_state_dict(saved.policy)
    results = {}
    for distribution in distributions:
        env = task.environment(config.num_envs, distribution, "eval")
        saved.bind(env.contract)
        results[distribution] = evaluate(
            env, policy, starts_per_task=config.episodes, first_start=config.seed * config.episodes,
            device=config.device, progress=distribution,
        )  # fmt: skip
    run = saved.path.parent.parent if saved.path else Path()
    record: dict[str, Any] = {"checkpoint": str(saved.path), "assets": task.asset_kind, **asdict(config)}
    record["evaluations"] = [{"distribution": name, **result.summary()} for name, result in results.items()]
    with complete_or_absent(run / "evaluation.json") as temporary:
        temporary.write_text(json.dumps(record, indent=2) + "\n")
    if config.video:
        task.video(run / "evaluation.mp4", {"policy": policy}, config.device)
    files = ["evaluation.json", *(["evaluation.mp4"] if config.video else [])]
    log.info(
        f"{evaluation_table(results)}\n{task.asset_kind} assets; wrote {', '.join(str(run / file) for file in files)}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
