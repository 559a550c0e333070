"""Computation of a model of billions of weights on one card: in bfloat16, with recomputed activations, compiled.

The results are the same up to rounding.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from embodied.configuration import Configuration
from embodied.errors import UserError
from embodied.networks.precision import Precision


@dataclass
class Computing(Configuration):
    """Computation of a vision-language-action model.

    With `precision=bfloat16` it does so in bfloat16, in training and wherever it runs, and its frozen weights are
    stored in it; trained weights, the critic, log-probabilities and losses stay in float32. `gradient_checkpointing`
    stores only a layer's input for the backward pass, which computes the layer again (arXiv 1604.06174). `compile`
    compiles the model with torch.compile at its first use, which takes a minute or more.
    """

    precision: Precision = Precision.FLOAT32
    gradient_checkpointing: bool = False
    compile: bool = False

    @property
    def own_precision(self) -> Precision:
        """Precision of the policy in training and deployment."""
        return self.precision

    def run(self, function: Callable[..., Any], model: nn.Module, *arguments: Any) -> Any:  # noqa: ANN401 - the function's
        """Compute `function(model, *arguments)`, an unbound method, with these options; the last is a tensor."""
        compiled = _compiled(function) if self.compile else function
        if self.precision is Precision.FLOAT32:
            return compiled(model, *arguments)
        with self.precision.on(arguments[-1].device):
            return compiled(model, *arguments)


def prepare(model: nn.Module, options: Computing) -> None:
    """Store the frozen matrices of `model` in the precision of `options`, and let its layers recompute activations.

    Raises:
        UserError: where compilation is requested and there is no C++ compiler.
    """
    if options.compile and not shutil.which(compiler := os.environ.get("CXX", "g++")):
        raise UserError(f"policy.compile=true needs a C++ compiler, but there is no {compiler}; install it, or set CXX")
    if options.precision is Precision.BFLOAT16:
        for weight in model.parameters():
            if not weight.requires_grad and weight.ndim > 1:  # weights of norms are few, and used in float32
                weight.data = weight.data.bfloat16()
    if options.gradient_checkpointing:
        for layer in layers(model):
            layer.forward = partial(_forgetful, layer.forward)
        if options.compile:  # a recomputed layer need not write its cache again
            torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True


def layers(model: nn.Module) -> list[nn.Module]:
    """Layers of all transformers in `model`."""
    stacks = [getattr(module, name, None) for module in model.modules() for name in ("layers", "layer")]
    return [layer for stack in stacks if isinstance(stack, nn.ModuleList) for layer in stack]


def _forgetful(forward: Callable[..., Any], *arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - the layer's
    # transformers' own mechanism drops caches of keys and values, through which actions read the prefix.
    if not torch.is_grad_enabled():
        return forward(*arguments, **options)
    return checkpoint(forward, *arguments, use_reentrant=False, **options)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)
