"""Publishes a trained pi0 or pi0.5 as LeRobot's folder `pretrained_model`, which LeRobot and `policy.weights` read.

Written are config.json, model.safetensors with exactly the names that LeRobot's strict loader expects, both processors
with the statistics, the tokenizer, the contract and a model card. The weights may come from any layout. Differs from
acting here: LeRobot does not clamp actions to their limits, and resizes pictures without antialiasing.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from embodied.errors import UserError
from policies.vla.checkpoints import settings
from policies.vla.checkpoints.lerobot_folder import (
    BEGINNING,
    CPU,
    Step,
    fields_of,
    loading,
    mapping_of,
    modes_of,
    normalisers,
    observed,
    statistics_of,
    step,
    warn_of_tokenizer,
    words_step,
    write_json,
    write_processors,
)
from policies.vla.checkpoints.openpi_publishing import own_sizes, tensors
from policies.vla.checkpoints.publishing import check_publishable, check_unpadded, merge_adapters, write_description
from policies.vla.checkpoints.settings import CONFIG, MODES, RELATIVE_STEP, SIZES
from policies.vla.checkpoints.statistics import Mode, Modes
from policies.vla.checkpoints.weights import TOKENIZER, folder_of
from policies.vla.inputs import LONGEST
from policies.vla.pi0 import Pi0Policy
from policies.vla.pi05 import LONGEST as LONGEST_PROMPT
from policies.vla.pi05 import Pi05Policy

log = logging.getLogger(__name__)
CLASSES = {"pi0": "PI0Policy", "pi05": "PI05Policy"}
"""LeRobot's classes."""


def publish(policy: Pi0Policy, folder: Path, run: Path) -> None:
    """Write `policy` into `folder`, which must not exist; the card ends with the report of the directory `run`.

    Adapters are merged into the weights of `policy`, which has none afterwards.

    Raises:
        UserError: for a folder that exists, and policies that LeRobot cannot represent: those without published
            weights, a pi0.5 that reads no state, actions relative to a state of fewer elements.
    """
    check_publishable(policy, folder)
    _check_representable(policy)
    assert policy.weights_of is not None
    source = folder_of(policy.weights_of, policy.kind)
    published = settings.read_fields(source)
    modes = modes_of(policy, source, published, (MODES[policy.kind], Mode.MEAN_STD))
    config = _fields(policy, modes, settings.pictures(published))
    folder.mkdir(parents=True)
    merge_adapters(policy)
    write_json(folder / CONFIG, config)
    named = {f"model.{name}": value for name, value in tensors(policy).items()}
    save_file(named, folder / "model.safetensors", {"format": "pt"})
    write_processors(folder, *_steps(policy, config), statistics_of(policy, modes))
    assert policy.inputs.tokenizer
    policy.inputs.tokenizer.tokenizer.save_pretrained(folder)
    write_description(policy, folder, run, "lerobot", _usage(policy, config))


def _check_representable(policy: Pi0Policy) -> None:
    """Raise UserError for a policy that LeRobot cannot represent; warn about what it does otherwise."""
    if policy.weights_of is None:
        raise UserError("target=lerobot is for published weights (policy.weights), whose sizes it has; use target=hub")
    if isinstance(policy, Pi05Policy) and not policy.inputs.states_in_prompt:
        raise UserError("LeRobot's pi0.5 reads the state, and these weights do not; use target=openpi")
    if isinstance(policy, Pi05Policy):
        check_unpadded(policy)
    if policy.has_relative and policy.inputs.state_size < policy.actions:
        sizes = f"{policy.actions} elements to a state of {policy.inputs.state_size}"
        raise UserError(f"LeRobot cannot add relative actions of {sizes}; use target=hub")
    if own_sizes(policy):
        log.warning(f"these weights are not of the sizes {' and '.join(SIZES.values())}: LeRobot cannot load them")
    side = policy.model.picture_size
    specs = [policy.contract.observation[camera] for camera in policy.inputs.cameras]
    if policy.inputs.antialias and any(max(spec.shape[:2]) > side for spec in specs):
        log.warning(f"LeRobot resizes without antialiasing, unlike this policy: give it pictures of {side} x {side}")
    warn_of_tokenizer(policy)


def _fields(policy: Pi0Policy, modes: Modes, learned: list[str]) -> dict[str, Any]:
    """Fields of config.json; `learned` are the published names of pictures."""
    model = policy.model
    fields = {
        "type": policy.kind,
        "n_obs_steps": 1,
        **fields_of(policy, learned),
        "normalization_mapping": mapping_of(modes),
        "max_state_dim": model.state_size,
        "max_action_dim": model.action_size,
        "num_inference_steps": policy.grid.steps,
        "min_period": model.native.config.min_period,
        "max_period": model.native.config.max_period,
        "image_resolution": [model.picture_size, model.picture_size],
        "tokenizer_max_length": LONGEST_PROMPT if policy.kind == "pi05" else LONGEST,
        "dtype": "float32",
        **(own_sizes(policy) or SIZES),
    }
    if policy.has_relative:
        names, excluded = _names(policy)
        fields |= {"use_relative_actions": True, "relative_exclude_joints": excluded, "action_feature_names": names}
    return fields


def _names(policy: Pi0Policy) -> tuple[list[str], list[str]]:
    """Names of the action's elements, and those of absolute ones, which no name of a relative one contains."""
    relative = [bool(each) for each in policy.relative.tolist()]
    names = list(policy.contract.action.names)
    absolute = [name for name, each in zip(names, relative, strict=False) if not each]
    if not names or any(
        part.lower() in name.lower() for name, each in zip(names, relative, strict=True) if each for part in absolute
    ):
        names = [f"{'relative' if each else 'absolute'}_{index}" for index, each in enumerate(relative)]
        absolute = [name for name in names if name.startswith("absolute")]
    return names, absolute


def _steps(policy: Pi0Policy, config: dict[str, Any]) -> tuple[list[Step], list[Step]]:
    """LeRobot's steps before and after the model, in its order."""
    words = words_step(config["tokenizer_max_length"], TOKENIZER)
    normaliser, unnormaliser = normalisers(config)
    relative, absolute = [], []
    if policy.has_relative:
        names = {"exclude_joints": config["relative_exclude_joints"], "action_names": config["action_feature_names"]}
        relative.append(step(RELATIVE_STEP, enabled=True, **names))
        absolute.append(step("absolute_actions_processor", enabled=True))
    if policy.kind == "pi05":
        # LeRobot 0.4 pads the state to this size before it is in the prompt
        state = step("pi05_prepare_state_tokenizer_processor_step", max_state_dim=policy.inputs.state_size)
        before = [*BEGINNING, *relative, normaliser, state, words, CPU]
    else:
        before = [*BEGINNING, step("pi0_new_line_processor"), words, CPU, *relative, normaliser]
    return before, [unnormaliser, *absolute, CPU]


def _usage(policy: Pi0Policy, config: dict[str, Any]) -> list[str]:
    """Lines of the card on how LeRobot loads the folder, and what it is to be given."""
    # the tokenizer's name on the hub is that of LeRobot's own folders, and needs an account there
    words = "preprocessor_overrides={'tokenizer_processor': {'tokenizer_name': FOLDER}}"
    return [*loading(policy.kind, CLASSES[policy.kind], "predict_action_chunk", words), observed(policy, config)]
