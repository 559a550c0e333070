"""Critic of a vision-language-action model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from embodied.contract import ACTION_PREFIX, Contract
from embodied.errors import UserError
from policies.encoders.libero import OBSERVATIONS, ObjectEncoder
from policies.generation.base import head

WIDTH = 64


class Reads(Enum):
    """Inputs of the critic: HIDDEN states of the model, or OBJECTS that a simulator knows.

    AUTO: objects if available.
    """

    AUTO = "auto"
    HIDDEN = "hidden"
    OBJECTS = "objects"


class Critic(nn.Module):
    """Critic that reads objects, with an encoder of its own, or hidden states, which it does not train.

    Under a delay it also reads the action prefix, within limits of -1 and 1.

    Raises:
        UserError: if objects are requested and the contract lacks them.
    """

    limits: Tensor

    def __init__(self, contract: Contract, reads: Reads, hidden_size: int, width: int, outputs: int) -> None:
        super().__init__()
        missing = [key for key in OBSERVATIONS if key not in contract.observation]
        if reads is Reads.OBJECTS and missing:
            raise UserError(
                f"policy.critic=objects reads {', '.join(missing)}, which this task lacks; use critic=hidden"
            )
        self.objects = None if missing or reads is Reads.HIDDEN else ObjectEncoder(WIDTH)
        self.feature_size = self.objects.out_features if self.objects else hidden_size
        self.delay = contract.delay
        self.feature_size += self.delay * contract.action.shape[-1]
        limits = torch.tensor([contract.action.low, contract.action.high])
        self.register_buffer("limits", limits, persistent=False)
        self.out = head(self.feature_size, width, outputs)

    @property
    def reads(self) -> Sequence[str]:
        """Names of the observations that it reads, beside the action prefix."""
        return self.objects.reads if self.objects else ()

    def fit(self, observation: TensorDict) -> None:
        """Compute statistics of its inputs from observations [N].

        Raises:
            UserError: for observations without objects.
        """
        if not self.objects:
            return
        if missing := [key for key in OBSERVATIONS if key not in observation]:
            raise UserError(f"fit needs all observations that actor and critic read; add {', '.join(missing)}")
        self.objects.fit(observation)

    def forward(self, features: Tensor) -> Tensor:
        """Outputs [N, outputs] of the value from `features` [N, feature_size]."""
        return self.out(features)

    def features(self, observation: TensorDict, hidden: Callable[[], Tensor]) -> Tensor:
        """Encoded objects, or `hidden` states [N, hidden_size] without gradients, computed only if they are read.

        The action prefix, if there is one, comes last.
        """
        if self.objects:
            features = self.objects(observation)
        else:
            with torch.no_grad():
                features = hidden()
        if not self.delay:
            return features
        low, high = self.limits
        prefix = (2.0 * observation[ACTION_PREFIX] - low - high) / (high - low)
        return torch.cat((features, prefix.flatten(1)), -1)
