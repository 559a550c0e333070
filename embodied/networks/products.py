"""Matrix products of wide layers on a CPU, by faster kernels than those that torch chooses.

Torch multiplies float32 matrices by MKL, which on AMD's processors with AVX-512 uses half the width of their vector
units; oneDNN, which is a part of torch, uses it all. Letters: M networks, B rows, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

WIDE = 128
"""Inputs and outputs of the smallest layer for which a kernel is chosen."""
LARGE = 1 << 22
"""Multiplications from which on oneDNN's gain exceeds the time of a call from Python."""
CPU_INFO = Path("/proc/cpuinfo")
HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
PREFERS_ONEDNN = (
    HAS_ONEDNN
    and torch.backends.cpu.get_cpu_capability() == "AVX512"
    and CPU_INFO.exists()
    and "AuthenticAMD" in CPU_INFO.read_text(encoding="utf-8")
)


def product(bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """`bias` [M, 1, O] + `x` [M, B, I] @ `weight` [M, I, O]: `torch.baddbmm` up to rounding."""
    if _is_faster(x, weight.shape[1:].numel()):
        return _Product.apply(bias, x, weight)
    if x.is_cpu and weight.shape[1] >= WIDE and weight.shape[2] == 1:
        # elementwise: several times as fast as by matrices with one column
        return bias + (x * weight.mT).sum(-1, keepdim=True)
    return torch.baddbmm(bias, x, weight)


class Dense(nn.Linear):
    """Dense layer that multiplies many rows by `product`."""

    def forward(self, input: Tensor) -> Tensor:
        """Outputs [..., O] of `input` [..., I]."""
        if input.ndim != 2 or not _is_faster(input, self.weight.numel()):
            return super().forward(input)
        return product(self.bias[None, None], input[None], self.weight.t()[None]).squeeze(0)


def _is_faster(x: Tensor, weights: int) -> bool:
    """Whether oneDNN is faster for rows `x` [..., B, I] and a matrix of `weights`."""
    if not PREFERS_ONEDNN or torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        return False  # ONNX has no operator for oneDNN's
    if weights < WIDE * WIDE or x.shape[-2] * weights < LARGE:
        return False
    is_repeated = x.stride(-2) == 0  # one row in place of many, for which oneDNN is very slow
    return x.is_cpu and x.dtype is torch.float32 and not is_repeated and not torch.is_autocast_enabled("cpu")


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:  # noqa: ANN401 - torch's context
        ctx.save_for_backward(x, weight)
        return _products(x, weight, bias.squeeze(1))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401 - torch's context
        x, weight = ctx.saved_tensors
        needs_bias, needs_x, needs_weight = ctx.needs_input_grad
        gradient = grad_outputs[0].contiguous()  # that of a sum repeats a number, too
        none = [None] * len(x)
        # y = b + x W: dL/db = sum of g over the rows, dL/dx = g W^T, dL/dW = x^T g
        return (
            gradient.sum(1, keepdim=True) if needs_bias else None,
            _products(gradient, weight.mT, none) if needs_x else None,
            _products(x.mT, gradient, none) if needs_weight else None,
        )


def _products(left: Tensor, right: Tensor, biases: Iterable[Tensor | None]) -> Tensor:
    """`left` [M, B, I] @ `right` [M, I, O] + `biases` [M][O]."""
    multiply = torch.ops.mkldnn._linear_pointwise
    products = [multiply(a, b.t(), bias, "none", [], "") for a, b, bias in zip(left, right, biases, strict=True)]
    if len(products) > 1:
        return torch.stack(products)
    # no view, so that an activation may work in place on the output of a custom function
    return torch.ops.aten._unsafe_view(products[0], [1, *products[0].shape])
