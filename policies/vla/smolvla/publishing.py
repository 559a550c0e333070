"""Publishes a trained SmolVLA as LeRobot's folder `pretrained_model`, which LeRobot and `policy.weights` read.

Written are config.json with the features of the task, model.safetensors, both processors with the statistics, the
tokenizer, the contract and a model card. Differs from acting here: LeRobot does not clamp actions to their limits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from embodied.errors import UserError
from embodied.policy import TrainablePolicy
from policies.vla.checkpoints.lerobot_folder import (
    CPU,
    fields_of,
    source_of,
    write_json,
    write_processors,
    write_weights,
)
from policies.vla.checkpoints.publishing import write_description
from policies.vla.checkpoints.settings import CONFIG, pictures
from policies.vla.checkpoints.statistics import Mode
from policies.vla.smolvla.policy import SmolVLAPolicy
from policies.vla.smolvla.weights import own_name, vlm_of

MODES = {"VISUAL": Mode.IDENTITY.value, "STATE": Mode.MEAN_STD.value, "ACTION": Mode.MEAN_STD.value}
BEFORE, AFTER = (
    f"policy_{part}processor_step_{step}_{kind}_processor.safetensors"
    for part, step, kind in (("pre", 5, "normalizer"), ("post", 0, "unnormalizer"))
)
"""Files with the statistics of the two processors; the number is the place of the step."""


def publish(policy: TrainablePolicy, folder: Path, run: Path) -> None:
    """Write `policy` into `folder`, which must not exist; the card ends with the report of the directory `run`.

    Adapters are merged into the weights of `policy`, which has none afterwards.

    Raises:
        UserError: for a folder that exists, another policy, or one without published weights, whose vision-language
            model LeRobot's configuration would have to name.
    """
    if not isinstance(policy, SmolVLAPolicy):
        raise UserError(f"target=lerobot is for policy=smolvla and groot, got {type(policy).__name__}; use target=hub")
    source, published = source_of(policy, folder)
    config = {
        **published,
        **fields_of(policy, pictures(published)),
        "normalization_mapping": MODES,
        "num_steps": policy.grid.steps,
        "vlm_model_name": vlm_of(source, published),
    }
    folder.mkdir(parents=True)
    write_json(folder / CONFIG, config)
    write_weights(policy, source, folder, own_name, lambda name: f"model.{name}")
    _write_processors(policy, folder, config)
    if policy.inputs.tokenizer:
        policy.inputs.tokenizer.tokenizer.save_pretrained(folder)
    write_description(policy, folder, run, "lerobot")


def _write_processors(policy: SmolVLAPolicy, folder: Path, config: dict[str, Any]) -> None:
    """Write LeRobot's steps before and after the model, with the statistics of state and action."""
    size, state = policy.inputs.state_size, policy.inputs.state
    statistics = {
        "observation.state.mean": state.mean[:size],
        "observation.state.std": state.scale[:size],
        "action.mean": policy.action_mean,
        "action.std": policy.action_std,
    }
    assert policy.inputs.tokenizer
    words = {
        "max_length": policy.inputs.tokenizer.longest,
        "task_key": "task",
        "padding_side": "right",
        "padding": config.get("pad_language_to", "longest"),
        "truncation": True,
        "tokenizer_name": config["vlm_model_name"],
    }
    features = {**config["input_features"], **config["output_features"]}
    before = [
        {"registry_name": "rename_observations_processor", "config": {"rename_map": {}}},
        {"registry_name": "to_batch_processor", "config": {}},
        {"registry_name": "smolvla_new_line_processor", "config": {}},
        {"registry_name": "tokenizer_processor", "config": words},
        CPU,
        _normaliser("normalizer_processor", features, BEFORE),
    ]
    after = [_normaliser("unnormalizer_processor", config["output_features"], AFTER), CPU]
    write_processors(folder, before, after, statistics)


def _normaliser(kind: str, features: dict[str, Any], file: str) -> dict[str, Any]:
    options = {"eps": 1e-8, "features": features, "norm_map": MODES}
    return {"registry_name": kind, "config": options, "state_file": file}
