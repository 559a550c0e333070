"""Ensembles of critics, with scalar or categorical (HL-Gauss) values.

Source of the categorical head: Stop Regressing (arXiv 2403.03950). Differs from the paper: targets outside the range of
the bins are clamped to it, and `clamped` is their share. The minimum over a random subset of an ensemble is REDQ's
(arXiv 2101.05982). Letters: M networks, B rows, I inputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from typing import Annotated

import torch
from torch import Tensor, nn

from embodied.configuration import Configuration, FiniteFloat, PositiveFloat, PositiveInt, Range
from embodied.errors import UserError
from embodied.products import product


class CriticHead(Enum):
    """Output of a critic: SCALAR, trained by the squared error, or HL_GAUSS, a distribution over bins of values."""

    SCALAR = "scalar"
    HL_GAUSS = "hl_gauss"


class Activation(Enum):
    """Function between the layers of a critic."""

    RELU = "relu"
    TANH = "tanh"


@dataclass
class CriticConfig(Configuration):
    """Layers and head of an `ensemble` of critics.

    Targets are minima over a random `subset` of the ensemble (None: over all). With `layer_norm` each layer is
    normalised before its `activation`. A `head` of kind hl_gauss divides values from `value_low` to `value_high` into
    `bins`; targets are smoothed by a normal distribution of deviation `smoothing`, in widths of a bin.
    """

    hidden: list[PositiveInt] = field(default_factory=lambda: [256, 256])
    ensemble: PositiveInt = 2
    subset: PositiveInt | None = None
    activation: Activation = Activation.RELU
    layer_norm: bool = False
    head: CriticHead = CriticHead.SCALAR
    bins: Annotated[int, Range(at_least=2)] = 101
    value_low: FiniteFloat | None = None
    value_high: FiniteFloat | None = None
    smoothing: PositiveFloat = 0.75

    def __post_init__(self) -> None:
        """Raise UserError for numbers that are out of range or do not go together."""
        super().__post_init__()
        low = self.value_low
        high = self.value_high
        if self.subset is not None and self.subset > self.ensemble:
            raise UserError(f"expected subset <= ensemble, got {self.subset} and {self.ensemble}")
        if self.head is CriticHead.SCALAR and (low is not None or high is not None):
            raise UserError("expected head=hl_gauss with value_low and value_high, got head=scalar")
        if self.head is CriticHead.HL_GAUSS and (low is None or high is None or low >= high):
            raise UserError(f"expected value_low < value_high with head=hl_gauss, got {low} and {high}")


class Critics(nn.Module):
    """Ensemble of value networks, computed together by batched matrix products.

    Inputs [B, I] are features of observations for state values V(s), followed by actions for Q(s, a).
    """

    edges: Tensor

    def __init__(self, inputs: int, config: CriticConfig) -> None:
        super().__init__()
        self.config = config
        count = config.ensemble
        self.categorical = config.head is CriticHead.HL_GAUSS
        sizes = [inputs, *config.hidden, config.bins if self.categorical else 1]
        bounds = [1.0 / math.sqrt(size) for size in sizes[:-1]]  # torch's default for linear layers
        shapes = list(zip(bounds, pairwise(sizes), strict=True))
        self.weights = nn.ParameterList(torch.empty(count, *shape).uniform_(-bound, bound) for bound, shape in shapes)
        self.biases = nn.ParameterList(
            torch.empty(count, 1, shape[1]).uniform_(-bound, bound) for bound, shape in shapes
        )
        normalised = config.hidden if config.layer_norm else []
        self.scales = nn.ParameterList(torch.ones(count, 1, width) for width in normalised)
        self.shifts = nn.ParameterList(torch.zeros(count, 1, width) for width in normalised)
        if self.categorical:
            assert config.value_low is not None
            assert config.value_high is not None
            edges = torch.linspace(config.value_low, config.value_high, config.bins + 1)
            self.register_buffer("edges", edges, persistent=False)

    def forward(self, inputs: Tensor, *, frozen: bool = False) -> Tensor:
        """Outputs [M, B, 1] of scalar heads, or logits [M, B, bins]; `frozen` weights get no gradients."""
        activation = torch.tanh if self.config.activation is Activation.TANH else torch.relu
        groups = self.biases, self.weights, self.scales, self.shifts
        biases, weights, scales, shifts = ([each.detach() if frozen else each for each in group] for group in groups)
        x = inputs.expand(self.config.ensemble, *inputs.shape)
        for layer in range(len(self.config.hidden)):
            x = product(biases[layer], x, weights[layer])
            if self.config.layer_norm:
                x = nn.functional.layer_norm(x, x.shape[-1:]) * scales[layer] + shifts[layer]
            x = activation(x)
        return product(biases[-1], x, weights[-1])

    def values(self, inputs: Tensor, *, frozen: bool = False) -> Tensor:
        """Values [M, B] of all networks; `frozen` weights get no gradients."""
        outputs = self(inputs, frozen=frozen)
        if not self.categorical:
            return outputs.squeeze(-1)
        # V = sum_k p_k c_k over the centres of the bins
        return outputs.softmax(-1) @ ((self.edges[1:] + self.edges[:-1]) / 2)

    def minimum(self, inputs: Tensor, generator: torch.Generator) -> Tensor:
        """Smallest value [B] of `config.subset` networks, drawn by `generator` for the whole batch."""
        values = self.values(inputs)
        if self.config.subset in (None, self.config.ensemble):
            return values.amin(0)
        rows = torch.randperm(self.config.ensemble, generator=generator)[: self.config.subset]
        return values[rows.to(values.device)].amin(0)

    def loss(self, inputs: Tensor, target: Tensor, weight: Tensor | float = 1.0) -> Tensor:
        """Sum over the networks of the mean loss from `target`, one scalar.

        `target` and `weight` are [B], or [M, B] for each network its own.
        """
        outputs = self(inputs)
        if self.categorical:
            # L_i = mean weight * -sum_k p_k(y) log softmax(z_i)_k
            error = -(self.histogram(target) * outputs.log_softmax(-1)).sum(-1)
        else:
            # L_i = mean weight * (Q_i - y)^2
            error = (outputs.squeeze(-1) - target).square()
        return (weight * error).mean(-1).sum()

    def histogram(self, target: Tensor) -> Tensor:
        """Probabilities [..., bins] of the bins for `target` [...]: those of N(y, sigma^2) within the range."""
        low = self.edges[0]
        high = self.edges[-1]
        sigma = self.config.smoothing * (high - low) / self.config.bins
        # p_k = (Phi((e_{k+1} - y) / sigma) - Phi((e_k - y) / sigma)) / (Phi of the last edge - Phi of the first)
        cumulative = torch.special.ndtr((self.edges - target.clamp(low, high).unsqueeze(-1)) / sigma)
        return cumulative.diff(dim=-1) / (cumulative[..., -1:] - cumulative[..., :1])

    def clamped(self, target: Tensor) -> Tensor:
        """Share of `target` outside the values that a categorical head represents, one scalar."""
        return ((target < self.edges[0]) | (target > self.edges[-1])).float().mean()


@torch.no_grad()
def approach(targets: Iterable[Tensor], sources: Iterable[Tensor], share: float) -> None:
    """Move the weights `targets` of target networks towards those of their `sources`, in place."""
    for target, source in zip(targets, sources, strict=True):
        # theta' <- (1 - share) theta' + share theta
        target.lerp_(source, share)
