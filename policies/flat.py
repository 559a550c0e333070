"""Fixed-size observations as one vector, as small control policies read them, and an encoder for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Self

import torch
from tensordict import TensorDict
from torch import Generator, Tensor, nn

from embodied.contract import Contract
from embodied.errors import UserError
from embodied.export.network import distance, reciprocal
from embodied.world import ALONE, World
from policies.encoders.base import Encoder

SMALLEST_SPREAD = 1e-6
"""Largest deviation of a constant element, in its units or as a share of its mean: smaller ones are rounding."""


def divisor(spread: Tensor, centre: Tensor) -> Tensor:
    """Divisor that normalises elements of deviation `spread` around `centre`; 1 where they are constant."""
    return torch.where(spread <= SMALLEST_SPREAD * centre.abs().clamp_min(1.0), 1.0, spread)


class FlatObservations(nn.Module):
    """Float32 observations of a contract, concatenated and standardised; privileged ones come last.

    `std` is the measured deviation of each element, 0 of constants; `scale` is the divisor of inputs.
    `distances` are read as `network.reciprocal`, which resolves near distances to the centimetre. Errors name `reader`
    and suggest `other`.

    Raises:
        UserError: if an observation has a variable axis, there is none but one is `required`, or `distances` names none
            of them.
    """

    fitted: Tensor
    mean: Tensor
    std: Tensor

    def __init__(
        self, contract: Contract, distances: Sequence[str], reader: str, other: str, *, required: bool = True
    ) -> None:
        super().__init__()
        specs = {key: spec for key, spec in contract.observation.items() if spec.dtype == "float32"}
        self.actor_keys = [key for key, spec in specs.items() if not spec.privileged]
        self.keys = [*self.actor_keys, *(key for key, spec in specs.items() if spec.privileged)]
        varying = [key for key in self.keys if -1 in specs[key].shape]
        if varying or (required and not self.actor_keys):
            raise UserError(f"{reader} reads float32 observations of fixed size; got {varying or 'none'}: use {other}")
        self.reciprocal = list(distances)
        if unknown := [key for key in distances if key not in self.keys]:
            raise UserError(f"policy.reciprocal names {unknown}; expected some of {', '.join(self.keys)}")
        self.observed, self.feature_size = (
            sum(math.prod(specs[key].shape) for key in keys) for keys in (self.actor_keys, self.keys)
        )
        self.register_buffer("fitted", torch.zeros((), dtype=torch.bool))
        self.register_buffer("mean", torch.zeros(self.feature_size))
        self.register_buffer("std", torch.ones(self.feature_size))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))  # number of observations in mean and std

    @torch.no_grad()
    def fit_statistics(self, observation: TensorDict) -> None:
        """Compute mean and standard deviation of every element from observations [N]."""
        inputs = self.concatenated(observation, self.keys)
        if self.feature_size:
            self.mean.copy_(inputs.mean(0))
            self.std.copy_(inputs.std(0))
        self.count.fill_(len(inputs))
        self.fitted.fill_(True)

    @torch.no_grad()
    def merge_statistics(self, observation: TensorDict, world: World = ALONE) -> None:
        """Merge observations [...] of all processes into mean and deviation, exactly (Chan, Golub and LeVeque 1979)."""
        inputs = self.concatenated(observation.reshape(-1).to(self.mean.device), self.keys).double()
        count = int(world.sum(torch.tensor(len(inputs))))
        mean = world.sum(inputs.sum(0)) / count
        squares = world.sum((inputs - mean).square().sum(0))
        before = int(self.count)
        total = int(self.count) + count
        # M2 = M2_a + M2_b + shift^2 n_a n_b / n;  mean = mean_a + shift n_b / n
        shift = mean - self.mean.double()
        squares = squares + self.std.double().square() * max(before - 1, 0) + shift.square() * (before * count / total)
        std = (squares / max(total - 1, 1)).sqrt()
        self.mean.copy_(self.mean + shift * (count / total))
        self.std.copy_(std)
        self.count.fill_(total)

    @property
    def scale(self) -> Tensor:
        """Divisors of the elements, [feature_size]: their deviation, or 1 where they are constant."""
        return divisor(self.std, self.mean)

    def standardised(self, observation: TensorDict, keys: Sequence[str]) -> Tensor:
        """Standardise the observations `keys` (`actor_keys` or `keys`), which are the first columns; [..., columns].

        Raises:
            RuntimeError: before `fit_statistics`.
        """
        if not self.fitted:
            raise RuntimeError(
                "the policy has no normalisation statistics; call fit(observations) or load a checkpoint"
            )
        inputs = self.concatenated(observation, keys)
        columns = inputs.shape[-1]
        # (x - mean) / scale
        return (inputs - self.mean[:columns]) / self.scale[:columns]

    def features(self, observation: TensorDict) -> Tensor:
        """Standardised observations [..., feature_size] for critics, including privileged ones."""
        return self.standardised(observation, self.keys)

    def concatenated(self, observation: TensorDict, keys: Sequence[str]) -> Tensor:
        """Concatenate the observations `keys`, distances as reciprocals, [..., columns]."""
        if not keys:
            return self.mean.new_zeros(*observation.batch_size, 0)
        flat = {key: observation[key].flatten(observation.batch_dims) for key in keys}
        return torch.cat([reciprocal(flat[key]) if key in self.reciprocal else flat[key] for key in keys], dim=-1)

    def random_observations(self, contract: Contract, count: int, generator: Generator) -> TensorDict:
        """Random observations [count] for actors around the statistics, on the CPU."""
        noise = torch.randn(count, self.observed, generator=generator)
        flat = self.mean[: self.observed] + self.std[: self.observed] * noise
        observation = {}
        start = 0
        for key in self.actor_keys:
            shape = contract.observation[key].shape
            part = flat[:, start : start + math.prod(shape)].unflatten(1, shape)
            observation[key] = distance(part) if key in self.reciprocal else part
            start += math.prod(shape)
        return TensorDict(observation, batch_size=[count])


class _Whole(FlatObservations, Encoder):
    """Encoder of the observations as one vector; the critic's also reads privileged ones."""

    def __init__(self, contract: Contract, distances: Sequence[str], reader: str, *, privileged: bool) -> None:
        super().__init__(contract, distances, reader, "encoder=objects")
        self.reads, self.seeds = self.keys if privileged else self.actor_keys, self.actor_keys
        self.inputs = self.feature_size if privileged else self.observed

    def fit(self, observation: TensorDict) -> None:
        """Compute normalisation statistics from observations [N]."""
        self.fit_statistics(observation)

    def example(self, contract: Contract, count: int, rows: int, generator: Generator) -> TensorDict:
        """Random observations [count]; there are no axes of variable length."""
        return self.random_observations(contract, count, generator)


class FlatEncoder(_Whole):
    """Encoder with two dense layers on fixed-size observations; privileged ones only if allowed.

    Args:
        contract: of the observations.
        width: half of out_features.
        distances: see FlatObservations.
        privileged: whether to read privileged observations.
    """

    def __init__(self, contract: Contract, width: int, distances: Sequence[str], *, privileged: bool) -> None:
        super().__init__(contract, distances, "encoder=flat", privileged=privileged)
        self.out_features = 2 * width
        self.layers = nn.Sequential(
            nn.Linear(self.inputs, self.out_features),
            nn.ReLU(),
            nn.Linear(self.out_features, self.out_features),
            nn.ReLU(),
        )

    def forward(self, observation: TensorDict) -> Tensor:
        """Features [N, out_features]."""
        return self.layers(self.standardised(observation, self.reads))

    @torch.no_grad()
    def begin_like(self, other: Self) -> None:
        """Copy the weights of `other`; columns that it does not read stay as they are."""
        for own, other_parameter in zip(self.layers.parameters(), other.layers.parameters(), strict=True):
            own[..., : other_parameter.shape[-1]].copy_(other_parameter)


class PlainEncoder(_Whole):
    """Encoder without layers: the standardised fixed-size observations; privileged ones only if allowed."""

    def __init__(self, contract: Contract, distances: Sequence[str], *, privileged: bool) -> None:
        super().__init__(contract, distances, "encoder=plain", privileged=privileged)
        self.out_features = self.inputs

    def forward(self, observation: TensorDict) -> Tensor:
        """Features [N, out_features]."""
        return self.standardised(observation, self.reads)

    def begin_like(self, other: Self) -> None:
        """No-op: there are no weights."""
