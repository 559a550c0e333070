"""Publishes a trained pi0-FAST as LeRobot's folder `pretrained_model`, which LeRobot and `policy.weights` read.

Written are config.json, model.safetensors with exactly the names that LeRobot's strict loader expects, both processors
with the statistics, PaliGemma's tokenizer, the folder `fast` with FAST's files, the contract and a model card. Differs
from acting here: LeRobot lets the model write "Action: " and any token, and the prompt attend to the answer's first
token; it executes whole chunks, and does not clamp actions to their limits.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

from policies.vla.checkpoints.lerobot_folder import (
    BEGINNING,
    CPU,
    fields_of,
    loading,
    mapping_of,
    modes_of,
    normalisers,
    observed,
    source_of,
    statistics_of,
    step,
    warn_of_tokenizer,
    words_step,
    write_json,
    write_processors,
    write_weights,
)
from policies.vla.checkpoints.openpi_publishing import openpi_name
from policies.vla.checkpoints.publishing import check_unpadded, write_description
from policies.vla.checkpoints.settings import CONFIG, pictures
from policies.vla.checkpoints.statistics import Mode
from policies.vla.checkpoints.weights import TOKENIZER
from policies.vla.pi0_fast.policy import Pi0FastPolicy
from policies.vla.pi0_fast.weights import SKIPPED, own_name
from policies.vla.pi05 import LONGEST

log = logging.getLogger(__name__)
FAST = "fast"
"""Folder of FAST's files beside the weights."""


def publish(policy: Pi0FastPolicy, folder: Path, run: Path) -> None:
    """Write `policy` into `folder`, which must not exist; the card ends with the report of the directory `run`.

    Raises:
        UserError: for a folder that exists, and policies that LeRobot cannot represent: those without published
            weights, and those whose prompts have a padded state.
    """
    source, published = source_of(policy, folder)
    _check_representable(policy)
    modes = modes_of(policy, source, published, (Mode.QUANTILES, Mode.QUANTILES))
    config = published | _fields(policy, folder, published) | {"normalization_mapping": mapping_of(modes)}
    folder.mkdir(parents=True)
    write_json(folder / CONFIG, config)
    write_weights(policy, source, folder, own_name, lambda name: f"model.{openpi_name(f'model.vlm.{name}')}")
    _write_processors(policy, folder, config, statistics_of(policy, modes))
    assert policy.inputs.tokenizer
    policy.inputs.tokenizer.tokenizer.save_pretrained(folder)
    _copy_fast(Path(str(policy.config.action_tokenizer)), folder / FAST)
    write_description(policy, folder, run, "lerobot", _usage(policy, config))


def _check_representable(policy: Pi0FastPolicy) -> None:
    """Raise UserError for a policy that LeRobot cannot represent; warn about what it does otherwise."""
    check_unpadded(policy)
    horizon, executed = policy.contract.horizon, policy.contract.executed
    if executed < horizon:
        log.warning(f"LeRobot's select_action executes all {horizon} actions of a chunk, this policy {executed}")
    warn_of_tokenizer(policy)


def _fields(policy: Pi0FastPolicy, folder: Path, published: dict[str, Any]) -> dict[str, Any]:
    """Fields of config.json that differ from the `published` ones, or that the processors need."""
    return {
        **fields_of(policy, pictures(published)),
        # LeRobot decodes an answer as a chunk of n_action_steps, which FAST has encoded as one of chunk_size
        "n_action_steps": policy.contract.horizon,
        "max_action_tokens": policy.longest,
        "max_decoding_steps": policy.longest + policy.lead.shape[1] - 1,  # all but the beginning is generated
        "fast_skip_tokens": published.get("fast_skip_tokens", SKIPPED),
        "image_resolution": [policy.model.picture_size] * 2,
        "tokenizer_max_length": LONGEST,
        "text_tokenizer_name": published.get("text_tokenizer_name", TOKENIZER),
        "action_tokenizer_name": str((folder / FAST).resolve()),
        "temperature": 0.0,
        "dtype": "float32",
    }


def _write_processors(policy: Pi0FastPolicy, folder: Path, config: dict[str, Any], statistics: dict[str, Any]) -> None:
    """Write LeRobot's steps before and after the model, with the `statistics` of state and action."""
    normaliser, unnormaliser = normalisers(config)
    actions = step(
        "action_tokenizer_processor",
        trust_remote_code=True,  # of FAST's processor
        action_tokenizer_name=config["action_tokenizer_name"],
        paligemma_tokenizer_name=config["text_tokenizer_name"],
        max_action_tokens=config["max_action_tokens"],
        fast_skip_tokens=config["fast_skip_tokens"],
    )
    # LeRobot 0.4 pads the state to this size before it is in the prompt
    state = step("pi0_fast_prepare_state_tokenizer_processor_step", max_state_dim=policy.inputs.state_size)
    words = words_step(config["tokenizer_max_length"], config["text_tokenizer_name"])
    write_processors(folder, [*BEGINNING, normaliser, state, words, actions, CPU], [unnormaliser, CPU], statistics)


def _copy_fast(source: Path, folder: Path) -> None:
    """Copy FAST's files from `source` into a new `folder`, with the program of its processor, which LeRobot runs."""
    folder.mkdir()
    for file in (*source.glob("*.json"), *source.glob("*.py")):
        shutil.copy(file, folder)
    if not list(folder.glob("*.py")):
        log.warning(
            f"policy.action_tokenizer={source} lacks the Python file of FAST's processor, without which LeRobot cannot"
            f" load it: put it into {folder}"
        )


def _usage(policy: Pi0FastPolicy, config: dict[str, Any]) -> list[str]:
    """Lines of the card on how both programs load the folder, and what LeRobot does otherwise."""
    words = (
        "preprocessor_overrides={'tokenizer_processor': {'tokenizer_name': FOLDER}, 'action_tokenizer_processor':"
        f" {{'action_tokenizer_name': FOLDER + '/{FAST}', 'paligemma_tokenizer_name': FOLDER}}}}"
    )
    horizon, executed = policy.contract.horizon, policy.contract.executed
    return [
        f"`policy.action_tokenizer=FOLDER/{FAST}` belongs to `policy.weights=FOLDER`. In LeRobot:",
        "",
        *loading(policy.kind, "PI0FastPolicy", "predict_action_chunk", words),
        "config.json names PaliGemma's tokenizer on the hub, where it needs an account, and FAST where this folder was"
        " written. Elsewhere give `from_pretrained` a `config`, `PreTrainedConfig.from_pretrained(FOLDER)`, whose"
        f" `text_tokenizer_name` is FOLDER and whose `action_tokenizer_name` is FOLDER/{FAST}.",
        "",
        observed(policy, config) + ' LeRobot lets the model write "Action: " and any token, and its prompt attend to'
        f" the answer's first token. Its chunks have {horizon} actions: execute {executed} of them.",
    ]
