"""ONNX and TorchScript export of a network."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from embodied.errors import UserError
from embodied.export.chunk_network import ChunkNetwork
from embodied.export.network import Network
from embodied.extras import needs_extra
from real_robot.firmware.samples import ChunkSamples, Samples

OPSETS = range(17, 21)
"""LayerNormalization needs 17; torch's exporter supports at most 20."""
Run = Callable[[tuple[Tensor, ...]], list[Tensor]]
"""Maps the inputs of a graph to its outputs."""


@dataclass(frozen=True)
class Graph:
    """A module, example inputs to trace it with, names of inputs and outputs, and names of axes of variable length."""

    module: nn.Module
    example: tuple[Tensor, ...]
    inputs: list[str]
    outputs: list[str]
    axes: dict[str, dict[int, str]]

    def write(self, target: str, opset: int, directory: Path) -> Run:
        """Write policy.onnx or policy.pt into `directory` and read it back.

        Raises:
            UserError: if ONNX cannot express the module.
        """
        with _quiet():
            if target == "onnx":
                return self._write_onnx(opset, directory / "policy.onnx")
            return self._write_torchscript(directory / "policy.pt")

    def _write_torchscript(self, path: Path) -> Run:
        with torch.no_grad():
            torch.jit.trace(self.module, self.example).save(str(path))
        loaded = torch.jit.load(str(path))

        @torch.no_grad()
        def run(inputs: tuple[Tensor, ...]) -> list[Tensor]:
            outputs = loaded(*inputs)
            return [outputs] if isinstance(outputs, Tensor) else list(outputs)

        return run

    def _write_onnx(self, opset: int, path: Path) -> Run:
        with needs_extra("onnx"):
            import onnx
            from onnx.reference import ReferenceEvaluator
        try:
            torch.onnx.export(
                self.module,
                self.example,
                str(path),
                input_names=self.inputs,
                output_names=self.outputs,
                opset_version=opset,
                dynamic_axes=self.axes,
                dynamo=False,
            )
        except torch.onnx.errors.OnnxExporterError as error:
            reason = " ".join(str(error).split())[:200]
            advice = "use target=torchscript"
            raise UserError(f"ONNX opset {opset} cannot express the policy, {advice}: {reason}") from error
        onnx.checker.check_model(str(path))
        evaluator = ReferenceEvaluator(str(path))

        def run(inputs: tuple[Tensor, ...]) -> list[Tensor]:
            feed = {name: part.numpy() for name, part in zip(self.inputs, inputs, strict=True)}
            return [torch.from_numpy(result) for result in evaluator.run(None, feed)]

        return run


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress torch's warnings about traced constants, because outputs are compared, and graphs in error messages."""
    log = torch._C._jit_onnx_log
    with warnings.catch_warnings():
        for category in (torch.jit.TracerWarning, UserWarning, DeprecationWarning):
            warnings.simplefilter("ignore", category)
        torch._C._jit_onnx_log = lambda *_: None  # it cannot be switched off otherwise
        try:
            yield
        finally:
            torch._C._jit_onnx_log = log


def check_opset(opset: int) -> None:
    """Raise UserError for an unsupported opset."""
    if opset not in OPSETS:
        raise UserError(f"expected opset from {OPSETS[0]} to {OPSETS[-1]}, got {opset}")


def write(network: Network, samples: Samples, target: str, opset: int, directory: Path) -> dict[str, Any]:
    """Write policy.onnx or policy.pt into `directory`, read it back and run it; returns the values for the record."""
    example = (samples.inputs[0],)
    inputs = ["observation"]
    outputs = ["action"]
    if network.initial_memory is not None:
        example = (*example, network.initial_memory.expand(len(samples.inputs[0]), -1).contiguous())
        inputs = [*inputs, "memory"]
        outputs = [*outputs, "next_memory"]
    graph = Graph(network, example, inputs, outputs, {name: {0: "batch"} for name in (*inputs, *outputs)})
    actions = _rolled_out(graph.write(target, opset, directory), network.initial_memory, samples.inputs)
    return _opset(target, opset) | {"max_error": samples.error(actions, network.limits.half_range)}


def write_chunks(
    network: ChunkNetwork, samples: ChunkSamples, target: str, opset: int, directory: Path
) -> dict[str, Any]:
    """See `write`; each observation is an input of the network, and axes of variable length stay variable."""
    specs = network.inputs.specs
    example = samples.example
    axes = {name: {0: "batch"} for name in (*specs, "action")}
    for name, spec in specs.items():
        axes[name] |= {axis + 1: f"{name}_{axis + 1}" for axis, size in enumerate(spec.shape) if size < 0}
    graph = Graph(network, example, list(specs), ["action"], axes)
    (actions,) = graph.write(target, opset, directory)(tuple(samples.inputs.values()))
    return _opset(target, opset) | {"max_error": samples.error(actions)}


def _opset(target: str, opset: int) -> dict[str, Any]:
    return {"opset": opset} if target == "onnx" else {}


def _rolled_out(run: Run, initial: Tensor | None, inputs: Tensor) -> Tensor:
    """Actions [S, T, A] along sequences of observations [S, T, I]."""
    memory = [] if initial is None else [initial.expand(len(inputs), -1).contiguous()]
    outputs = []
    for observation in inputs.unbind(1):
        action, *memory = run((observation.contiguous(), *memory))
        outputs.append(action)
    return torch.stack(outputs, 1)
