"""What the programs put into the nodes: policies by checkpoint, export or address, simulators by checkpoint."""

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
    """The policy that `settings` name: of a checkpoint, an export to ONNX, or a policy server.

    Raises:
        UserError: on one line, where there is none, or not one alone is named.
        OSError: where the server cannot be reached.
    """
    if bool(settings.checkpoint) == bool(settings.server):
        raise UserError("expected one of checkpoint and server")
    if settings.server:
        if not settings.token_file:
            raise UserError("expected token_file, which holds the token of the policy server")
        return PolicyClient(settings.server, Path(settings.token_file).read_text().strip())
    if (Path(settings.checkpoint) / "policy.onnx").exists():
        return OnnxPolicy(settings.checkpoint)
    return trained_policy(checkpoint.load(settings.checkpoint)).to(settings.device)


def load_environment(settings: SimSettings) -> NumberedStarts:
    """One environment of the task of a run, that executes single actions.

    Raises:
        UserError: on one line, where the run or an override is not valid.
    """
    # train.py and configs/ stay in the clone: simulators run from there
    from embodied.command_line.config import compose
    from train import GROUPS, TrainConfig

    saved = checkpoint.load(settings.checkpoint)
    trained, _ = compose(TrainConfig, "train", settings.overrides.split(), GROUPS, saved.config)
    task = trained.task
    if hasattr(task, "executed"):
        task.horizon = task.executed = 1
    return task.environment(1, settings.distribution or task.distributions[0], "eval")
