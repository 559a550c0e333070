"""Export a trained policy: python export.py checkpoint=DIR target=c|onnx|torchscript [key=value ...].

DIR is a run, such as outputs/quadrotor_hover/<run>, or one of its checkpoints. The exported policy includes
normalisation; contract.json beside it describes inputs and outputs. C is verified on an emulated microcontroller by
`python -m real_robot.firmware.verify OUTPUT`. Options, with their defaults, are printed by --help.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from omegaconf import MISSING

from embodied.command_line import program
from embodied.command_line.config import compose
from embodied.saving import checkpoint
from policies.registry import trained_policy
from real_robot.firmware.exporting import Export, Target, Weights, export, summary

log = logging.getLogger("embodied")


@dataclass
class ExportConfig:
    """`weights=int8` is for target=c, `opset` (17 to 20) for target=onnx; `output` defaults to a folder in the run."""

    checkpoint: str = MISSING
    target: Target = Target.c
    weights: Weights = Weights.float32
    opset: int | None = None
    output: str | None = None


def run(arguments: list[str]) -> None:
    """Rebuild the policy from its checkpoint, without its task, and write it."""
    config, _ = compose(ExportConfig, "export", arguments, {})
    options = Export(config.target, config.weights, config.opset, config.checkpoint)
    saved = checkpoint.load(config.checkpoint)
    options = replace(options, weights_sha256=saved.weights_sha256)
    policy = trained_policy(saved)
    output = Path(config.output or Path(saved.path or "").parent.parent / "export" / options.name)
    record = export(policy, options, output)
    log.info(f"wrote {output}: {summary(record)}")
    if config.target is Target.c:
        log.info(f"verify it: python -m real_robot.firmware.verify {output}")


def describe(_: list[str]) -> str:
    """Options."""
    return program.options(__doc__, ExportConfig)


if __name__ == "__main__":
    sys.exit(program.main(run, describe, sys.argv[1:]))
