"""Weights of 16 or 8 bits with the same arithmetic in torch as in policy_kernels.h."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn

from embodied.export.network import Network

BYTE_LEVELS = 2**7 - 1
LEVELS = 2**15 - 1
"""Largest magnitude of a weight of 8 bits, and of a weight or input of 16 bits."""
LARGEST_SUM = 2**31 - 1


class QuantizedLinear(nn.Module):
    """A linear layer with integer weights [O, I], `dtype` int8 or int16, and a scale per row.

    Inputs are rounded to `limit` steps of `peak`, if None of their largest magnitude, in 16 bits, so that no sum
    exceeds 32 bits.
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor

    def __init__(self, layer: nn.Linear, dtype: torch.dtype, peak: float | None = None) -> None:
        super().__init__()
        self.in_features = layer.in_features
        self.out_features = layer.out_features
        self.peak = peak
        weight = layer.weight.detach()
        largest = weight.abs().amax(1, keepdim=True).clamp_min(1e-30)
        levels = BYTE_LEVELS
        if dtype == torch.int16:
            # inputs and weights share the bits of a sum: levels^2 max_row sum |weight| / largest <= LARGEST_SUM
            levels = min(
                LEVELS, math.isqrt(int(LARGEST_SUM / float((weight.abs() / largest).sum(1).max().clamp_min(1))))
            )
        # symmetric, per row: weight ~ scale * integer with |integer| <= levels
        self.register_buffer("weight", torch.round(weight / largest * levels).to(dtype))
        self.register_buffer("scale", largest.squeeze(1) / levels)
        self.register_buffer("bias", layer.bias.detach().clone())
        # limit * sum |integer| <= LARGEST_SUM in every row
        self.limit = float(min(LEVELS, LARGEST_SUM // max(1, int(self.weight.long().abs().sum(1).max()))))

    def forward(self, x: Tensor) -> Tensor:
        """Map inputs [..., I] to outputs [..., O]."""
        # y = bias + (round(x limit / peak) @ weight^T) scale peak / limit, with peak >= max |x|
        peak = x.abs().amax(-1, keepdim=True) if self.peak is None else torch.tensor(self.peak)
        steps = torch.where(peak > 1e-30, self.limit / peak, 0.0)
        total = torch.round(x * steps).double() @ self.weight.double().T  # exact
        return self.bias + total.float() * (self.scale * (peak / self.limit))


def quantized(network: Network, dtype: torch.dtype) -> Network:
    """Copy of `network` with int8 or int16 weights in every linear layer; all other layers stay float32."""
    network = copy.deepcopy(network)
    _replace(network, dtype)
    return network


def _replace(module: nn.Module, dtype: torch.dtype) -> None:
    earlier = None
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            # behind tanh no input exceeds 1
            setattr(module, name, QuantizedLinear(child, dtype, 1.0 if isinstance(earlier, nn.Tanh) else None))
        else:
            _replace(child, dtype)
        earlier = child
