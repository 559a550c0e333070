"""Ensembles of critics, with scalar or categorical values (`value_head.py`).

The minimum over a random subset of an ensemble is REDQ's (arXiv 2101.05982). Letters: M networks, B rows, I inputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise

import torch
from torch import Tensor, nn

from embodied.configuration import PositiveInt
from embodied.errors import UserError
from embodied.networks.products import product
from embodied.networks.value_head import ValueHead


class Activation(Enum):
    """Function between the layers of a critic."""

    RELU = "relu"
    TANH = "tanh"


@dataclass
class CriticConfig(ValueHead):
    """Layers of an `ensemble` of critics; options of their head are those of ValueHead.

    Targets are minima over a random `subset` of the ensemble (None: over all). With `layer_norm` each layer is
    normalised before its `activation`.
    """

    hidden: list[PositiveInt] = field(default_factory=lambda: [256, 256])
    ensemble: PositiveInt = 2
    subset: PositiveInt | None = None
    activation: Activation = Activation.RELU
    layer_norm: bool = False

    def __post_init__(self) -> None:
        """Raise UserError for numbers that are out of range or do not go together."""
        super().__post_init__()
        if self.subset is not None and self.subset > self.ensemble:
            raise UserError(f"expected subset <= ensemble, got {self.subset} and {self.ensemble}")

    def critics(self, inputs: int) -> Critics:
        """Networks of critics that read `inputs` numbers."""
        return Critics(inputs, self)


class Critics(nn.Module):
    """Ensemble of value networks, computed together by batched matrix products.

    Inputs [B, I] are features of observations for state values V(s), followed by actions for Q(s, a). A scalar head has
    one output; with more `outputs` the networks are of another quantity, and only `forward` is of use.
    """

    normalises_batches = False
    """Whether passes for learning need companions: rows that are normalised together with the inputs."""

    def __init__(self, inputs: int, config: CriticConfig, outputs: int | None = None) -> None:
        super().__init__()
        self.config = config
        self.add_layers(inputs, outputs or config.outputs)

    def add_layers(self, inputs: int, outputs: int) -> None:
        """Add the parameters, drawn from torch's global generator."""
        config = self.config
        count = config.ensemble
        sizes = [inputs, *config.hidden, outputs]
        bounds = [1.0 / math.sqrt(size) for size in sizes[:-1]]  # torch's default for linear layers
        shapes = list(zip(bounds, pairwise(sizes), strict=True))
        self.weights = nn.ParameterList(torch.empty(count, *shape).uniform_(-bound, bound) for bound, shape in shapes)
        self.biases = nn.ParameterList(
            torch.empty(count, 1, shape[1]).uniform_(-bound, bound) for bound, shape in shapes
        )
        normalised = config.hidden if config.layer_norm else []
        self.scales = nn.ParameterList(torch.ones(count, 1, width) for width in normalised)
        self.shifts = nn.ParameterList(torch.zeros(count, 1, width) for width in normalised)

    def constrain(self) -> None:
        """Restore what holds for the parameters, after a gradient step: nothing."""

    def forward(self, inputs: Tensor, companions: Tensor | None = None) -> Tensor:
        """Outputs [M, B, outputs] of scalar heads, or logits [M, B, bins]; `companions` [B, I] are not read."""
        # in place: no derivative reads their argument
        activation = torch.tanh_ if self.config.activation is Activation.TANH else torch.relu_
        x = inputs.expand(self.config.ensemble, *inputs.shape)
        for layer in range(len(self.config.hidden)):
            x = product(self.biases[layer], x, self.weights[layer])
            if self.config.layer_norm:
                x = nn.functional.layer_norm(x, x.shape[-1:]) * self.scales[layer] + self.shifts[layer]
            x = activation(x)
        return product(self.biases[-1], x, self.weights[-1])

    def values(self, inputs: Tensor, companions: Tensor | None = None) -> Tensor:
        """Values [M, B] of all networks."""
        return self.config.values(self(inputs, companions))

    def minimum(self, inputs: Tensor, generator: torch.Generator, companions: Tensor | None = None) -> Tensor:
        """Smallest value [B] of `config.subset` networks, drawn by `generator` for the whole batch."""
        return self._subset(self.values(inputs, companions), generator).amin(0)

    def lowest(self, inputs: Tensor, generator: torch.Generator, companions: Tensor | None = None) -> Tensor:
        """Outputs [B, O] of the network of the smallest value among such a subset."""
        outputs = self._subset(self(inputs, companions), generator)
        network = self.config.values(outputs).argmin(0)
        return outputs[network, torch.arange(len(network), device=network.device)]

    def _subset(self, parts: Tensor, generator: torch.Generator) -> Tensor:
        """`parts` [M, ...] of `config.subset` networks."""
        if self.config.subset in (None, self.config.ensemble):
            return parts
        rows = torch.randperm(self.config.ensemble, generator=generator)[: self.config.subset]
        return parts[rows.to(parts.device)]

    def loss(
        self, inputs: Tensor, target: Tensor, weight: Tensor | float = 1.0, companions: Tensor | None = None
    ) -> Tensor:
        """Sum over the networks of the mean loss from `target`, one scalar.

        `target` and `weight` are [B], or [M, B] for each network its own; distributions are [1, B, bins].
        """
        # L_i = mean weight * error of Q_i from y
        return (weight * self.config.errors(self(inputs, companions), target)).mean(-1).sum()


@contextmanager
def frozen_weights(network: nn.Module) -> Iterator[None]:
    """Context in which passes of `network` compute no gradients of its weights, only of its inputs."""
    network.requires_grad_(False)
    try:
        yield
    finally:
        network.requires_grad_(True)


@torch.no_grad()
def approach(targets: Iterable[Tensor], sources: Iterable[Tensor], share: float) -> None:
    """Move the weights `targets` of target networks towards those of their `sources`, in place."""
    for target, source in zip(targets, sources, strict=True):
        # theta' <- (1 - share) theta' + share theta
        target.lerp_(source, share)
