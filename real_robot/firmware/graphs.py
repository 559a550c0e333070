"""ONNX and TorchScript export of a network."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embodied.command_line.extras import needs_extra
from embodied.deployment.network import Network
from embodied.errors import UserError
from real_robot.firmware.samples import Samples

OPSETS = range(17, 21)
"""LayerNormalization needs 17; torch's exporter supports at most 20."""
Act = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]
"""Observation [N, I] and memory [N, M] to actions [N, A] and the next memory."""


def check_opset(opset: int) -> None:
    """Raise UserError for an unsupported opset."""
    if opset not in OPSETS:
        raise UserError(f"expected opset from {OPSETS[0]} to {OPSETS[-1]}, got {opset}")


def write(network: Network, samples: Samples, target: str, opset: int, directory: Path) -> dict[str, Any]:
    """Write policy.onnx or policy.pt into `directory`, read it back and run it; returns the values for the record."""
    example = (samples.inputs[0],)
    if network.initial_memory is not None:
        example = (*example, network.initial_memory.expand(len(samples.inputs[0]), -1).contiguous())
    if target == "onnx":
        act = _write_onnx(network, example, opset, directory / "policy.onnx")
        record: dict[str, Any] = {"opset": opset}
    else:
        act = _write_torchscript(network, example, directory / "policy.pt")
        record = {}
    error = samples.error(_run(act, network.initial_memory, samples.inputs), network.limits.half_range)
    return record | {"max_error": error}


def _write_torchscript(network: Network, example: tuple[Tensor, ...], path: Path) -> Act:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit, which the target needs
        torch.jit.trace(network, example).save(str(path))
        loaded = torch.jit.load(str(path))

    @torch.no_grad()
    def act(observation: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return (loaded(observation), None) if memory is None else loaded(observation, memory)

    return act


def _write_onnx(network: Network, example: tuple[Tensor, ...], opset: int, path: Path) -> Act:
    with needs_extra("onnx"):
        import onnx
        from onnx.reference import ReferenceEvaluator
    inputs, outputs = ["observation", "memory"][: len(example)], ["action", "next_memory"][: len(example)]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of the exporter that needs no further packages
            torch.onnx.export(
                network, example, str(path), input_names=inputs, output_names=outputs, opset_version=opset,
                dynamic_axes={name: {0: "batch"} for name in (*inputs, *outputs)}, dynamo=False,
            )  # fmt: skip
    except torch.onnx.errors.OnnxExporterError as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"ONNX opset {opset} cannot express the policy: {reason}") from error
    onnx.checker.check_model(str(path))
    evaluator = ReferenceEvaluator(str(path))

    def act(observation: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        feed = [observation] if memory is None else [observation, memory]
        results = evaluator.run(None, {name: part.numpy() for name, part in zip(inputs, feed, strict=True)})
        action, *rest = (torch.from_numpy(result) for result in results)
        return action, rest[0] if rest else None

    return act


def _run(act: Act, initial: Tensor | None, inputs: Tensor) -> Tensor:
    """Actions [S, T, A] along sequences of observations [S, T, I]."""
    memory = None if initial is None else initial.expand(len(inputs), -1).contiguous()
    outputs = []
    for observation in inputs.unbind(1):
        action, memory = act(observation.contiguous(), memory)
        outputs.append(action)
    return torch.stack(outputs, 1)
