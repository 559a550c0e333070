"""Export a trained policy: python export.py checkpoint=DIR target=c|onnx|torchscript|transformers|peft [key=value ...].

DIR is a run, such as outputs/quadrotor_hover/<run>, or one of its checkpoints. The exported policy includes
normalisation; contract.json beside it describes inputs and outputs. C is verified on an emulated microcontroller by
`python -m real_robot.firmware.verify OUTPUT`. For policy=pi0: transformers writes the weights, adapters merged into
them, and peft the adapters alone, both with a model card. Options, with their defaults, are printed by --help.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from omegaconf import MISSING

from embodied.command_line import program
from embodied.command_line.config import compose
from embodied.errors import UserError
from embodied.saving import checkpoint
from policies.registry import trained_policy
from policies.vla.pi0 import Pi0Policy
from policies.vla.publishing import publish, push
from real_robot.firmware.exporting import Export, Target, Weights, export, summary

log = logging.getLogger("embodied")


class Format(Enum):
    """Export format: those of `real_robot.firmware`, and the folders of `policies.vla.publishing`."""

    c = "c"
    onnx = "onnx"
    torchscript = "torchscript"
    transformers = "transformers"
    peft = "peft"


@dataclass
class ExportConfig:
    """`weights=int8` is for target=c, `opset` (17 to 20) for target=onnx; `output` defaults to a folder in the run.

    `hub=OWNER/NAME` uploads what target=transformers or peft has written.
    """

    checkpoint: str = MISSING
    target: Format = Format.c
    weights: Weights = Weights.float32
    opset: int | None = None
    output: str | None = None
    hub: str | None = None


def run(arguments: list[str]) -> None:
    """Rebuild the policy from its checkpoint, without its task, and write it."""
    config, _ = compose(ExportConfig, "export", arguments, {})
    if config.target in (Format.transformers, Format.peft):
        return _publish(config)
    if config.hub:
        raise UserError(f"hub={config.hub} is for target=transformers or peft, got target={config.target.value}")
    options = Export(Target(config.target.value), config.weights, config.opset, config.checkpoint)
    saved = checkpoint.load(config.checkpoint)
    options = replace(options, weights_sha256=saved.weights_sha256)
    policy = trained_policy(saved)
    output = Path(config.output or Path(saved.path or "").parent.parent / "export" / options.name)
    record = export(policy, options, output)
    log.info(f"wrote {output}: {summary(record)}")
    if config.target is Format.c:
        log.info(f"verify it: python -m real_robot.firmware.verify {output}")
    return None


def _publish(config: ExportConfig) -> None:
    if config.weights is not Weights.float32 or config.opset is not None:
        raise UserError(f"target={config.target.value} takes neither weights= nor opset=")
    saved = checkpoint.load(config.checkpoint)
    policy = trained_policy(saved)
    if not isinstance(policy, Pi0Policy):
        raise UserError(f"target={config.target.value} is for policy=pi0, got {type(policy).__name__}")
    directory = Path(saved.path or "").parent.parent
    output, report = Path(config.output or directory / "export" / config.target.value), directory / "report.md"
    told = report.read_text() if report.exists() else ""
    publish(policy, output, peft=config.target is Format.peft, report=told)
    log.info(f"wrote {output}; policy.weights={output} reads it")
    if config.hub:
        log.info(f"uploaded to {push(output, config.hub)}")


def describe(_: list[str]) -> str:
    """Options."""
    return program.options(__doc__, ExportConfig)


if __name__ == "__main__":
    sys.exit(program.main(run, describe, sys.argv[1:]))
