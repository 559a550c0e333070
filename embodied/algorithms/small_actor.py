"""Small actor that steers a frozen policy: the check that a policy has one, and the actor as learners read it."""

from __future__ import annotations

from tensordict import TensorDict
from torch import Tensor, nn

from embodied.errors import UserError
from embodied.policy import SteeredPolicy, Steering, TrainablePolicy


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
