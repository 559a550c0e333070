"""Residual reinforcement learning: a small actor corrects the actions of a frozen policy (arXiv 2412.13630).

The corrected action is a = clip(a_base + s u), u in [-1, 1], learned by soft actor-critic; critics read a. With
demonstrations in every batch and more critics it resembles ResFiT (arXiv 2509.19301), which has TD3 in place of SAC.
Where the base acts alone in the first decisions of episodes, the residual learns from the states that the base reaches
(Probe, Learn, Distill, arXiv 2511.00091).

Differs from the papers:
    - the actor corrects the K executed actions of a chunk at once, from the observation and the base chunk;
    - `progressive_steps` of policy decorator are 0 by default: exploration begins with residuals of mean zero in all
      decisions, not in a share of them that grows;
    - the decisions of a hand-over are drawn, not the seconds, and the critics are not initialised by Cal-QL as in PLD;
    - base chunks of targets and of the actor's loss are generated anew, with new noise, in every gradient step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from embodied.algorithms.off_policy.sac import SAC, SACConfig
from embodied.algorithms.small_actor import SmallActor, with_small_actor
from embodied.configuration import NonNegativeInt, PositiveFloat
from embodied.data.episodes import Episodes
from embodied.environment import Environment
from embodied.policy import Steering, TrainablePolicy
from embodied.rollout.hand_over import HandOverCollector


@dataclass
class ResidualConfig(SACConfig):
    """SACConfig of the residual; its range is `policy.steering.residual_scale`.

    The base acts alone in the first 0 to `base_decisions_high` decisions of an episode, and in a share of the others
    that falls from 1 to 0 over the first `progressive_steps` control steps.
    """

    updates: PositiveFloat = 0.25
    warmup: NonNegativeInt = 2_000
    layer_norm: bool = True
    initial_temperature: PositiveFloat = 0.01
    entropy_in_target: bool = False
    base_decisions_high: NonNegativeInt = 0
    progressive_steps: NonNegativeInt = 0

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
        encode = partial(steered.encoded, generates=True)
        learner = SAC(policy, self, generator, demonstrations, SmallActor(steered), encode=encode)
        learner.collector = partial(
            HandOverCollector,
            base_decisions_high=self.base_decisions_high,
            progressive_steps=self.progressive_steps,
        )
        steered.start_steering()
        return learner
