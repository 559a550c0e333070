"""Parts of LeRobot's folder `pretrained_model` that are written alike for all policies."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from embodied.errors import UserError
from embodied.saving.json_text import loads
from policies.vla.checkpoints import settings
from policies.vla.checkpoints.publishing import VLA, check_publishable, merge_adapters
from policies.vla.checkpoints.settings import CONFIG, pictures
from policies.vla.checkpoints.statistics import Mode, Modes
from policies.vla.checkpoints.weights import folder_of

log = logging.getLogger(__name__)
PICTURE = "observation.images."
STATE = "observation.state"
ACTION = "action"
"""LeRobot's names of pictures, the robot's state and the action."""
NORMALISERS = "normalizer_processor", "unnormalizer_processor"
STATEFUL = *NORMALISERS, "groot_pack_inputs_v3", "groot_action_unpack_unnormalize_v1"
"""Steps of processors that have statistics."""
Step = dict[str, Any]
"""Step of a processor, as its file has it."""


def step(name: str, **options: object) -> Step:
    """Step of the `name` in LeRobot's registry."""
    return {"registry_name": name, "config": options}


BEGINNING = [step("rename_observations_processor", rename_map={}), step("to_batch_processor")]
"""Steps with which processors of observations begin."""
CPU = step("device_processor", device="cpu", float_dtype=None)
"""Step that moves tensors to the CPU."""


def source_of(policy: VLA, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Folder and configuration of the published weights that `policy` has started from, to be written into `folder`.

    Raises:
        UserError: for a folder that exists, a policy that its published weights alone do not describe, or one without.
    """
    if policy.weights_of is None:
        raise UserError("target=lerobot names the vision-language model of policy.weights, which this policy has not")
    check_publishable(policy, folder)
    source = folder_of(policy.weights_of, policy.kind)
    return source, loads((source / CONFIG).read_text(encoding="utf-8"))


def fields_of(policy: VLA, learned: list[str]) -> dict[str, Any]:
    """Fields of config.json that the task or training has changed; `learned` are the published names of pictures.

    Cameras of the task keep their names if the published ones include them all, and otherwise get those by order.
    """
    own = [f"{PICTURE}{camera}" for camera in policy.inputs.cameras]
    names = own if set(own) <= set(learned) or len(own) > len(learned) else learned[: len(own)]
    inputs = {
        name: {"type": "VISUAL", "shape": [3, *policy.contract.observation[camera].shape[:2]]}
        for name, camera in zip(names, policy.inputs.cameras, strict=True)
    }
    inputs[STATE] = {"type": "STATE", "shape": [policy.inputs.state_size]}
    return {
        "input_features": inputs,
        "output_features": {ACTION: {"type": "ACTION", "shape": [policy.actions]}},
        "chunk_size": policy.contract.horizon,
        "n_action_steps": policy.contract.executed,
    }


def write_weights(
    policy: VLA, source: Path, folder: Path, own: Callable[[str], str], published: Callable[[str], str]
) -> None:
    """Write model.safetensors, with adapters merged; of the `source` tensors are copied that `policy` does not read.

    `own` and `published` are functions from each other's names of tensors.
    """
    merge_adapters(policy)
    weights = policy.model.native.state_dict()
    unread = {published(own(name)): value for name, value in _unread(source, own, set(weights)).items()}
    named = {published(name): value for name, value in weights.items()}
    save_file(unread | stored(named), folder / "model.safetensors", {"format": "pt"})


def _unread(source: Path, own: Callable[[str], str], read: set[str]) -> dict[str, Tensor]:
    """Tensors of the published files that are neither `read` nor statistics, such as the head of the vocabulary."""
    tensors_left = {}
    for file in sorted(source.glob("model*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dict
                if own(name) not in read and ".buffer_" not in name:
                    tensors_left[name] = tensors.get_tensor(name)
    return tensors_left


def modes_of(policy: VLA, source: Path, published: dict[str, Any], fitted: Modes) -> Modes:
    """Normalisations of state and action: those of the published statistics, or those `fitted` to demonstrations."""
    modes = settings.modes(source, published, policy.kind) if policy.brought_statistics else fitted
    # adapters may have statistics of their own where the base has none
    state, action = (Mode.MEAN_STD if mode is Mode.IDENTITY else mode for mode in modes)
    return state, action


def mapping_of(modes: Modes) -> dict[str, str]:
    """LeRobot's normalization_mapping of unchanged pictures and the `modes` of state and action."""
    return {"VISUAL": Mode.IDENTITY.value, "STATE": modes[0].value, "ACTION": modes[1].value}


def warn_of_tokenizer(policy: VLA) -> None:
    """Warn if the policy's tokenizer does not add the beginning of a text, as LeRobot expects."""
    assert policy.inputs.tokenizer
    if policy.inputs.tokenizer.tokenizer("a")["input_ids"] != policy.inputs.tokenizer.encode("a"):
        log.warning(f"the tokenizer of {policy.weights_of} adds no beginning as PaliGemma's does; LeRobot relies on it")


def words_step(longest: int, name: str) -> Step:
    """Step that makes `longest` tokens of the prompt, with padding, by the tokenizer of a `name`."""
    return step(
        "tokenizer_processor",
        max_length=longest,
        task_key="task",
        padding_side="right",
        padding="max_length",
        truncation=True,
        tokenizer_name=name,
    )


def normalisers(config: dict[str, Any]) -> tuple[Step, Step]:
    """Steps that normalise the features of a config.json, and undo it for the action."""
    inputs, outputs = config["input_features"], config["output_features"]
    options = {"eps": 1e-8, "norm_map": config["normalization_mapping"]}
    first, last = (
        step(name, features=features, **options)
        for name, features in zip(NORMALISERS, (inputs | outputs, outputs), strict=True)
    )
    return first, last


def statistics_of(policy: VLA, modes: Modes) -> dict[str, Tensor]:
    """Statistics of state and action, with which LeRobot normalises by `modes` as the policy does."""
    size, state = policy.inputs.state_size, policy.inputs.state
    pairs = {STATE: (state.mean[:size], state.scale[:size]), ACTION: (policy.action_mean, policy.action_std)}
    return named_statistics(pairs, modes)


def named_statistics(pairs: Mapping[str, tuple[Tensor, Tensor]], modes: Sequence[Mode]) -> dict[str, Tensor]:
    """Statistics of features by LeRobot's names, of which each has an offset and a divisor, and a mode."""
    return {
        f"{feature}.{name}": value
        for mode, (feature, pair) in zip(modes, pairs.items(), strict=True)
        for name, value in zip(mode.names, mode.stated(*pair), strict=True)
    }


def write_processors(folder: Path, before: list[Step], after: list[Step], statistics: dict[str, Tensor]) -> None:
    """Write the steps `before` and `after` the model, and the statistics as the state of those that have some."""
    for name, steps in (("policy_preprocessor", before), ("policy_postprocessor", after)):
        files = {
            place: f"{name}_step_{place}_{each['registry_name']}.safetensors"
            for place, each in enumerate(steps)
            if each["registry_name"] in STATEFUL
        }
        for file in files.values():
            save_file(stored(statistics), folder / file)
        steps = [each | ({"state_file": files[place]} if place in files else {}) for place, each in enumerate(steps)]
        write_json(folder / f"{name}.json", {"name": name, "steps": steps})


def loading(kind: str, name: str, method: str, *further: str) -> list[str]:
    """Lines of a card on how LeRobot loads its class `name` of a `kind` and acts by its `method`.

    `further` are arguments of the processors.
    """
    arguments = ", ".join(("policy.config", "FOLDER", *further))
    return [
        "```",
        "from lerobot.policies.factory import make_pre_post_processors",
        f"from lerobot.policies.{kind}.modeling_{kind} import {name}",
        "",
        f"policy = {name}.from_pretrained(FOLDER)",
        f"before, after = make_pre_post_processors({arguments})",
        f"actions = after(policy.{method}(before(observation)))",
        "```",
        "",
    ]


def observed(policy: VLA, config: dict[str, Any]) -> str:
    """Sentences of a card on the observations that LeRobot is to be given, and on what it does otherwise."""
    names = [f"`{name}`: {camera}" for name, camera in zip(pictures(config), policy.inputs.cameras, strict=True)]
    state = ", ".join(policy.inputs.state.actor_keys)
    side = policy.model.picture_size
    return (
        f"Pictures, {', '.join(names)}; `observation.state` is, in this order, {state}; `task` is the instruction,"
        " with one space between words. LeRobot does not clamp actions to their limits, and resizes pictures that are"
        f" not {side} x {side} without antialiasing."
    )


def stored(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as safetensors stores them."""
    return {name: value.detach().cpu().contiguous() for name, value in tensors.items()}


def write_json(path: Path, contents: dict[str, Any]) -> None:
    """Write `contents` as JSON."""
    path.write_text(json.dumps(contents, indent=4) + "\n", encoding="utf-8")
