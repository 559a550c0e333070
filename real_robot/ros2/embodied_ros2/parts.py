"""Loads the policies (by checkpoint, export or address) and simulators (by checkpoint) of the nodes."""

from __future__ import annotations

from pathlib import Path

from embodied.environment import NumberedStarts
from embodied.errors import UserError
from embodied.policy import Policy
from embodied.saving import checkpoint
from policies.registry import trained_policy
from real_robot.ros2.nodes.policy import PolicySettings
from real_robot.ros2.nodes.sim import SimSettings
from real_robot.serving.onnx_policy import OnnxPolicy
from real_robot.serving.policy_client import PolicyClient


def load_policy(settings: PolicySettings) -> Policy:
    """Load the policy of `settings`: from a checkpoint, an ONNX export, or a policy server.

    Raises:
        UserError: unless exactly one of checkpoint and server is set.
        OSError: if the server cannot be reached.
    """
    if bool(settings.checkpoint) == bool(settings.server):
        raise UserError("expected either checkpoint or server")
    if settings.server:
        if not settings.token_file:
            raise UserError("expected token_file, the file with the policy server's token")
        return PolicyClient(settings.server, Path(settings.token_file).read_text(encoding="utf-8").strip())
    if (Path(settings.checkpoint) / "policy.onnx").exists():
        return OnnxPolicy(settings.checkpoint)
    return trained_policy(checkpoint.load(settings.checkpoint)).to(settings.device)


def load_environment(settings: SimSettings) -> NumberedStarts:
    """Make one environment of a run's task that executes single actions.

    Raises:
        UserError: if the run or an override is not valid.
    """
    # imported here, because nodes of robots need no simulators
    from embodied.command_line.config import compose
    from embodied.command_line.train_options import GROUPS, TrainConfig

    saved = checkpoint.load(settings.checkpoint)
    trained, _ = compose(TrainConfig, "train", settings.overrides.split(), GROUPS, saved.config)
    task = trained.task
    if hasattr(task, "executed"):
        task.horizon = task.executed = 1
    return task.environment(1, settings.distribution or task.distributions[0], "eval")
