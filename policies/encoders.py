"""Encoders from observations to features: one class for each kind of observation, chosen by the contract."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum
from typing import Self

from tensordict import TensorDict
from torch import Tensor, nn


class EncoderKind(Enum):
    """`encoder=` of a policy; AUTO is OBJECTS or PICTURES if actors may read such observations, and FLAT otherwise.

    PLAIN has no layers, as diffusion_policy's policies of states.
    """

    AUTO = "auto"
    OBJECTS = "objects"
    PICTURES = "pictures"
    FLAT = "flat"
    PLAIN = "plain"


class Encoder(nn.Module, ABC):
    """Observations [N] to features [N, out_features]; its normalisation statistics are buffers."""

    out_features: int

    def read(self, observation: TensorDict) -> TensorDict:
        """`observation` in the form that `forward` and augmentations use; reading twice changes nothing."""
        return observation

    @abstractmethod
    def fit(self, observation: TensorDict) -> None:
        """Compute normalisation statistics from observations [N]."""

    @abstractmethod
    def forward(self, observation: TensorDict) -> Tensor:
        """Features [N, out_features]; RuntimeError before `fit`."""

    @abstractmethod
    def begin_like(self, other: Self) -> None:
        """Copy the weights of `other`, which reads the same or less; weights for anything else stay new."""

    @abstractmethod
    def identity(self, observation: TensorDict) -> Tensor:
        """Values [N, B] that distinguish observations; deterministic noise is drawn from them."""
