"""Export a policy: python export.py checkpoint=DIR target=TARGET [key=value ...].

TARGET is c, onnx, torchscript, hub, transformers, peft, lerobot or openpi. DIR is a run, such as
outputs/quadrotor_hover/<run>, or one of its checkpoints. The exported policy includes normalisation; contract.json
describes inputs and outputs. `python -m real_robot.firmware.verify OUTPUT` verifies C on an emulated microcontroller.
For policy=pi0: transformers writes the weights, adapters merged into them, and peft the adapters alone. For
policy=pi0 and pi05: openpi writes a checkpoint of openpi's PyTorch models. For policy=pi0, pi05, pi0_fast, smolvla,
groot, act and diffusion: lerobot writes LeRobot's folder pretrained_model. For policy=pi05, smolvla and groot, too,
peft writes adapters. For any policy, hub writes the checkpoint without its training state. --help lists the options.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from omegaconf import MISSING

from embodied.command_line import program
from embodied.command_line.config import compose
from embodied.commands import module, typed
from embodied.configuration import Configuration, PositiveInt
from embodied.errors import UserError
from embodied.report import margins
from embodied.saving import checkpoint
from embodied.saving.publishing import publish, push
from policies.lerobot.publishing import publish as publish_lerobot
from policies.registry import trained_policy
from policies.vla.checkpoints.openpi_publishing import publish as publish_openpi
from policies.vla.checkpoints.publishing import publish as publish_vla
from real_robot.firmware.exporting import Export, Target, Weights, export, strictness, summary
from sims.registry import conditions

log = logging.getLogger("embodied")


class Format(Enum):
    """Export format: a format of `real_robot.firmware`, or a folder with a model card."""

    c = "c"
    onnx = "onnx"
    torchscript = "torchscript"
    hub = "hub"
    transformers = "transformers"
    peft = "peft"
    lerobot = "lerobot"
    openpi = "openpi"


FOLDERS = (Format.hub, Format.transformers, Format.peft, Format.lerobot, Format.openpi)
"""Formats of a folder with a model card."""


@dataclass
class ExportConfig(Configuration):
    """`weights=int16` and `int8` are for target=c, `opset` (17 to 20) is for target=onnx.

    `output` defaults to a folder in the run.
    `hub=OWNER/NAME` uploads the folder written by target=hub, transformers, peft, lerobot or openpi.
    `asset_id` is openpi's name of the statistics that target=openpi writes, by default that of the published weights.
    """

    checkpoint: str = MISSING
    target: Format = Format.c
    weights: Weights = Weights.float32
    opset: PositiveInt | None = None
    output: str | None = None
    hub: str | None = None
    asset_id: str | None = None


def run(arguments: list[str]) -> None:
    """Rebuild the policy from its checkpoint, without its task, and write it."""
    config, _ = compose(ExportConfig, "export", arguments, {})
    if config.asset_id is not None and config.target is not Format.openpi:
        raise UserError(f"asset_id={config.asset_id} is for target=openpi, got {config.target.value}")
    if config.target in FOLDERS:
        return _publish(config)
    if config.hub:
        *names, last = (each.value for each in FOLDERS)
        raise UserError(f"hub={config.hub} is for target={', '.join(names)} or {last}, got {config.target.value}")
    target, saved = Target(config.target.value), checkpoint.load(config.checkpoint)
    results = checkpoint.results_folder(Path(saved.path or ""))
    provenance = {
        "conditions": conditions(saved.config),
        "margins": margins.words(results, sha := saved.weights_sha256),
    }
    options = Export(target, config.weights, config.opset, config.checkpoint, sha, **provenance)
    record = export(trained_policy(saved), options, output := Path(config.output or results / "export" / options.name))
    log.info(f"wrote {output}: {summary(record)}")
    if config.target is Format.c:
        log.info(f"verify it: {module('real_robot.firmware.verify', output, *strictness(record))}")


def _publish(config: ExportConfig) -> None:
    if config.weights is not Weights.float32 or config.opset is not None:
        raise UserError(f"target={config.target.value} takes neither weights= nor opset=")
    saved = checkpoint.load(config.checkpoint)
    directory = (path := Path(saved.path or "")).parent.parent
    output = Path(config.output or checkpoint.results_folder(path) / "export" / config.target.value)
    if config.target is Format.hub:
        publish(saved, directory, output)
    elif config.target is Format.lerobot:
        publish_lerobot(trained_policy(saved), output, directory)
    elif config.target is Format.openpi:
        publish_openpi(trained_policy(saved), output, directory, config.asset_id)
    else:
        publish_vla(trained_policy(saved), output, directory, peft=config.target is Format.peft)
    option = "checkpoint" if config.target is Format.hub else "policy.weights"
    log.info(f"wrote {output}; {typed(option, output)} reads it")
    if config.hub:
        log.info(f"uploaded to {push(output, config.hub)}")


def describe(_: list[str]) -> str:
    """Describe the options."""
    return program.options(__doc__, ExportConfig)


if __name__ == "__main__":
    sys.exit(program.main(run, describe, sys.argv[1:], lambda given: compose(ExportConfig, "export", given, {})))
