"""What turns observations into features: one class for each kind of observation, chosen by what the contract has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum
from typing import Self

from tensordict import TensorDict
from torch import Tensor, nn


class EncoderKind(Enum):
    """`encoder=` of a policy; AUTO is OBJECTS where the contract has object tokens, and FLAT otherwise."""

    AUTO = "auto"
    OBJECTS = "objects"
    FLAT = "flat"


class Encoder(nn.Module, ABC):
    """Observations [N] to features [N, out_features]; its normalisation statistics are buffers."""

    out_features: int

    def read(self, observation: TensorDict) -> TensorDict:
        """`observation` as `forward` and augmentations work on it; what was read before stays as it is."""
        return observation

    @abstractmethod
    def fit(self, observation: TensorDict) -> None:
        """Take normalisation statistics from observations [N]."""

    @abstractmethod
    def forward(self, observation: TensorDict) -> Tensor:
        """Features [N, out_features]; RuntimeError before `fit`."""

    @abstractmethod
    def begin_like(self, other: Self) -> None:
        """Take over the weights of `other`, which reads the same or less; where it reads less, the rest stays new."""

    @abstractmethod
    def identity(self, observation: TensorDict) -> Tensor:
        """Numbers [N, B] as they were observed that tell observations apart: what deterministic noise is drawn from."""
