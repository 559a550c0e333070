"""What the programs put into the nodes: policies by checkpoint, export or address, simulators by checkpoint."""

from __future__ import annotations

from typing import cast

from omegaconf import OmegaConf

from embodied import checkpoint
from embodied.environment import StartEnvironment
from embodied.policy import Policy
from embodied.task import PolicyConfig
from policies.registry import POLICIES
from real_robot.ros2.policy_node import PolicySettings
from real_robot.ros2.sim_node import SimSettings


def load_policy(settings: PolicySettings) -> Policy:
    """The policy that `settings` name.

    Raises:
        ValueError: on one line, where there is none.
    """
    saved = checkpoint.load(settings.checkpoint)
    choice, values = (saved.config.get(kind, {}).get("policy") for kind in ("choices", "values"))
    if choice not in POLICIES:
        raise ValueError(f"the configuration of {saved.path} has policy {choice!r}; expected {', '.join(POLICIES)}")
    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(POLICIES[choice]), values))
    policy = cast(PolicyConfig, config).build(saved.contract).to(settings.device)
    saved.restore(policy)
    return policy


def load_environment(settings: SimSettings) -> StartEnvironment:
    """One environment of the task of a run, that executes single actions.

    Raises:
        ValueError: on one line, where the run or an override is not valid.
    """
    # train.py and configs/ stay in the clone: simulators run from there
    from embodied.config import compose
    from train import GROUPS, TrainConfig

    saved = checkpoint.load(settings.checkpoint)
    trained, _ = compose(TrainConfig, "train", settings.overrides, GROUPS, saved.config)
    task = trained.task
    if hasattr(task, "executed"):
        task.horizon = task.executed = 1
    return task.environment(1, settings.distribution or task.distributions[0], "eval")
