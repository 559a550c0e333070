"""Checkpoints of small policies for contracts that have no simulator here."""

from pathlib import Path

import torch
from tensordict import TensorDict

from embodied.contract import Contract
from embodied.saving import checkpoint
from policies.flow import FlowConfig
from policies.mlp import MLPConfig, MLPPolicy


def untrained(run: Path, contract: Contract) -> MLPPolicy:
    """A policy of random weights, saved as train.py would save it in `run`."""
    torch.manual_seed(0)
    config = MLPConfig(hidden=[16])
    policy = config.build(contract)
    observation = {key: torch.randn(64, *spec.shape) for key, spec in contract.observation.items()}
    policy.fit(TensorDict(observation, batch_size=[64]), torch.zeros(64, 1, *contract.action.shape))
    described = {"hidden": config.hidden, "initial_std": config.initial_std}
    saved = {"choices": {"policy": "mlp"}, "values": {"policy": described}}
    checkpoint.save(run, checkpoint.Checkpoint(policy.state_dict(), contract, saved))
    return policy


def untrained_flow(run: Path, contract: Contract) -> None:
    """A flow policy without statistics, which can be loaded and not asked, saved as train.py would save it in `run`."""
    described = {"width": 16, "hidden": 16}
    policy = FlowConfig(**described).build(contract)
    saved = {"choices": {"policy": "flow"}, "values": {"policy": described}}
    checkpoint.save(run, checkpoint.Checkpoint(policy.state_dict(), contract, saved))
