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
from tensordict import TensorDict
from torch import Tensor, nn

from embodied.algorithms.off_policy.sac import SAC, SACConfig
from embodied.configuration import NonNegativeInt, PositiveFloat
from embodied.data.episodes import Episodes
from embodied.environment import Environment
from embodied.errors import UserError
from embodied.policy import SteeredPolicy, Steering, TrainablePolicy


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


class SmallActor:
    """The small actor of `policy`, as soft actor-critic reads it."""

    def __init__(self, policy: SteeredPolicy) -> None:
        self.policy = policy

    @property
    def noise_shape(self) -> tuple[int, ...]:
        """Shape of the noise of one observation."""
        return self.policy.steering_noise_shape

    def sample(self, observation: TensorDict, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Actions [N, H, A] in robot units from standard normal `noise`, and their log_prob [N, 1]."""
        actions, log_prob, _ = self.policy.steered(observation, noise)
        return actions, log_prob

    def actor_parameters(self) -> list[nn.Parameter]:
        """Parameters of the small actor alone."""
        return self.policy.steering_parameters()


def with_small_actor(policy: TrainablePolicy, kind: Steering, option: str) -> SteeredPolicy:
    """The `policy`, whose small actor is of `kind`.

    Raises:
        UserError: for another policy.
    """
    if isinstance(policy, SteeredPolicy) and policy.steering is kind:
        return policy
    raise UserError(
        f"expected a policy with a small actor for {option}; use policy=flow policy.steering.kind={kind.value}"
    )
