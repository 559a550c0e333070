"""Options of a run as an experiment, independent of its parts."""

from __future__ import annotations

from dataclasses import dataclass, field

from embodied.algorithms.imitation.sft import SFTConfig
from embodied.algorithms.offline.rounds import RoundsConfig
from embodied.configuration import Configuration, NonNegativeInt, PositiveInt
from embodied.errors import UserError
from embodied.networks.precision import Precision
from embodied.rollout.storage import Storage

AUTO = "auto"
STAGES = "sft", "offline", "rl"
"""Stages that may be requested, in their order."""
FIRST_START = 1 << 23
"""First initial state of evaluations during RL, where the simulator does not limit them."""


@dataclass
class ExperimentConfig(Configuration):
    """Sizes of a run.

    RL takes `env_steps` control steps in `num_envs` environments, saving every `checkpoint_every` iterations.
    Evaluations run `evaluation_starts` initial states of each task and distribution, from `evaluation_first_start` on;
    on distributions other than that of training, and with other wordings, at most the first `comparison_starts` of them
    (null: all, 0: none). RL is also evaluated every `evaluate_every_steps` control steps, on other initial states
    (auto: as often as 5% of the time allow, null: never). `control` and `video` can be turned off. `stages` are some of
    sft, offline (the learner `offline`) and rl, in this order; if None sft and rl, or rl without demonstrations.
    `start_from` names a run, a checkpoint or a .safetensors file with the policy's initial weights and statistics. The
    run computes in `precision` unless the policy has its own; with `overlap` RL collects the next rollout during the
    update, by the policy from before it; `storage` places rollouts on the simulator's device, in CPU memory or on disk.
    Unknown actions of demonstrations are predicted by an inverse-dynamics model with `label_actions` gradient steps (0:
    such demonstrations are refused).
    `rounds` are those of the stage offline.
    """

    num_envs: PositiveInt = 100
    env_steps: NonNegativeInt = 1_050_000
    checkpoint_every: PositiveInt = 10
    evaluation_starts: PositiveInt = 50
    evaluation_first_start: NonNegativeInt = 0
    comparison_starts: NonNegativeInt | None = None
    evaluation_envs: PositiveInt = 100
    evaluate_every_steps: NonNegativeInt | str | None = AUTO
    control: bool = True
    video: bool = True
    stages: list[str] | None = None
    start_from: str | None = None
    precision: Precision = Precision.FLOAT32
    overlap: bool = False
    storage: Storage = Storage.DEVICE
    label_actions: NonNegativeInt = 0
    sft: SFTConfig = field(default_factory=SFTConfig)
    rounds: RoundsConfig = field(default_factory=RoundsConfig)

    def __post_init__(self) -> None:
        """Raise UserError for numbers out of range, and for unknown stages or evaluation intervals."""
        super().__post_init__()
        if self.stages is not None and self.stages != ([name for name in STAGES if name in self.stages] or None):
            raise UserError(
                f"expected stages of {', '.join(STAGES)} in this order, such as [sft,rl], got {self.stages}"
            )
        if self.evaluation_first_start + self.evaluation_starts > FIRST_START:
            raise UserError(
                f"evaluation_first_start={self.evaluation_first_start}: expected at most "
                f"{FIRST_START - self.evaluation_starts}, as later initial states are those of evaluations during RL"
            )
        every = self.evaluate_every_steps
        if isinstance(every, str) and every != AUTO:
            raise UserError(f"expected evaluate_every_steps=auto, null or a number of steps, got {every}")

    def check_learners(self, algorithm: object | None, offline: object | None) -> None:
        """Check that each requested stage has its learner, and that a learner `offline` has its stage.

        Raises:
            UserError: otherwise.
        """
        stages = self.stages or ["sft", "rl"]
        for stage, learner, argument in (("rl", algorithm, "algorithm"), ("offline", offline, "offline")):
            if stage in stages and learner is None:
                raise UserError(
                    f"stages={stages} has no learner for {stage}; set {argument}=NAME, or pass its config to Experiment"
                )
        if self.rounds.are_used and "offline" not in stages:
            raise UserError(f"rounds are those of the stage offline, not of stages={stages}; use stages=[sft,offline]")
        if self.rounds.imitate_anew and not self.sft.steps:
            raise UserError("rounds.imitate_anew takes sft.steps gradient steps, which are 0; use more, or false")
        if offline is not None and "offline" not in stages:
            raise UserError(f"the learner offline= is not used by stages={stages}; use stages=[offline]")
