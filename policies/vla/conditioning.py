"""Vision-language-action models whose prompt says whether actions have a large advantage (pi*0.6, arXiv 2511.14759).

`offline=recap` trains the label, such as "Advantage: positive", and chunks are then generated under it, by
classifier-free guidance (arXiv 2505.23458). A label that was never learned would be an unknown prompt: before
`start_conditioning` there is none.

Letters: N observations, H actions of a chunk, D action elements with padding, W width of a hidden state.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.policy import Condition, TrainablePolicy
from policies.vla.model import Prefix


class Conditioned(TrainablePolicy):
    """Base of policies whose prefixes may have a label, with a guidance, None for those without labels.

    A guidance of 0 ignores the label, 1 samples from the conditional policy, and more leads further away from the
    average one.
    """

    acts_positive: Tensor
    """Whether `act` generates chunks under the label of a large advantage, a scalar."""

    def add_condition(self, guidance: float | None) -> None:
        """Make the policy `conditioned` unless the `guidance` is None."""
        self.guidance = guidance
        self.conditioned = guidance is not None
        if self.conditioned:
            self.register_buffer("acts_positive", torch.zeros((), dtype=torch.bool))
            self.register_load_state_dict_pre_hook(_with_own_condition)

    def start_conditioning(self) -> None:
        """See `TrainablePolicy.start_conditioning`."""
        assert self.conditioned
        self.acts_positive.fill_(True)

    @property
    def is_guided(self) -> bool:
        """Whether chunks are generated under the label of a large advantage."""
        return self.conditioned and bool(self.acts_positive)

    @abstractmethod
    def _prefix(self, observation: TensorDict, condition: Tensor | None = None) -> Prefix:
        """Prefixes [N]; with a `condition` [M], N or a multiple, [M] of the observations in turn with its labels."""

    @abstractmethod
    def _velocity(self, state: Tensor, prefix: Prefix, x: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        """Velocity [N, H, D] and hidden state [N, H, W] at noisy chunks `x` [N, H, D] and times [N] or [N, H]."""

    @abstractmethod
    def _state(self, observation: TensorDict) -> Tensor:
        """Standardised states [N, S]."""

    @torch.no_grad()
    def _inputs_of_features(self, observation: TensorDict) -> tuple[Tensor, Prefix]:
        """See `Steerable._inputs_of_features`: features are those under a prompt without a label."""
        return self._state(observation), self._prefix(observation)

    def _acting_prefix(self, observation: TensorDict) -> Prefix:
        """Prefixes under which chunks are generated, [N]; if guided [2N], without a label, then with POSITIVE."""
        if not self.is_guided:
            return self._prefix(observation)
        conditions = torch.tensor([Condition.NONE, Condition.POSITIVE], device=self.device)
        return self._prefix(observation, conditions.repeat_interleave(len(observation)))

    def _guided(self, state: Tensor, prefix: Prefix, x: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        """See `_velocity`, for prefixes of `_acting_prefix`."""
        count = len(x)
        if len(prefix.real) == count:
            return self._velocity(state, prefix, x, time)
        if self.guidance == 1.0:
            return self._velocity(state, prefix[count:], x, time)
        state, x, time = (torch.cat((each, each)) for each in (state, x, time))
        velocity, hidden = self._velocity(state, prefix, x, time)
        # v = (1 - w) v(none) + w v(positive)
        return torch.lerp(velocity[:count], velocity[count:], self.guidance), hidden[count:]


def _with_own_condition(policy: Conditioned, state: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Let weights of the same policy without a condition act without a label."""
    state.setdefault(f"{prefix}acts_positive", torch.zeros_like(policy.acts_positive))
