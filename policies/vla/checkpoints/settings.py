"""Configuration (config.json) of published weights of pi0 and pi0.5, by transformers, LeRobot or openpi.

openpi's JAX models have no such file: their arrays determine sizes, their data set the rest.
A field that changes a model's computation is read, or raises an error unless its value is supported: none is
ignored. Fields about training and hardware (dtype, freezing, optimiser) are options of ours.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embodied.extras import needs_extra
from embodied.saving.json_text import loads
from policies.vla.checkpoints import openpi_jax
from policies.vla.checkpoints.statistics import NORMALIZERS, Mode
from policies.vla.inputs import LONGEST

CONFIG = "config.json"
PREPROCESSOR = "policy_preprocessor.json"
SIZES = {"paligemma_variant": "gemma_2b", "action_expert_variant": "gemma_300m"}
"""LeRobot's and openpi's names of pi0's sizes."""
REQUIRED = {
    "use_delta_joint_actions_aloha": False,
    "adapt_to_pi_aloha": False,
    "n_obs_steps": 1,
    "use_visual_memory": False,
    "use_proprioceptive_memory": False,
    "time_sampling_beta_alpha": 1.5,
    "time_sampling_beta_beta": 1.0,
    "time_sampling_scale": 0.999,
    "time_sampling_offset": 0.001,
}
"""Fields with their only supported value, which is also that of absent fields."""
STATE = "observation.state"
"""LeRobot's name of the robot's state."""
RELATIVE_STEP = "relative_actions_processor"
"""Name of the step of LeRobot's processor that makes actions relative."""
STATE_STEP = "pi05_prepare_state_tokenizer_processor_step"
"""Name of the step of LeRobot's processor that writes the state into pi0.5's prompt."""
UNPADDED = "use_relative_actions"
"""Field of configurations of LeRobot's releases since 0.5.1; those since 0.5.0 do not pad the state in prompts."""
OPENPI_RELATIVE = (True,) * 6 + (False,) * 26
"""Mask of openpi's extra_delta_transform, of the 32 elements of its model: a pose; the gripper and others are not."""
LIBERO = "libero"
"""Name of openpi's data set of LIBERO, and of the folder of its statistics."""
HORIZON = 50
"""Actions of a chunk in most of openpi's configurations."""
OPENPI = {
    "pi0": {"droid": {"action_horizon": 10}},
    "pi05": {LIBERO: {"action_horizon": 10}, "droid": {"action_horizon": 15}},
}
"""Fields of openpi's other configurations, by kind and data set."""
STEPS = 10
"""Denoising steps of LeRobot, transformers and openpi where a configuration does not name their number."""
MODES = {"pi0": Mode.MEAN_STD, "pi05": Mode.QUANTILES, "smolvla": Mode.MEAN_STD, "pi0_fast": Mode.QUANTILES}
"""Normalisation of state and action where a configuration does not name it."""


@dataclass
class Settings:
    """Configuration `model` (transformers' PI0Config, or an Architecture of SmolVLA), and further settings.

    `cameras` are names of the pictures that the model was trained with, if the configuration has them. `modes` are
    normalisations of state and action. `states_in_prompt` is openpi's discrete_state_input; then the prompt has at
    least `padded` elements of the state, with padding. `relative` lists which elements of the action are relative to
    the state at the chunk's beginning: further elements are, too, and none if it is empty. `antialias` is whether
    pictures are resized without aliasing, as by openpi's client; LeRobot does not. An instruction has at most `longest`
    tokens.
    """

    model: Any
    cameras: list[str]
    denoising_steps: int
    modes: tuple[Mode, Mode]
    states_in_prompt: bool
    relative: tuple[bool, ...] = ()
    antialias: bool = True
    longest: int = LONGEST
    padded: int = 0


def read(folder: Path, expected_kind: str, *, adaptive: bool | None) -> Settings:
    """Read the settings in `folder` of a model of `expected_kind` (pi0 or pi05).

    `adaptive` is whether the weights have pi0.5's adaptive norms, which openpi's converter does not write into
    config.json; None: unknown.

    Raises:
        ValueError: for the configuration of another model, and for unsupported values of fields.
    """
    with needs_extra("vla"):
        from huggingface_hub.errors import StrictDataclassError
        from transformers import PI0Config

    fields = read_fields(folder)
    _check_kind(fields, expected_kind, adaptive)
    _check_values(fields)
    try:
        if fields.get("model_type") == "pi0":
            model = PI0Config.from_pretrained(folder)
        else:
            model = PI0Config(**_model_fields(fields))
    except StrictDataclassError as error:
        raise ValueError(" ".join(str(error).split())) from error
    _check_pictures(fields, model.vlm_config.vision_config.image_size)
    return Settings(
        model,
        pictures(fields),
        fields.get("num_inference_steps", STEPS),
        modes(folder, fields, expected_kind),
        _states_in_prompt(folder, fields),
        _relative(folder, fields, expected_kind),
        antialias=fields.get("antialias", "type" not in fields),
        padded=_padded(folder, fields),
    )


def has_fields(folder: Path) -> bool:
    """Whether `folder` has a configuration, or arrays of openpi's JAX models, which determine one."""
    return (folder / CONFIG).exists() or openpi_jax.is_checkpoint(folder)


def read_fields(folder: Path) -> dict[str, Any]:
    """Fields of config.json; of openpi's JAX models sizes of their arrays, and the configuration of their data set.

    Fields of a config.json beside these arrays, which openpi does not write, win over the data set's.

    Raises:
        UserError: for arrays that are missing, unexpected, of wrong shapes or damaged.
    """
    path = folder / CONFIG
    if not openpi_jax.is_checkpoint(folder):
        return loads(path.read_text(encoding="utf-8"))
    written = loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    determined = openpi_jax.model_fields(folder)
    names = _data_sets(folder)
    name = names[0] if len(names) == 1 else ""
    usual = OPENPI["pi05" if determined["pi05"] else "pi0"].get(name, {})
    return {"action_horizon": HORIZON, **usual, **written, **determined}


def _data_sets(folder: Path) -> list[str]:
    """Last parts of the names of the data sets of openpi's statistics."""
    return [path.parent.name for path in folder.rglob("norm_stats.json")]


def pictures(fields: Mapping[str, Any]) -> list[str]:
    """LeRobot's names of the pictures that a model reads; [] if its configuration has none."""
    inputs = fields.get("input_features") or {}
    return [name for name, feature in inputs.items() if feature["type"] == "VISUAL"]


def _check_kind(fields: Mapping[str, Any], expected_kind: str, adaptive: bool | None) -> None:
    openpi = "unknown"
    if "action_horizon" in fields:
        by_weights = expected_kind if adaptive is None else "pi05" if adaptive else "pi0"
        openpi = {True: "pi05", False: "pi0"}.get(fields.get("pi05", ""), by_weights)
    kind = fields.get("type", fields.get("model_type", openpi))
    if kind != expected_kind:
        raise ValueError(f"it is of type {kind}")


def learned_libero(folder: Path, fields: Mapping[str, Any]) -> bool:
    """Whether openpi's configurations pi0_libero or pi05_libero left the files, by the folder of their statistics."""
    return "action_horizon" in fields and LIBERO in _data_sets(folder)


def _states_in_prompt(folder: Path, fields: Mapping[str, Any]) -> bool:
    """Whether pi0.5 reads the state, which openpi's converter does not write: that of its pi05_libero does not."""
    field = fields.get("discrete_state_input")
    return not learned_libero(folder, fields) if field is None else field is not False


def _padded(folder: Path, fields: Mapping[str, Any]) -> int:
    """Number of elements of the state in prompts of pi0.5 that LeRobot 0.4 has trained, which pads it; else 0.

    Weights without LeRobot's statistics, such as its base, were trained by openpi, which does not pad.
    """
    trained = any(path for pattern in NORMALIZERS for path in folder.glob(pattern))
    if fields.get("type") != "pi05" or UNPADDED in fields or not trained:
        return 0
    step = dict(processor_steps(folder)).get(STATE_STEP, {})
    return int(step.get("max_state_dim", fields.get("max_state_dim", 32)))


def _relative(folder: Path, fields: Mapping[str, Any], kind: str) -> tuple[bool, ...]:
    """Mask of relative actions: LeRobot's processor or configuration, or openpi's extra_delta_transform.

    Elements whose name contains an excluded one are absolute; without names none is, as in LeRobot. openpi's converter
    writes no field: its pi0_libero has relative poses, and its pi05_libero has not.
    """
    if "action_horizon" in fields:
        relative = fields.get("extra_delta_transform", kind == "pi0" and learned_libero(folder, fields))
        return OPENPI_RELATIVE if relative else ()
    steps = [options for name, options in processor_steps(folder) if name == RELATIVE_STEP]
    enabled = steps[0].get("enabled", False) if steps else fields.get("use_relative_actions", False)
    if not enabled:
        return ()
    options = steps[0] if steps else fields
    excluded = options.get("exclude_joints", fields.get("relative_exclude_joints", ["gripper"]))
    names = options.get("action_names", fields.get("action_feature_names"))
    lower = [str(each).lower() for each in excluded]
    return tuple(not any(each in str(name).lower() for each in lower) for name in names or [""])


def processor_steps(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """Names and options of the steps of LeRobot's processor; [] without one."""
    if not (folder / PREPROCESSOR).exists():
        return []
    steps = loads((folder / PREPROCESSOR).read_text(encoding="utf-8")).get("steps", [])
    return [(str(step.get("registry_name", step.get("class", ""))), step.get("config") or {}) for step in steps]


def _check_values(fields: Mapping[str, Any]) -> None:
    for key, expected in SIZES.items():
        if fields.get(key, expected) != expected:
            raise ValueError(f"{key} is {fields[key]}, which is not {expected}")
    check_required(fields, {})


def check_required(fields: Mapping[str, Any], further: Mapping[str, Any]) -> None:
    """Raise ValueError unless `fields` have the values of `REQUIRED` and of the `further` ones, or lack them."""
    for key, expected in {**REQUIRED, **further}.items():
        if (value := fields.get(key, expected)) != expected:
            raise ValueError(f"{key} is {json.dumps(value)}, and only {json.dumps(expected)} is supported")


def _check_pictures(fields: Mapping[str, Any], side: int) -> None:
    resolution = fields.get("image_resolution", [side, side])
    if list(resolution) != [side, side]:
        raise ValueError(f"image_resolution is {resolution}, and the model reads {[side, side]}")


def _model_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of transformers' PI0Config, from the fields of LeRobot or openpi."""
    action = fields.get("max_action_dim", fields.get("action_dim", 32))
    sizes = {
        "chunk_size": fields.get("chunk_size", fields.get("action_horizon", 50)),
        "max_action_dim": action,
        "max_state_dim": fields.get("max_state_dim", action),
    }
    same = ("vlm_config", "dit_config", "min_period", "max_period")
    return sizes | {key: fields[key] for key in same if key in fields}


def modes(folder: Path, fields: Mapping[str, Any], kind: str) -> tuple[Mode, Mode]:
    """Normalisations of state and action: LeRobot's processor, which it runs, or else its configuration.

    Raises:
        ValueError: for a normalisation, or a step of the processor, that is not supported.
    """
    mapping = dict(fields.get("normalization_mapping") or {})
    for name, options in processor_steps(folder):
        is_read = name == RELATIVE_STEP and kind != "smolvla"
        unknown = ("relative" in name.lower() or "delta" in name.lower()) and not is_read
        if unknown and options.get("enabled", True):
            raise ValueError(f"{PREPROCESSOR} has the step {name}, which is not supported")
        mapping |= options.get("norm_map") or {}
        normalised = options.get("normalize_observation_keys")
        if normalised is not None and STATE not in normalised:
            mapping["STATE"] = Mode.IDENTITY.value
    if (visual := mapping.get("VISUAL", "IDENTITY")) != "IDENTITY":
        raise ValueError(f"the normalisation of VISUAL is {visual}, and only IDENTITY is supported")
    names = [mapping.get(part, MODES[kind].value) for part in ("STATE", "ACTION")]
    if unknown := [name for name in names if name not in {mode.value for mode in Mode}]:
        raise ValueError(f"the normalisation is {unknown[0]}, expected one of {', '.join(mode.value for mode in Mode)}")
    return Mode(names[0]), Mode(names[1])
