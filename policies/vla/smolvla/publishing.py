"""Publishes a trained SmolVLA as LeRobot's folder `pretrained_model`, which LeRobot and `policy.weights` read.

Written are config.json with the features of the task, model.safetensors, both processors with the statistics, the
tokenizer, the contract and a model card. Differs from acting here: LeRobot does not clamp actions to their limits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from policies.vla.checkpoints.lerobot_folder import (
    BEGINNING,
    CPU,
    fields_of,
    normalisers,
    source_of,
    statistics_of,
    step,
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


def publish(policy: SmolVLAPolicy, folder: Path, run: Path) -> None:
    """Write `policy` into `folder`, which must not exist; the card ends with the report of the directory `run`.

    Adapters are merged into the weights of `policy`, which has none afterwards.

    Raises:
        UserError: for a folder that exists, and a policy without published weights, whose vision-language model
            LeRobot's configuration would have to name.
    """
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
    assert policy.inputs.tokenizer
    words = step(
        "tokenizer_processor",
        max_length=policy.inputs.tokenizer.longest,
        task_key="task",
        padding_side="right",
        padding=config.get("pad_language_to", "longest"),
        truncation=True,
        tokenizer_name=config["vlm_model_name"],
    )
    normaliser, unnormaliser = normalisers(config)
    before = [*BEGINNING, step("smolvla_new_line_processor"), words, CPU, normaliser]
    statistics = statistics_of(policy, (Mode.MEAN_STD, Mode.MEAN_STD))
    write_processors(folder, before, [unnormaliser, CPU], statistics)
