"""Export of policies: written to a temporary folder, checked against the policy, then renamed into place atomically."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from embodied.errors import UserError
from embodied.export.chunk_network import ChunkNetwork
from embodied.export.conditions import Conditions
from embodied.export.network import DeployablePolicy, Network, without_unit
from embodied.policy import Policy
from embodied.saving.weights import implausible
from real_robot.firmware import examples, graphs, verify
from real_robot.firmware.quantization import quantized
from real_robot.firmware.record import CONTRACT, RECORD, write_record
from real_robot.firmware.samples import Samples, draw, draw_chunks
from real_robot.firmware.source import write_source
from real_robot.firmware.toolchain import KERNELS, run_on_host

log = logging.getLogger("embodied")

DEFAULT_OPSET = 17
CHECK_STEP = (0, 0)
"""Index of the input whose action the firmware checks at boot."""


class Target(Enum):
    """Export format."""

    c = "c"
    onnx = "onnx"
    torchscript = "torchscript"


class Weights(Enum):
    """Weight precision."""

    float32 = "float32"
    int16 = "int16"
    int8 = "int8"


TOLERANCE = {Weights.float32: 1e-5, Weights.int16: 0.01, Weights.int8: 0.05}
"""Largest allowed difference between export and policy, in half action ranges."""
CHUNK_TOLERANCE = 1e-4
"""Largest allowed difference for networks of chunks, with their many layers and steps of denoising."""
CHECK_TOLERANCE = {Weights.float32: 1e-5, Weights.int16: 1e-3, Weights.int8: 1e-3}
"""Largest allowed difference between firmware and network on the pair checked at boot, in half action ranges."""


@dataclass(frozen=True)
class Export:
    """Options of an export, and the checkpoint and weight checksum of its policy. `opset` is ONNX's.

    `conditions` are the training conditions, `margins` the results of `embodied.report.margins`, in words by condition.
    """

    target: Target
    weights: Weights = Weights.float32
    opset: int | None = None
    checkpoint: str | None = None
    weights_sha256: str | None = None
    conditions: Conditions | None = None
    margins: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise UserError for options that the target does not support."""
        if self.weights is not Weights.float32 and self.target is not Target.c:
            raise UserError(f"weights={self.weights.value} is for target=c, got target={self.target.value}")
        if self.opset is not None:
            if self.target is not Target.onnx:
                raise UserError(f"opset={self.opset} is for target=onnx, got target={self.target.value}")
            graphs.check_opset(self.opset)

    @property
    def name(self) -> str:
        """Default name of the export's folder."""
        return self.target.value if self.weights is Weights.float32 else f"{self.target.value}_{self.weights.value}"


def export(policy: Policy, options: Export, directory: Path) -> dict[str, Any]:
    """Write `policy` into `directory`, replacing an earlier export; returns the contents of export.json.

    Raises:
        UserError: if the policy, its contract or the directory do not allow an export, or the check fails; no files are
            left behind.
    """
    if not isinstance(policy, DeployablePolicy):
        expected = "policy=mlp, recurrent, attention, flow or diffusion"
        raise UserError(f"{type(policy).__name__} cannot be exported; expected {expected}")
    if options.target is Target.c and (delay := policy.contract.delay):
        raise UserError(f"firmware executes a chunk without the delay={delay} of its training; use target=onnx")
    if options.conditions is not None and options.conditions.caution:
        log.warning(f"{options.checkpoint} was {options.conditions.caution}")
    network = policy.deployable()
    if reason := implausible(network.state_dict()):
        raise UserError(f"the weights are not usable: {reason}; export an earlier checkpoint, or train again")
    if isinstance(network, ChunkNetwork):
        return _export_chunks(policy, network, options, directory)
    assert isinstance(network, Network)
    if options.target is Target.c:
        _check_units(network)
    samples = draw(policy, network)
    with _whole_directory(directory) as temporary:
        if options.target is Target.c:
            written = _write_c(network, samples, options, temporary)
        else:
            opset = options.opset or DEFAULT_OPSET
            written = graphs.write(network, samples, options.target.value, opset, temporary)
        _check_error(written["max_error"], TOLERANCE[options.weights] + network.limits.rounding, options)
        samples.save(temporary)
        return _finish(temporary, network, options, written | _shape(network))


def _export_chunks(policy: Policy, network: ChunkNetwork, options: Export, directory: Path) -> dict[str, Any]:
    """Export a policy that generates chunks from noise, as ONNX or TorchScript."""
    if options.target is Target.c:
        one_step = "a one-step actor with policy.steering.shared_noise=true, fixed-size observations and no ranking"
        advice = f"expected target=onnx or torchscript, or {one_step} (algorithm=one_step, offline=one_step)"
        raise UserError(f"{type(policy).__name__} generates chunks from noise, which target=c cannot express; {advice}")
    samples = draw_chunks(policy, network)
    tolerance = CHUNK_TOLERANCE + network.limits.rounding
    _check_error(samples.error(samples.outputs), tolerance, options)
    with _whole_directory(directory) as temporary:
        written = graphs.write_chunks(network, samples, options.target.value, options.opset or DEFAULT_OPSET, temporary)
        _check_error(written["max_error"], tolerance, options)
        samples.save(temporary)
        chunks = {"chunks": network.inputs.description(), "initial_memory": None}
        return _finish(temporary, network, options, written | chunks)


def _finish(
    directory: Path, network: Network | ChunkNetwork, options: Export, written: dict[str, Any]
) -> dict[str, Any]:
    (directory / CONTRACT).write_text(network.contract.to_json() + "\n", encoding="utf-8")
    description = {
        "target": options.target.value,
        "weights": options.weights.value,
        "checkpoint": options.checkpoint,
        "weights_sha256": options.weights_sha256,
        "conditions": asdict(options.conditions) if options.conditions else None,
        "margins": options.margins,
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "torch": torch.__version__,
    }
    return write_record(directory, description | written)


def strictness(record: dict[str, Any]) -> tuple[str, ...]:
    """Options of `verify` for an export with the `record`: none, or the tolerance that the policy's rounding needs."""
    if record["max_error"] <= verify.TOLERANCE[record["weights"]]:
        return ()
    return "--tolerance", f"{TOLERANCE[Weights(record['weights'])]:g}"


def summary(record: dict[str, Any]) -> str:
    """Summary line of an export's `record`: parameters, memory in bytes, error."""
    figures = {"parameters": record["parameters"]}
    if record["target"] == "c":
        figures |= {
            "bytes of constants": record["constant_bytes"],
            "bytes of RAM": record["static_bytes"],
            "bytes of arrays on the stack": record["scratch_bytes"],
        }
    examples_written = [
        f"{name} example" if status == examples.WRITTEN else f"no {name} example ({status})"
        for name, status in record.get("examples", {}).items()
    ]
    largest = f"largest difference from the policy {record['max_error']:.2g} half action ranges"
    return ", ".join([*(f"{value} {name}" for name, value in figures.items()), *examples_written, largest])


def _shape(network: Network) -> dict[str, Any]:
    initial = network.initial_memory
    return {
        "layers": [type(layer).__name__ for layer in network.layers],
        "inputs": network.inputs,
        "outputs": network.outputs,
        "initial_memory": None if initial is None else initial.tolist(),
    }


def _write_c(network: Network, samples: Samples, options: Export, directory: Path) -> dict[str, Any]:
    """Write C source and examples, and run the source on this machine; returns the values for the record."""
    dtype = {Weights.int16: torch.int16, Weights.int8: torch.int8}.get(options.weights)
    deployed = quantized(network, dtype) if dtype else network
    source = write_source(
        deployed,
        samples.inputs[CHECK_STEP],
        CHECK_TOLERANCE[options.weights],
        options.weights_sha256,
        options.conditions,
        options.margins,
    )
    (directory / "policy.h").write_text(source.header, encoding="utf-8")
    (directory / "policy.c").write_text(source.code, encoding="utf-8")
    shutil.copyfile(KERNELS, directory / KERNELS.name)
    written = examples.write(network.contract, source.scratch_bytes, directory)
    with tempfile.TemporaryDirectory() as work:
        outputs, status = run_on_host(directory, samples.inputs, Path(work))
    if status != 0:
        raise UserError(f"the exported policy_check() returned {status} on this machine, expected 0; see policy.h")
    return {
        "examples": written,
        "constant_bytes": source.constant_bytes,
        "constants_crc32": f"{source.crc32:08x}",
        "static_bytes": source.static_bytes,
        "scratch_bytes": source.scratch_bytes,
        "max_error": samples.error(outputs, network.limits.half_range),
    }


def _check_error(error: float, tolerance: float, options: Export) -> None:
    if not error <= tolerance:
        advice = {Weights.int16: "; use weights=float32", Weights.int8: "; use weights=int16"}.get(options.weights, "")
        raise UserError(
            f"the export differs from the policy by {error:.2g} half action ranges, expected at most {tolerance:g}"
            f"{advice}"
        )


def _check_units(network: Network) -> None:
    if unknown := without_unit(network.contract):
        raise UserError(
            f"the contract has no unit of {', '.join(unknown)}, which target=c needs; use target=onnx or torchscript, "
            'or set unit in its TensorSpec ("1" for dimensionless numbers) and train again'
        )


@contextmanager
def _whole_directory(directory: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `directory` on success and is deleted on failure."""
    if directory.exists() and not (directory / RECORD).exists():
        raise UserError(f"{directory} exists and is not an export; choose another output")
    missing = [parent for parent in directory.parents if not parent.exists()]
    temporary = directory.with_name(f".{directory.name}.{os.getpid()}.tmp")
    temporary.mkdir(parents=True)
    try:
        yield temporary
        # rename the earlier export away first: a folder cannot be replaced in one step
        if directory.exists():
            earlier = directory.with_name(f".{directory.name}.{os.getpid()}.old")
            directory.rename(earlier)
            temporary.rename(directory)
            shutil.rmtree(earlier)
        else:
            temporary.rename(directory)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        with suppress(OSError):
            for parent in missing:  # folders that were created for it, innermost first
                parent.rmdir()
        raise
