"""Publishes a trained SmolVLA as LeRobot's folder `pretrained_model`, which LeRobot and `policy.weights` read.

Written are config.json with the features of the task, model.safetensors, both processors with the statistics, the
tokenizer, the contract and a model card. Differs from acting here: LeRobot does not clamp actions to their limits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from embodied.errors import UserError
from embodied.policy import TrainablePolicy
from embodied.saving.json_text import loads
from policies.vla import adapters
from policies.vla.checkpoints.publishing import CARD, CONTRACT, card
from policies.vla.checkpoints.settings import CONFIG, pictures
from policies.vla.checkpoints.statistics import Mode
from policies.vla.checkpoints.weights import folder_of
from policies.vla.smolvla.policy import SmolVLAPolicy
from policies.vla.smolvla.weights import own_name, vlm_of

MODES = {"VISUAL": Mode.IDENTITY.value, "STATE": Mode.MEAN_STD.value, "ACTION": Mode.MEAN_STD.value}
PICTURE = "observation.images."
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
        raise UserError(f"target=lerobot is for policy=smolvla, got {type(policy).__name__}; use target=hub")
    if policy.steers:
        raise UserError("published weights have no small actor; use algorithm=self_imitation to distil it, or serve.py")
    if policy.is_guided:
        raise UserError("published weights do not name the label of their prompt (offline=recap); use serve.py")
    if policy.weights_of is None:
        raise UserError("target=lerobot names the vision-language model of policy.weights, which this policy has not")
    if folder.exists():
        raise UserError(f"{folder} exists; choose another output")
    source = folder_of(policy.weights_of, policy.kind)
    published = loads((source / CONFIG).read_text(encoding="utf-8"))
    config = published | _fields(policy, pictures(published)) | {"vlm_model_name": vlm_of(source, published)}
    folder.mkdir(parents=True)
    _write(folder / CONFIG, config)
    policy.model.float()  # frozen weights may be in lower precision, in which the adapters' changes would be lost
    if adapters.rank_of(policy.model.native):
        adapters.merge(policy.model)
    own = {f"model.{name}": value for name, value in policy.model.native.state_dict().items()}
    save_file(_unread_tensors(source, own) | _stored(own), folder / "model.safetensors", {"format": "pt"})
    _write_processors(policy, folder, config)
    if policy.inputs.tokenizer:
        policy.inputs.tokenizer.tokenizer.save_pretrained(folder)
    (folder / CONTRACT).write_text(policy.contract.to_json() + "\n", encoding="utf-8")
    report = run / "report.md"
    text = report.read_text(encoding="utf-8") if report.exists() else ""
    (folder / CARD).write_text(card(policy, "lerobot", text), encoding="utf-8")


def _fields(policy: SmolVLAPolicy, learned: list[str]) -> dict[str, Any]:
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
        "normalization_mapping": MODES,
        "chunk_size": policy.contract.horizon,
        "n_action_steps": policy.contract.executed,
        "num_steps": policy.grid.steps,
    }


def _unread_tensors(source: Path, own: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of the published files that are neither ours nor statistics: the head of the vocabulary."""
    tensors_left = {}
    for file in sorted(source.glob("model*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dict
                if f"model.{own_name(name)}" not in own and ".buffer_" not in name:
                    tensors_left[name] = tensors.get_tensor(name)
    return tensors_left


def _stored(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().cpu().contiguous() for name, value in tensors.items()}


def _write_processors(policy: SmolVLAPolicy, folder: Path, config: dict[str, Any]) -> None:
    """Write LeRobot's steps before and after the model, with the statistics of state and action."""
    size, state = policy.inputs.state_size, policy.inputs.state
    statistics = {
        "observation.state.mean": state.mean[:size],
        "observation.state.std": state.scale[:size],
        "action.mean": policy.action_mean,
        "action.std": policy.action_std,
    }
    for name in (BEFORE, AFTER):
        save_file(_stored(statistics), folder / name)
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
    device = {"registry_name": "device_processor", "config": {"device": "cpu", "float_dtype": None}}
    before = [
        {"registry_name": "rename_observations_processor", "config": {"rename_map": {}}},
        {"registry_name": "to_batch_processor", "config": {}},
        {"registry_name": "smolvla_new_line_processor", "config": {}},
        {"registry_name": "tokenizer_processor", "config": words},
        device,
        _normaliser("normalizer_processor", features, BEFORE),
    ]
    after = [_normaliser("unnormalizer_processor", config["output_features"], AFTER), device]
    for name, steps in (("policy_preprocessor", before), ("policy_postprocessor", after)):
        _write(folder / f"{name}.json", {"name": name, "steps": steps})


def _normaliser(kind: str, features: dict[str, Any], file: str) -> dict[str, Any]:
    options = {"eps": 1e-8, "features": features, "norm_map": MODES}
    return {"registry_name": kind, "config": options, "state_file": file}


def _write(path: Path, contents: dict[str, Any]) -> None:
    path.write_text(json.dumps(contents, indent=4) + "\n", encoding="utf-8")
