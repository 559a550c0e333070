"""Encoders from observations to features: one class for each kind of observation, chosen by the contract."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum
from typing import Self

import torch
from tensordict import TensorDict
from torch import Generator, Tensor, nn

from embodied.contract import Contract
from embodied.networks.words import WordTable


class EncoderKind(Enum):
    """Value of the option `encoder` of a policy.

    AUTO is OBJECTS or PICTURES if actors may read such observations, and FLAT otherwise. PLAIN has no layers, as in
    diffusion_policy's policies of states.
    """

    AUTO = "auto"
    OBJECTS = "objects"
    PICTURES = "pictures"
    FLAT = "flat"
    PLAIN = "plain"


class Encoder(nn.Module, ABC):
    """Encoder of observations [N] as features [N, out_features]; its normalisation statistics are buffers.

    It reads the observations `reads`, of which `seeds` distinguish one from another: deterministic noise is drawn from
    their bytes. `tables` convert texts to word ids.
    """

    out_features: int
    reads: Sequence[str]
    seeds: Sequence[str]

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[str, WordTable] = {}

    @property
    def remarks(self) -> list[str]:
        """Sentences for reports on how observations are read."""
        return []

    def read(self, observation: TensorDict) -> TensorDict:
        """Copy of `observation` with word ids [..., L] instead of texts, as `forward` and augmentations use it.

        Reading twice changes nothing.
        """
        texts = {key: table for key, table in self.tables.items() if observation[key].dtype != torch.int64}
        words = {key: table(observation[key])[..., : max(1, table.longest)] for key, table in texts.items()}
        return observation.copy().update(words) if words else observation

    def check_export(self) -> None:
        """Raise UserError if exported networks cannot read the same observations."""

    @abstractmethod
    def fit(self, observation: TensorDict) -> None:
        """Compute normalisation statistics from observations [N]."""

    @abstractmethod
    def forward(self, observation: TensorDict) -> Tensor:
        """Features [N, out_features]; RuntimeError before `fit`."""

    @abstractmethod
    def begin_like(self, other: Self) -> None:
        """Copy the weights of `other`, which reads the same or less; weights of further inputs stay as initialised."""

    @abstractmethod
    def example(self, contract: Contract, count: int, rows: int, generator: Generator) -> TensorDict:
        """Random observations [count] of `contract` as `read` returns them, around the statistics, on the CPU.

        Axes of variable length have `rows`.
        """

    def identity(self, observation: TensorDict) -> Tensor:
        """Concatenated observations `seeds`, [N, B]."""
        return torch.cat([observation[key].flatten(1) for key in self.seeds], -1)
