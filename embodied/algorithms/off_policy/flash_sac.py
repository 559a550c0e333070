"""FlashSAC (arXiv 2604.04539): soft actor-critic with few updates of large batches, and bounded networks.

The critics (`normalised_critics.py`) have unit weights and batch normalisation, learn distributions of returns (C51,
arXiv 1707.06887) in a bounded range, and rewards are scaled so that returns fit.

Differs from the paper, beside what differs in `sac.py`:
    - the actor is `policy=squashed` as it is, without normalisation and unit weights;
    - each decision draws its own noise, which the paper holds for up to 16;
    - learning rates are constant, which the paper halves over a run;
    - `updates` gradient steps per decision: 1 as in its runs of one environment; 1/512 in those of 1,024.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from tensordict import TensorDict

from embodied.algorithms.critics import Activation, Critics
from embodied.algorithms.off_policy.normalised_critics import NormalisedCritics
from embodied.algorithms.off_policy.sac import SAC, SACConfig
from embodied.algorithms.rewards.reward_scale import RunningReturnScale
from embodied.configuration import FiniteFloat, PositiveFloat, PositiveInt, Range
from embodied.data.episodes import Episodes
from embodied.environment import Environment
from embodied.errors import UserError
from embodied.networks.value_head import CriticHead
from embodied.policy import Reparameterised, TrainablePolicy
from embodied.rollout.rollout import Rollout
from embodied.world import ALONE, World


@dataclass
class FlashSACConfig(SACConfig):
    """SACConfig with FlashSAC's defaults: a block of the critics for each of `hidden`, which are equally wide.

    Rewards are divided by the standard deviation of returns, or by their largest amount over `value_high` if that is
    more.
    """

    policy_delay: PositiveInt = 2
    minibatch: PositiveInt = 512
    averaging: Annotated[float, Range(above=0, at_most=1)] = 0.01
    initial_temperature: PositiveFloat = 0.01
    target_std: PositiveFloat = 0.15
    head: CriticHead = CriticHead.C51
    value_low: FiniteFloat | None = -5.0
    value_high: FiniteFloat | None = 5.0

    def __post_init__(self) -> None:
        """Raise UserError for options of other critics."""
        super().__post_init__()
        if not self.hidden or len(set(self.hidden)) > 1:
            raise UserError(f"expected equally wide layers for algorithm=flash_sac, got hidden={self.hidden}")
        if self.layer_norm or self.activation is not Activation.RELU:
            raise UserError("critics of algorithm=flash_sac have batch norm and ReLU; use algorithm=sac for others")
        if self.head is CriticHead.SCALAR or self.limits[1] <= 0.0:
            raise UserError("algorithm=flash_sac scales rewards by value_high; use head=c51 or hl_gauss, value_high=5")
        if self.continue_values:
            raise UserError("critics of the stage offline have other layers than algorithm=flash_sac's; use wsrl")

    def critics(self, inputs: int) -> Critics:
        """Networks of critics that read `inputs` numbers."""
        return NormalisedCritics(inputs, self)

    def build(
        self,
        policy: TrainablePolicy,
        demonstrations: Episodes | None,
        env: Environment,
        generator: torch.Generator,
    ) -> FlashSAC:
        """Build the learner of `policy`, see SACConfig.build."""
        if not isinstance(policy, Reparameterised):
            raise UserError("algorithm=flash_sac needs a policy with reparameterised samples; use policy=squashed")
        return FlashSAC(policy, self, generator, demonstrations, policy)


class FlashSAC(SAC):
    """SAC with scaled rewards, whose critics read transitions and what follows in one pass."""

    config: FlashSACConfig

    def __init__(
        self,
        policy: Reparameterised,
        config: FlashSACConfig,
        generator: torch.Generator,
        demonstrations: Episodes | None,
        actor: Reparameterised,
    ) -> None:
        super().__init__(policy, config, generator, demonstrations, actor)
        self.reward_scale = RunningReturnScale(config.discount, config.limits[1])

    def update(self, rollout: Rollout, progress: float, world: World = ALONE) -> dict[str, float]:
        """See SAC.update; the scale of rewards is a metric, too."""
        self.reward_scale.add(rollout)
        metrics = super().update(rollout, progress, world)
        return metrics | {"reward_scale": self.reward_scale()} if metrics else {}

    def _batch(self) -> TensorDict:
        """Transitions with scaled rewards."""
        batch = super()._batch()
        return batch.set("reward", batch["reward"] * self.reward_scale())

    def state_dict(self) -> dict[str, Any]:
        """See SAC.state_dict, with the scale of rewards."""
        return super().state_dict() | {"reward_scale": self.reward_scale.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        super().load_state_dict(state)
        self.reward_scale.load_state_dict(state["reward_scale"])
