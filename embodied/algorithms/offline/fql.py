"""Flow Q-learning (FQL, arXiv 2502.02538) and Q-chunking (QC, arXiv 2507.07969) from recorded episodes.

The losses are those of `off_policy.qc`: a behaviour imitates all episodes, failures too. The policy acts by a one-step
actor that stays near the behaviour and maximises the values (FQL), or by the best of several samples of it (QC).

Differs from the papers, beside what `off_policy.qc` lists:
    - a chunk is one action, so that FQL of several executed actions is QC-FQL; with `task.executed=1` it is FQL;
    - rewards are divided by the deviation of the returns; in the stage rl the head that chooses among samples goes on
    with values in that unit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.algorithms.critics import CriticConfig
from embodied.algorithms.imitation.sft import SFTConfig
from embodied.algorithms.off_policy.action_values import ActionValues
from embodied.algorithms.off_policy.qc import QC, QCConfig, ranking_policy
from embodied.algorithms.off_policy.replay import recorded_transitions
from embodied.algorithms.off_policy.residual import with_small_actor
from embodied.configuration import Fraction, NonNegativeFloat, NonNegativeInt, PositiveInt, Range, common_options
from embodied.data.episodes import Episodes
from embodied.data.transitions import Transitions
from embodied.errors import UserError
from embodied.policy import RankingPolicy, Steering, TrainablePolicy
from embodied.world import ALONE, World


@dataclass
class OfflineQCConfig(CriticConfig):
    """Hyper-parameters of Q-chunking offline; options of the critics are those of CriticConfig, and `sft` of imitation.

    A one-step actor pays `distillation` for the squared distance from the behaviour, in half ranges, in units of the
    mean absolute value.
    """

    steps: NonNegativeInt = 10_000
    batch: PositiveInt = 256
    learning_rate: NonNegativeFloat = 3e-4
    value_learning_rate: NonNegativeFloat = 3e-4
    discount: Fraction = 0.99
    averaging: Annotated[float, Range(above=0, at_most=1)] = 0.005
    distillation: NonNegativeFloat = 10.0
    layer_norm: bool = True
    sft: SFTConfig = field(default_factory=lambda: SFTConfig(learning_rate=3e-4))

    @property
    def qc(self) -> QCConfig:
        """Options of Q-chunking with the same names."""
        return QCConfig(minibatch=self.batch, capacity=1, demonstration_share=0.0, **common_options(self, QCConfig))

    def build(self, policy: TrainablePolicy, generator: torch.Generator) -> OfflineQC:
        """Build the learner of `policy`; `generator` draws minibatches and noise.

        Raises:
            UserError: for a policy that cannot rank candidates, or actions without limits.
        """
        return OfflineQC(ranking_policy(policy, "offline=qc"), self, generator)


@dataclass
class FQLConfig(OfflineQCConfig):
    """OfflineQCConfig of a policy with a one-step actor."""

    def build(self, policy: TrainablePolicy, generator: torch.Generator) -> OfflineQC:
        """See `OfflineQCConfig.build`.

        Raises:
            UserError: for a policy without a one-step actor, too.
        """
        with_small_actor(policy, Steering.ONE_STEP, "offline=fql")
        return super().build(policy, generator)


class OfflineQC(QC):
    """Q-chunking on stored episodes."""

    def __init__(
        self, policy: RankingPolicy, config: OfflineQCConfig, generator: torch.Generator, q: ActionValues | None = None
    ) -> None:
        super().__init__(policy, config.qc, None, generator, q)
        self.steps = config.steps
        self.transitions: Transitions | None = None
        self._act_by_values()  # from the first step on, so that learners of the stage rl can refuse it before

    def fit(self, episodes: Episodes, steps: int, world: World = ALONE) -> dict[str, float]:
        """Take `steps` gradient steps on `episodes`; returns the last metrics.

        Raises:
            UserError: for several processes, and for episodes with unknown rewards, see `recorded_transitions`.
        """
        if world.size > 1:
            raise UserError("offline=qc, fql and co_rft learn in one process; use offline=iql in several")
        self.transitions = recorded_transitions(self.policy, episodes, self.config.discount, self.transitions)
        self.q.unit = self.transitions.scale
        metrics: dict[str, Tensor] = {}
        for _ in range(steps):
            batch = self._batch(self.transitions).to(self.policy.device)
            metrics = self._learn(batch, batch, min(1.0, self.gradient_steps / max(1, self.steps)))
        return {name: float(value) for name, value in metrics.items()}

    def _batch(self, transitions: Transitions) -> TensorDict:
        """Minibatch of `transitions`."""
        rows = transitions.draw(self.config.minibatch, self.generator)
        return transitions.take(rows, self.policy.contract.horizon)

    def values(self) -> dict[str, Any] | None:
        """Critics with which the stage rl goes on, see `ActionValues.in_rewards`."""
        return self.q.in_rewards()
