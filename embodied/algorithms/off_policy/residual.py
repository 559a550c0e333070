"""Residual reinforcement learning: a small actor corrects the actions of a frozen policy (arXiv 2412.13630).

The corrected action is a = clip(a_base + s u), u in [-1, 1], learned by soft actor-critic; critics read a. With
demonstrations in every batch and more critics it resembles ResFiT (arXiv 2509.19301), which has TD3 in place of SAC.

Differs from the papers:
    - the actor corrects the K executed actions of a chunk at once, from the observation and the base chunk;
    - exploration begins with residuals of mean zero in all decisions, not in a share of them that grows;
    - base chunks of targets and of the actor's loss are generated anew, with new noise, in every gradient step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from embodied.algorithms.off_policy.sac import SAC, SACConfig
from embodied.algorithms.small_actor import SmallActor, with_small_actor
from embodied.configuration import NonNegativeInt, PositiveFloat
from embodied.data.episodes import Episodes
from embodied.environment import Environment
from embodied.policy import Steering, TrainablePolicy


@dataclass
class ResidualConfig(SACConfig):
    """SACConfig of the residual; its range is `policy.steering.residual_scale`."""

    updates: PositiveFloat = 0.25
    warmup: NonNegativeInt = 2_000
    layer_norm: bool = True
    initial_temperature: PositiveFloat = 0.01
    entropy_in_target: bool = False

    def build(
        self,
        policy: TrainablePolicy,
        demonstrations: Episodes | None,
        env: Environment,
        generator: torch.Generator,
    ) -> SAC:
        """Build the learner of `policy`, whose small actor acts from now on.

        Raises:
            UserError: for a policy without a residual, and demonstrations that are missing or lack rewards.
        """
        steered = with_small_actor(policy, Steering.RESIDUAL, "algorithm=residual")
        learner = SAC(policy, self, generator, demonstrations, SmallActor(steered))
        steered.start_steering()
        return learner
