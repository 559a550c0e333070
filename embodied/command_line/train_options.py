"""Options of a training run, with which other programs compose a run's task and policy again.

This is where policies, simulators and robots are joined: the only module of the core that imports their packages.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from omegaconf import MISSING

from embodied.algorithms.registry import ALGORITHMS, OFFLINE
from embodied.command_line.config import compose
from embodied.commands import option
from embodied.configuration import PositiveFloat, PositiveInt, Seed
from embodied.environments.latency import LatencyConfig
from embodied.errors import UserError
from embodied.placement.registry import PLACEMENTS, PlacementOptions
from embodied.starting_point import StartingPoint
from embodied.training.experiment import ExperimentConfig
from embodied.viewer.options import ViewerOptions
from policies.registry import POLICIES
from policies.vla import starting_points
from policies.vla.pi0 import Pi0Config
from policies.vla.tokens import TokensConfig
from real_robot.recording.demonstrations import DemonstrationOptions
from real_robot.recording.recorded_task import RecordedTask
from sims.registry import TASKS

log = logging.getLogger("embodied")
GROUPS = {
    "task": {**TASKS, "dataset_schema": RecordedTask},
    "policy": POLICIES,
    "algorithm": ALGORITHMS,
    "offline": OFFLINE,
    "placement": PLACEMENTS,
}
"""Config classes by name, for each part of a run that is chosen by name."""


@dataclass
class TrainConfig(ViewerOptions, DemonstrationOptions, PlacementOptions, ExperimentConfig):
    """Options of train.py: options of a run and of its parts.

    `offline` is the learner of the stage offline. `seed` determines all random numbers. `device` is for policy and
    learner; PyTorch uses `threads` cores. `wandb` names a project, `output` a new run's directory. `resume` continues a
    run, or a checkpoint of it, unchanged; `eval_only` evaluates it. `reflex` is the folder of a reflex, which
    checks chunks (reflex.py). `plan` checks whether the run fits into `device_gb` of memory.
    """

    task: Any = MISSING
    policy: Any = MISSING
    algorithm: Any = MISSING
    offline: Any = None
    latency: LatencyConfig = field(default_factory=LatencyConfig)
    reflex: str | None = None
    seed: Seed = 0
    device: str = "cpu"
    device_gb: PositiveFloat | None = None
    threads: PositiveInt | None = None
    wandb: str | None = None
    output: str | None = None
    resume: str | None = None
    eval_only: bool = False
    plan: bool = False


def starting_options(weights: str) -> list[str]:
    """Options of train.py that make a policy of published `weights`, without those of a task.

    Raises:
        UserError: for weights that cannot be read.
    """
    start = starting_points.read(weights)
    if start is None:
        raise UserError(f"checkpoint={weights} has no config.json; of adapters merge them into their weights first")
    return [f"policy={start.policy}", "algorithm=ppo", option("policy.weights", weights)]


def with_starting_point(arguments: Sequence[str]) -> list[str]:
    """Options of the published weights in policy.weights (`Task.published_options`), and then `arguments`, which win.

    A line in the log names the convention and the reason.

    Raises:
        UserError: for weights that cannot be read.
    """
    if not any(each.startswith("policy.weights=") for each in arguments):
        return [*arguments]
    config, _ = compose(TrainConfig, "train", arguments, GROUPS)
    if not isinstance(config.policy, Pi0Config | TokensConfig) or not config.policy.weights:
        return [*arguments]
    start = starting_points.read(config.policy.weights)
    options = config.task.published_options(start) if start else []
    if start:
        report(start, config.task.name, tuple(options))
    return [*options, *arguments]


@cache
def report(start: StartingPoint, task: str, options: tuple[str, ...]) -> None:
    """Log the convention of `start` in `task`, with its `options` and the reason, once."""
    source = f"{start.weights}: {start.policy} as written by {start.program}"
    if options:
        chosen = f"{source}, evaluated as its authors do, because {start.evidence}: {' '.join(options)}"
        log.info(f"{chosen}; options that you set win")
    else:
        why = f"its files name {start.benchmark}" if start.benchmark else "its files name no benchmark"
        log.info(f"{source}, with the observations of task={task} as they are, because {why}")
