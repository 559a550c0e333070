"""Options of a run as an experiment, whatever its parts are."""

from __future__ import annotations

from dataclasses import dataclass, field

from embodied.algorithms.sft import SFTConfig
from embodied.command_line.config import at_least
from embodied.errors import UserError
from embodied.precision import Precision
from embodied.rollout.storage import Storage

AUTO = "auto"


@dataclass
class ExperimentConfig:
    """Sizes of a run.

    RL takes `env_steps` control steps in `num_envs` environments, saving every `checkpoint_every` iterations.
    Evaluations run `evaluation_starts` initial states of each task and distribution, those of what RL is compared with
    and of other wordings at most the first `comparison_starts` of them (null: all). RL is also evaluated every
    `evaluate_every_steps` control steps, on other ones (auto: as often as 5% of the time allow, null: never).
    `control` and `video` can be turned off. `stages` are sft, rl or both; if None both, or rl without demonstrations.
    `start_from` names a run, a checkpoint or a .safetensors file with the policy's initial weights and statistics. The
    run computes in `precision` unless the policy has its own; with `overlap` RL collects the next rollout beside the
    update, by the policy from before it; `storage` places rollouts on the simulator's device, in
    CPU memory or on disk.
    """

    num_envs: int = 100
    env_steps: int = 1_050_000
    checkpoint_every: int = 10
    evaluation_starts: int = 50
    comparison_starts: int | None = None
    evaluation_envs: int = 100
    evaluate_every_steps: int | str | None = AUTO
    control: bool = True
    video: bool = True
    stages: list[str] | None = None
    start_from: str | None = None
    precision: Precision = Precision.FLOAT32
    overlap: bool = False
    storage: Storage = Storage.DEVICE
    sft: SFTConfig = field(default_factory=SFTConfig)

    def __post_init__(self) -> None:
        """Raise UserError for impossible sizes or stages."""
        at_least(self, 0, "env_steps")
        at_least(self, 1, "num_envs", "checkpoint_every", "evaluation_starts", "evaluation_envs")
        if self.comparison_starts is not None:
            at_least(self, 1, "comparison_starts")
        if self.stages is not None and tuple(self.stages) not in (("sft",), ("rl",), ("sft", "rl")):
            raise UserError(f"expected stages=[sft], [rl] or [sft,rl], got {list(self.stages)}")
        every = self.evaluate_every_steps
        if every not in (AUTO, None) and not (isinstance(every, int) and every >= 0):
            raise UserError(f"expected evaluate_every_steps=auto, null or a number of steps, got {every}")
