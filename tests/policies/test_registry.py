"""A policy can be rebuilt from its checkpoint only, or a one-line error says why not."""

from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from embodied.contract import Contract, TensorSpec
from embodied.saving import checkpoint
from embodied.saving.checkpoint import Checkpoint
from policies.mlp import MLPConfig
from policies.registry import trained_policy

CONTRACT = Contract({"x": TensorSpec((3,))}, TensorSpec((2,), low=(-1.0, -1.0), high=(1.0, 1.0)), 0.1)


def saved(path: Path, choice: str = "mlp", **values: object) -> Checkpoint:
    policy = MLPConfig(hidden=[8]).build(CONTRACT)
    policy.fit(TensorDict({"x": torch.randn(9, 3)}, batch_size=[9]), torch.zeros(9, 2))
    config = {"choices": {"policy": choice}, "values": {"policy": {"hidden": [8], "initial_std": 0.5} | values}}
    checkpoint.save(path, Checkpoint(policy=policy.state_dict(), contract=CONTRACT, config=config))
    return checkpoint.load(path)


def test_it_acts_as_it_was_trained(tmp_path: Path):
    found = saved(tmp_path)
    observation = TensorDict({"x": torch.randn(4, 3)}, batch_size=[4])
    policy = MLPConfig(hidden=[8]).build(CONTRACT)
    found.restore(policy)
    actions = trained_policy(found).act(observation, deterministic=True).actions
    assert torch.equal(actions, policy.act(observation, deterministic=True).actions)


@pytest.mark.parametrize(
    ("choice", "values", "message"),
    [
        ("transformer", {}, "names no policy; expected a checkpoint of train.py"),
        ("mlp", {"hidden": [32]}, "are of another network"),
        ("mlp", {"heads": 3}, "is of another version"),
    ],
)
def test_what_cannot_be_rebuilt_is_reported(tmp_path: Path, choice: str, values: dict, message: str):
    with pytest.raises(ValueError, match=message):
        trained_policy(saved(tmp_path, choice, **values))
