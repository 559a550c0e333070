"""A program stepped by a policy in one compiled call, with the backward pass, for analytic policy gradients.

Letters: T decisions, L lanes, S O A rows of state, observation and action, H past actions.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sims.tracer.emit import LANES
from sims.tracer.kernels import split
from sims.tracer.program import UNIFORM, WORD, Program

SOURCE = Path(__file__).with_name("unroll.h")
PAD = 16
MAX_LAYERS = 8
MAX_CONSTANTS = 8
CARRIED = ("state", "record", "action")
OUTPUTS = ("state", "record", "observation", "reward", "executed")
Layers = Sequence[tuple[Tensor, Tensor]]
"""(weight [out, in], bias [out]) of each layer of a = tanh(W_n ... tanh(W_1 x + b_1) ... + b_n)."""


@dataclass
class Unrolled:
    """The result of an unroll; `reward`, `observation` and `actions` carry gradients to the layers.

    Attributes:
        reward, executed: [T, L]; `executed` is 1 or 0.
        observation: [T + 1, O, L].
        actions: [H + T, A, L], those before the unroll first.
        state, record: [T + 1, rows, L].
    """

    reward: Tensor
    observation: Tensor
    actions: Tensor
    state: Tensor
    record: Tensor
    executed: Tensor


def source(step: Program, observed: int) -> str:
    """C code of an unroll with a policy, to append to that of `step` and its vector-Jacobian product.

    The program's inputs are "state", which carries gradients, "record", which does not, "action", and at most
    `MAX_CONSTANTS` others, which stay constant; its outputs are "state", "record", "observation", "reward" and
    "executed". The policy reads the first `observed` rows of the observation, then the past actions.
    """
    rows = {group.name: group.rows for group in (*step.inputs, *step.outputs)}
    constants = _constants(step)
    assert tuple(group.name for group in step.inputs[:3]) == CARRIED
    assert tuple(group.name for group in step.outputs) == OUTPUTS
    assert len(constants) <= MAX_CONSTANTS
    arguments = [
        f"(const {'uint32_t' if kind == WORD else 'float'} *)(x)->constants[{index}]"
        f"{'' if kind == UNIFORM else ' + (lane)'}, (x)->step"
        for index, kind in enumerate(constants.values())
    ]
    defined = {
        "STATE_ROWS": rows["state"],
        "RECORD_ROWS": rows["record"],
        "SEEN_ROWS": rows["observation"],
        "ACTION_ROWS": rows["action"],
        "OBSERVED_ROWS": observed,
        "MAX_LAYERS": MAX_LAYERS,
        "PAD": PAD,
        "MAX_CONSTANTS": MAX_CONSTANTS,
        "STEP_BLOCK": f"{step.name}_block",
        "STEP_VJP_BLOCK": f"{step.name}_vjp_block",
        "CONSTANTS(x, lane)": ", ".join(arguments),
    }
    return "\n".join(
        (*(f"#define {name} {value}" for name, value in defined.items()), SOURCE.read_text(encoding="utf-8"))
    )


def run(
    library: ctypes.CDLL,
    step: Program,
    layers: Layers,
    decisions: int,
    inputs: Mapping[str, Tensor],
    past: Tensor,
    max_action_gradient: float = math.inf,
) -> Unrolled:
    """Step `decisions` times with the policy of `layers`.

    Args:
        library: compiled from `source`, after the program's own code.
        step: the program.
        layers: at most `MAX_LAYERS` layers, matching the policy's inputs and the action.
        decisions: T.
        inputs: the program's inputs except the action, and the first "observation" [O, L].
        past: actions before the first decision, oldest first, [H, A, L]; H >= 1.
        max_action_gradient: norm to which the gradient by a lane's action is scaled down, also in the gradients of
            earlier steps.
    """
    buffers = _Buffers(library, step, layers, decisions, inputs, past, max_action_gradient)
    reward, observation, actions = _Fused.apply(buffers, *(tensor for layer in layers for tensor in layer))
    states = {name: buffers.tensors[name] for name in ("state", "record", "executed")}
    return Unrolled(reward, observation, actions, **states)


def _constants(step: Program) -> dict[str, str]:
    """Kinds of the constant inputs, by name."""
    return {group.name: group.kind for group in step.inputs if group.name not in CARRIED}


class _Sizes(ctypes.Structure):
    """Layout of `Sizes` in unroll.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("decisions", "history", "layers", "lanes")),
        ("width", ctypes.c_int64 * (MAX_LAYERS + 1)),
        ("padded", ctypes.c_int64 * (MAX_LAYERS + 1)),
        *((name, ctypes.c_int64) for name in ("activations", "packed")),
        ("max_action_gradient", ctypes.c_float),
    )


TENSORS = (
    *("state", "record", "seen", "actions", "reward", "executed", "activations"),
    *("forward", "backward", "grad_seen", "grad_reward", "grad_actions", "grad_packed", "scratch"),
)
FLOWN = ("reward", "seen", "actions")
"""Tensors through which gradients flow."""


class _Tensors(ctypes.Structure):
    """Layout of `Tensors` in unroll.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in TENSORS),
        ("constants", ctypes.c_void_p * MAX_CONSTANTS),
        ("step", ctypes.c_int64),
    )


class _Buffers:
    """Memory of one unroll, and the calls that fill it."""

    def __init__(
        self,
        library: ctypes.CDLL,
        step: Program,
        layers: Layers,
        decisions: int,
        inputs: Mapping[str, Tensor],
        past: Tensor,
        max_action_gradient: float,
    ) -> None:
        history, A, L = past.shape
        self.library = library
        self.lanes = L
        self.widths = [layers[0][0].shape[1], *(len(weight) for weight, _ in layers)]
        self.padded = [-(-width // PAD) * PAD for width in self.widths]
        # A layer of a inputs and b outputs has a b weights and b biases.
        packed = sum((a + 1) * b for a, b in pairwise(self.padded))
        self.sizes = _Sizes(decisions, history, len(layers), L)
        self.sizes.width[: len(self.widths)], self.sizes.padded[: len(self.padded)] = self.widths, self.padded
        self.sizes.activations = sum(self.padded)
        self.sizes.packed = packed
        self.sizes.max_action_gradient = max_action_gradient
        self.constants = [inputs[name] for name in _constants(step)]
        T = decisions
        first = {"state": inputs["state"], "record": inputs["record"], "seen": inputs["observation"]}
        self.tensors = {name: torch.empty(T + 1, len(rows), L) for name, rows in first.items()}
        self.tensors |= {
            "actions": torch.empty(history + T, A, L),
            "reward": torch.empty(T, L),
            "executed": torch.empty(T, L),
            "activations": torch.empty(T, L, sum(self.padded)),
        }
        for name, rows in first.items():
            self.tensors[name][0] = rows
        self.tensors["actions"][:history] = past

    def forward(self, layers: Layers) -> None:
        """Run the forward pass."""
        self.tensors["forward"] = self._pack(layers, transposed=True)
        self._call("unroll")

    def backward(self, layers: Layers, grads: dict[str, Tensor | None]) -> list[Tensor]:
        """Gradients of each layer's weight and bias from the gradients `grads` of the tensors, by name."""
        self.tensors |= {f"grad_{name}": grad.contiguous() for name, grad in grads.items() if grad is not None}
        gradient = self.tensors.get("grad_actions")
        self.tensors |= {
            "backward": self._pack(layers, transposed=False),
            "grad_actions": torch.zeros_like(self.tensors["actions"]) if gradient is None else gradient.clone(),
            "grad_packed": torch.zeros(self.lanes // LANES, self.sizes.packed),
            "scratch": torch.empty(self.lanes, 2 * max(self.padded)),
        }
        self._call("unroll_vjp")
        return self._unpack(self.tensors["grad_packed"].sum(0))

    def _call(self, name: str) -> None:
        pointers = _Tensors(**{key: tensor.data_ptr() for key, tensor in self.tensors.items()}, step=self.lanes)
        pointers.constants[: len(self.constants)] = [tensor.data_ptr() for tensor in self.constants]
        function = getattr(self.library, name)
        sizes = ctypes.byref(self.sizes)
        tensors = ctypes.byref(pointers)
        split(
            lambda first, last: function(ctypes.c_int64(first), ctypes.c_int64(last), sizes, tensors),
            self.lanes,
            share=2 * LANES,
        )

    def _pack(self, layers: Layers, transposed: bool) -> Tensor:
        """All weights and biases in one tensor, padded with zeros."""
        packed = torch.zeros(self.sizes.packed)
        for (weights, bias), (weight, layer_bias) in zip(self._views(packed, transposed), layers, strict=True):
            outputs, inputs = weight.shape
            if transposed:
                weights[:inputs, :outputs] = weight.detach().t()
            else:
                weights[:outputs, :inputs] = weight.detach()
            bias[:outputs] = layer_bias.detach()
        return packed

    def _unpack(self, packed: Tensor) -> list[Tensor]:
        gradients = []
        for (weights, bias), (inputs, outputs) in zip(self._views(packed, False), pairwise(self.widths), strict=True):
            gradients += [weights[:outputs, :inputs], bias[:outputs]]
        return gradients

    def _views(self, packed: Tensor, transposed: bool) -> list[tuple[Tensor, Tensor]]:
        views = []
        offset = 0
        for inputs, outputs in pairwise(self.padded):
            shape = (inputs, outputs) if transposed else (outputs, inputs)
            weights = packed[offset : offset + inputs * outputs].view(shape)
            offset += inputs * outputs
            views.append((weights, packed[offset : offset + outputs]))
            offset += outputs
        return views


class _Fused(torch.autograd.Function):
    """The compiled unroll; returns reward [T, L], observations [T + 1, O, L] and actions [H + T, A, L]."""

    @staticmethod
    def forward(ctx: Any, buffers: _Buffers, *flat: Tensor) -> tuple[Tensor, ...]:  # noqa: ANN401
        """Run the forward pass."""
        buffers.forward(list(zip(flat[::2], flat[1::2], strict=True)))
        ctx.buffers = buffers
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*flat)
        return tuple(buffers.tensors[name].detach() for name in FLOWN)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """Run the backward pass."""
        flat = ctx.saved_tensors
        gradients = ctx.buffers.backward(
            list(zip(flat[::2], flat[1::2], strict=True)), dict(zip(FLOWN, grads, strict=True))
        )
        return (None, *gradients)
