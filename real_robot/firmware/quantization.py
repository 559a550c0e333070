"""8-bit weights with the same arithmetic in torch as in policy_kernels.h."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from embodied.export.network import Network

LEVELS = 127
"""Largest magnitude of a quantised weight."""


class QuantizedLinear(nn.Module):
    """A linear layer with integer weights [O, I] in [-127, 127] and a scale per row.

    Inputs are rounded to `limit` steps of their largest magnitude: 16 bits, or fewer if a sum could overflow 32 bits.
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        weight = layer.weight.detach()
        # symmetric, per row: weight ~ scale * integer with |integer| <= LEVELS
        scale = weight.abs().amax(1) / LEVELS
        self.register_buffer("weight", torch.round(weight / scale.clamp_min(1e-30).unsqueeze(1)).to(torch.int8))
        self.register_buffer("scale", scale)
        self.register_buffer("bias", layer.bias.detach().clone())
        # LEVELS * limit * inputs < 2^31, so that the sum of products fits into 32 bits
        self.limit = float(min(2**15 - 1, (2**31 - 1) // (LEVELS * layer.in_features)))

    def forward(self, x: Tensor) -> Tensor:
        """Map inputs [..., I] to outputs [..., O]."""
        # y = bias + (round(x limit / peak) @ weight^T) scale peak / limit, with peak = max |x|
        peak = x.abs().amax(-1, keepdim=True)
        steps = torch.where(peak > 1e-30, self.limit / peak, 0.0)
        total = torch.round(x * steps).double() @ self.weight.double().T  # exact
        return self.bias + total.float() * (self.scale * (peak / self.limit))


def quantized(network: Network) -> Network:
    """Copy of `network` with 8-bit weights in every linear layer; all other layers stay float32."""
    network = copy.deepcopy(network)
    _replace(network)
    return network


def _replace(module: nn.Module) -> None:
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, QuantizedLinear(child))
        else:
            _replace(child)
