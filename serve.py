"""Serve a trained policy to robots: python serve.py checkpoint=DIR [key=value ...].

DIR is a run, such as outputs/libero_pick/<run>, one of its checkpoints, or an export with target=onnx. Clients are
`real_robot/serving/policy_client.py` and openpi's; they send the token in `token_file`, which is created if missing.
vla-eval's benchmarks evaluate the policy at ws://vla-eval:TOKEN@HOST:PORT/vla-eval. There is no encryption: to reach a
robot elsewhere, keep the default host and use a tunnel. Options, with their defaults, are printed by --help.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from omegaconf import MISSING

from embodied.command_line import program
from embodied.command_line.config import compose
from embodied.configuration import Configuration, Port, PositiveInt
from embodied.errors import UserError
from embodied.policy import Policy
from embodied.runtime.interrupt import GracefulStop
from embodied.saving import checkpoint
from embodied.task import Convention
from embodied.training.compute import prepare
from policies.registry import trained_policy
from real_robot.serving.credentials import token
from real_robot.serving.onnx_policy import OnnxPolicy
from real_robot.serving.policy_server import PolicyServer, ServerLimits

log = logging.getLogger("embodied")


@dataclass
class ServeConfig(Configuration):
    """`port=0` chooses a free port; at most `clients` are served at once; `token_file` defaults to one in the run."""

    checkpoint: str = MISSING
    host: str = "127.0.0.1"
    port: Port = 8000
    token_file: str | None = None
    clients: PositiveInt = 8
    device: str = "cpu"
    threads: PositiveInt | None = None


def run(arguments: list[str]) -> None:
    """Serve until Ctrl-C or SIGTERM."""
    config, _ = compose(ServeConfig, "serve", arguments, {})
    prepare(config.device, config.threads)
    policy, path, folder, convention = _load(config)
    token_file = Path(config.token_file or folder / "policy_token")
    limits = ServerLimits(clients=config.clients)
    with (
        GracefulStop() as stop,
        PolicyServer(
            policy,
            token(token_file),
            host=config.host,
            port=config.port,
            device=config.device,
            limits=limits,
            convention=convention,
        ) as server,
    ):
        log.info(f"serving {path} at ws://{config.host}:{server.port}, token in {token_file}; Ctrl-C ends it")
        while not stop.requested:
            time.sleep(0.1)


def _load(config: ServeConfig) -> tuple[Policy, Path, Path, Callable[[], Convention | None]]:
    """Load the policy; returns it with its path, the folder for the token and what returns its benchmark's convention.

    An export has no task, and therefore no convention.
    """
    export = Path(config.checkpoint)
    if (export / "policy.onnx").exists():
        if config.device != "cpu":
            raise UserError(f"an ONNX export runs on the CPU; expected device=cpu, got device={config.device}")
        return OnnxPolicy(export), export, export.parent, lambda: None
    saved = checkpoint.load(config.checkpoint)
    path = Path(saved.path or "")
    return trained_policy(saved).to(config.device), path, path.parent.parent, lambda: _convention(saved)


def _convention(saved: checkpoint.Checkpoint) -> Convention | None:
    """Convention of the published datasets of the task's benchmark; only vla-eval's clients need the task."""
    from embodied.command_line.train_options import GROUPS, TrainConfig

    return compose(TrainConfig, "train", [], GROUPS, saved.config)[0].task.convention()


def describe(_: list[str]) -> str:
    """Describe the options."""
    return program.options(__doc__, ServeConfig)


if __name__ == "__main__":
    sys.exit(program.main(run, describe, sys.argv[1:], lambda given: compose(ServeConfig, "serve", given, {})))
