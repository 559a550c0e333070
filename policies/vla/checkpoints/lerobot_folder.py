"""Parts of LeRobot's folder `pretrained_model` that are written alike for SmolVLA and GR00T."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from embodied.errors import UserError
from embodied.saving.json_text import loads
from policies.vla import adapters
from policies.vla.checkpoints.publishing import check_publishable
from policies.vla.checkpoints.settings import CONFIG
from policies.vla.checkpoints.weights import folder_of
from policies.vla.pi0 import Pi0Policy

PICTURE = "observation.images."
CPU = {"registry_name": "device_processor", "config": {"device": "cpu", "float_dtype": None}}
"""Step of a processor that moves tensors to the CPU."""


def source_of(policy: Pi0Policy, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Folder and configuration of the published weights that `policy` has started from, to be written into `folder`.

    Raises:
        UserError: for a folder that exists, a policy that its published weights alone do not describe, or one without.
    """
    if policy.weights_of is None:
        raise UserError("target=lerobot names the vision-language model of policy.weights, which this policy has not")
    check_publishable(policy, folder)
    source = folder_of(policy.weights_of, policy.kind)
    return source, loads((source / CONFIG).read_text(encoding="utf-8"))


def fields_of(policy: Pi0Policy, learned: list[str]) -> dict[str, Any]:
    """Fields of config.json that the task or training has changed; `learned` are the published names of pictures.

    Cameras of the task keep their names if the published ones include them all, and otherwise get those by order.
    """
    own = [f"{PICTURE}{camera}" for camera in policy.inputs.cameras]
    names = learned[: len(own)] if learned and not set(own) <= set(learned) else own
    inputs = {
        name: {"type": "VISUAL", "shape": [3, *policy.contract.observation[camera].shape[:2]]}
        for name, camera in zip(names, policy.inputs.cameras, strict=True)
    }
    inputs["observation.state"] = {"type": "STATE", "shape": [policy.inputs.state_size]}
    return {
        "input_features": inputs,
        "output_features": {"action": {"type": "ACTION", "shape": [policy.actions]}},
        "chunk_size": policy.contract.horizon,
        "n_action_steps": policy.contract.executed,
    }


def write_weights(
    policy: Pi0Policy, source: Path, folder: Path, own: Callable[[str], str], published: Callable[[str], str]
) -> None:
    """Write model.safetensors, with adapters merged; of the `source` tensors are copied that `policy` does not read.

    `own` and `published` are functions from each other's names of tensors.
    """
    policy.model.float()  # frozen weights may be in lower precision, in which the adapters' changes would be lost
    if adapters.rank_of(policy.model.native):
        adapters.merge(policy.model)
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


def write_processors(
    folder: Path,
    before: list[dict[str, Any]],
    after: list[dict[str, Any]],
    statistics: dict[str, Tensor],
) -> None:
    """Write the steps `before` and `after` the model, and the statistics as the state of those with a `state_file`."""
    for name, steps in (("policy_preprocessor", before), ("policy_postprocessor", after)):
        write_json(folder / f"{name}.json", {"name": name, "steps": steps})
        for step in steps:
            if "state_file" in step:
                save_file(stored(statistics), folder / step["state_file"])


def stored(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as safetensors stores them."""
    return {name: value.detach().cpu().contiguous() for name, value in tensors.items()}


def write_json(path: Path, contents: dict[str, Any]) -> None:
    """Write `contents` as JSON."""
    path.write_text(json.dumps(contents, indent=4) + "\n", encoding="utf-8")
