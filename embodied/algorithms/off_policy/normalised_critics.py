"""FlashSAC's critics (arXiv 2604.04539): residual blocks of unit weights and batch normalisation.

    x <- W norm(x);  x <- x + relu(norm(W2 relu(norm(W1 x)))) in each block;  outputs = W x / rms(x) + b

Letters: M networks, B rows, I inputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn

from embodied.algorithms.critics import Critics

EXPANSION = 4
"""Width inside a block, in widths of the network."""
MOMENTUM = 0.01
"""Share of a batch in the running statistics."""


class NormalisedCritics(Critics):
    """Ensemble of value networks with a block for each layer of `config.hidden`, which are equally wide.

    Passes with companions normalise by the statistics of all their rows, and update the running ones; others, such as
    the actor's, normalise by the running statistics.
    """

    normalises_batches = True

    def add_layers(self, inputs: int, outputs: int) -> None:
        """Add weights [M, in, out], orthogonal at first, and the scales and shifts of normalisations."""
        width, *_ = self.config.hidden
        count = self.config.ensemble
        pairs = [(width, EXPANSION * width), (EXPANSION * width, width)] * len(self.config.hidden)
        shapes = [(inputs, width), *pairs, (width, outputs)]
        self.weights = nn.ParameterList(
            torch.stack([nn.init.orthogonal_(torch.empty(*shape)) for _ in range(count)]) for shape in shapes
        )
        self.norms = nn.ModuleList(
            nn.BatchNorm1d(count * size, momentum=MOMENTUM) for size in (inputs, *(pair[1] for pair in pairs))
        )
        self.scale = nn.Parameter(torch.ones(count, 1, width))
        self.bias = nn.Parameter(torch.zeros(count, 1, outputs))
        self.constrain()

    def forward(self, inputs: Tensor, companions: Tensor | None = None) -> Tensor:
        """Outputs [M, B, O] for `inputs` [B, I], normalised together with `companions` [B, I] if there are any."""
        together = companions is not None
        rows = inputs if companions is None else torch.cat((inputs, companions))
        x = rows.expand(self.config.ensemble, *rows.shape)
        x = self._normalised(0, x, together) @ self.weights[0]
        for layer in range(1, len(self.norms), 2):
            inner = torch.relu(self._normalised(layer, x @ self.weights[layer], together))
            inner = torch.relu(self._normalised(layer + 1, inner @ self.weights[layer + 1], together))
            x = x + inner
        x = nn.functional.rms_norm(x, x.shape[-1:], eps=1e-6) * self.scale
        return torch.baddbmm(self.bias, x[:, : len(inputs)], self.weights[-1])

    @torch.no_grad()
    def constrain(self) -> None:
        """Give the weights of every unit norm 1, and the scales and shifts of a layer the root mean square 1."""
        for weight in self.weights:
            weight.copy_(nn.functional.normalize(weight, dim=1))
        for norm in cast(Iterable[nn.BatchNorm1d], self.norms):
            scale, shift = (part.unflatten(0, (self.config.ensemble, -1)) for part in (norm.weight, norm.bias))
            # |(scale, shift)|^2 = width
            factor = math.sqrt(scale.shape[-1]) / torch.cat((scale, shift), -1).norm(dim=-1, keepdim=True)
            scale.mul_(factor)
            shift.mul_(factor)
        self.scale.mul_(math.sqrt(self.scale.shape[-1]) / self.scale.norm(dim=-1, keepdim=True))

    def _normalised(self, layer: int, x: Tensor, together: bool) -> Tensor:
        """Normalise x [M, B, W] over the rows of each network, by the running statistics unless `together`."""
        norm = cast(nn.BatchNorm1d, self.norms[layer])
        flat = x.transpose(0, 1).flatten(1)
        statistics = norm.running_mean, norm.running_var, norm.weight, norm.bias
        flat = nn.functional.batch_norm(flat, *statistics, training=together, momentum=MOMENTUM, eps=norm.eps)
        return flat.unflatten(1, (len(x), -1)).transpose(0, 1)
