"""Gaussian policy with attention from the own state to neighbours and obstacles, for swarms on small processors.

Based on the attention policies of arXiv 2309.13285. Difference: one attention over neighbours and obstacles together,
with the own state among the tokens, so that an empty neighbourhood is no special case.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from embodied.configuration import PositiveInt
from embodied.contract import Contract
from embodied.errors import UserError
from embodied.export.network import PRESENT, TokenAttention, Tokens
from policies.mlp import MLPConfig, MLPPolicy


@dataclass
class AttentionConfig(MLPConfig):
    """Width of the attention and of the layers after it (`head`); `hidden` is the critic's."""

    hidden: list[PositiveInt] = field(default_factory=lambda: [64, 64])
    width: PositiveInt = 32
    head: list[PositiveInt] = field(default_factory=lambda: [16])

    def build(self, contract: Contract) -> AttentionPolicy:
        """Build the policy for `contract`.

        Observations of shape [K, size] are tokens, the others form the own state.
        """
        return AttentionPolicy(contract, self)


class AttentionPolicy(MLPPolicy):
    """MLPPolicy whose actor treats the tokens of an observation [K, size] as a set.

    All tokens of one observation share their statistics. Rows whose element "present" is 0 are empty. The critic reads
    everything as one vector.

    Raises:
        UserError: if the contract has no tokens or no own state, if `reciprocal` names tokens, and for contracts that
            MLPPolicy does not support.
    """

    actor: nn.Sequential

    def __init__(self, contract: Contract, config: AttentionConfig) -> None:
        super().__init__(contract, config)
        places = _places(contract, self.actor_keys)
        self.tokens = [place for place in places if isinstance(place, Tokens)]
        state_columns = [place for place in places if isinstance(place, tuple)]
        if not self.tokens or not state_columns:
            raise UserError(
                f"policy=attention reads tokens [K, size] and an own state [size], got {self.actor_keys} of shapes "
                f"{[contract.observation[key].shape for key in self.actor_keys]}; use policy=mlp"
            )
        if names := [key for key in config.reciprocal if len(contract.observation[key].shape) == 2]:
            raise UserError(f"policy.reciprocal names {names}, which are tokens; expected distances of the own state")
        self.actor = nn.Sequential(TokenAttention(state_columns, self.tokens, config.width))
        for a, b in pairwise([config.width, *config.head]):
            self.actor.extend([nn.Linear(a, b), nn.Tanh()])
        last = nn.Linear([config.width, *config.head][-1], contract.horizon * contract.action.shape[-1])
        nn.init.orthogonal_(last.weight, 0.01)
        nn.init.zeros_(last.bias)
        self.actor.extend([last, nn.Tanh()])

    def dense_layers(self) -> None:
        """None: the layer of attention is not dense."""

    @torch.no_grad()
    def fit(self, observation: TensorDict, actions: Tensor) -> None:
        """Compute normalisation statistics from observations [N]; for tokens from all present rows of all of them."""
        super().fit(observation, actions)
        inputs = self.concatenated(observation, self.actor_keys)
        for group in self.tokens:
            # all rows of a group share one mean and deviation
            columns = slice(group.start, group.start + group.count * group.size)
            rows = inputs[:, columns].reshape(-1, group.size)
            mean, std = _statistics(rows, group.present)
            self.mean[columns], self.std[columns] = mean.repeat(group.count), std.repeat(group.count)


def _statistics(rows: Tensor, present: int | None) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each element over the present rows; `present` itself stays 0 or 1."""
    present_rows = rows if present is None else rows[rows[:, present] >= 0.5]
    mean = torch.zeros_like(rows[0])
    std = torch.ones_like(rows[0])
    if len(present_rows) > 1:
        mean = present_rows.mean(0)
        std = present_rows.std(0)
    if present is not None:
        mean[present] = 0.0
        std[present] = 1.0
    return mean, std


def _places(contract: Contract, keys: list[str]) -> list[Tokens | tuple[int, int]]:
    """Position of each observation in the flat vector: tokens, or first and last column of a part of the own state."""
    places: list[Tokens | tuple[int, int]] = []
    start = 0
    for key in keys:
        spec = contract.observation[key]
        stop = start + math.prod(spec.shape)
        if len(spec.shape) == 2:
            present = spec.names.index(PRESENT) if PRESENT in spec.names else None
            places.append(Tokens(start, spec.shape[0], spec.shape[1], present))
        else:
            places.append((start, stop))
        start = stop
    return places
