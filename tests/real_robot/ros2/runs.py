"""Checkpoints of small policies for contracts that have no simulator here."""

from pathlib import Path

import torch
from tensordict import TensorDict

from embodied.contract import Contract
from embodied.saving import checkpoint
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
