"""Options of a training run, with which other programs compose a run's task and policy again.

This is where policies, simulators and robots are joined: the only module of the core that imports their packages.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from embodied.algorithms.registry import ALGORITHMS, OFFLINE
from embodied.configuration import PositiveFloat, PositiveInt, Seed
from embodied.environments.latency import LatencyConfig
from embodied.placement.registry import PLACEMENTS, PlacementOptions
from embodied.training.experiment import ExperimentConfig
from embodied.viewer.options import ViewerOptions
from policies.registry import POLICIES
from real_robot.recording.demonstrations import DemonstrationOptions
from real_robot.recording.recorded_task import RecordedTask
from sims.registry import TASKS

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
    run, or a checkpoint of it, unchanged; `eval_only` evaluates it. `plan` checks whether the run fits into `device_gb`
    of memory.
    """

    task: Any = MISSING
    policy: Any = MISSING
    algorithm: Any = MISSING
    offline: Any = None
    latency: LatencyConfig = field(default_factory=LatencyConfig)
    seed: Seed = 0
    device: str = "cpu"
    device_gb: PositiveFloat | None = None
    threads: PositiveInt | None = None
    wandb: str | None = None
    output: str | None = None
    resume: str | None = None
    eval_only: bool = False
    plan: bool = False
