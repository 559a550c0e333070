"""Publishes a trained GR00T as LeRobot's folder `pretrained_model`, which LeRobot and `policy.weights` read.

Written are config.json, which names the folders of NVIDIA's and Eagle's configurations, model.safetensors, both
processors with the ranges of state and actions, the contract and a model card. Differs from acting here: LeRobot does
not clamp actions to their limits, and attends to the padding of instructions where those of a batch differ in length.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from embodied.errors import UserError
from embodied.saving.json_text import loads
from policies.vla.checkpoints.lerobot_folder import (
    BEGINNING,
    CPU,
    fields_of,
    source_of,
    statistics_of,
    step,
    write_json,
    write_processors,
    write_weights,
)
from policies.vla.checkpoints.publishing import write_description
from policies.vla.checkpoints.settings import CONFIG, pictures, processor_steps
from policies.vla.checkpoints.statistics import Mode
from policies.vla.groot.policy import GrootPolicy
from policies.vla.groot.weights import EMBODIMENT, PACKING, RAW, base_of, eagle_of, own_name, published_name, texts_of


def publish(policy: GrootPolicy, folder: Path, run: Path) -> None:
    """Write `policy` into `folder`, which must not exist; the card ends with the report of the directory `run`.

    Adapters are merged into the weights of `policy`, which has none afterwards.

    Raises:
        UserError: for a folder that exists, a policy without published weights, and one whose chunk or denoising steps
            differ from those of the base, which LeRobot would use.
    """
    source, published = source_of(policy, folder)
    base = base_of(str(policy.weights_of), source, published)
    head = loads((texts_of(base) / CONFIG).read_text(encoding="utf-8"))["action_head_cfg"]
    _check("task.horizon", policy.contract.horizon, head["action_horizon"])
    _check("policy.denoising_steps", policy.grid.steps, head["num_inference_timesteps"])
    config = _config(policy, published) | {
        "base_model_path": _absolute(base),
        "tokenizer_assets_repo": _absolute(eagle_of(source, published)),
    }
    folder.mkdir(parents=True)
    write_json(folder / CONFIG, config)
    write_weights(policy, source, folder, own_name, published_name)
    _write_processors(policy, folder, config, dict(processor_steps(source)).get(PACKING, {}))
    write_description(policy, folder, run, "lerobot")


def _check(option: str, own: int, base: int) -> None:
    """Raise UserError unless the `own` value of an `option` is that of the base."""
    if own != base:
        raise UserError(f"LeRobot reads {option} from GR00T's base, {base}, and this policy has {own}; use target=hub")


def _config(policy: GrootPolicy, published: dict[str, Any]) -> dict[str, Any]:
    """config.json of the weights with the features of the task; of NVIDIA's own weights a new one."""
    head = policy.model.native.architecture.head
    if published.get("model_type") == RAW:
        published = {"type": policy.kind, "n_obs_steps": 1, "embodiment_tag": EMBODIMENT}
        published |= {"max_state_dim": head.state, "max_action_dim": head.action}
    return published | fields_of(policy, sorted(pictures(published)))


def _absolute(name: str) -> str:
    return str(Path(name).resolve()) if Path(name).is_dir() else name


def _write_processors(policy: GrootPolicy, folder: Path, config: dict[str, Any], packing: dict[str, Any]) -> None:
    """Write LeRobot's steps before and after the model; `packing` are the options of the step that normalises."""
    head = policy.model.native.architecture.head
    packing = {
        "language_key": "task",
        "embodiment_tag": config["embodiment_tag"],
        **packing,
        "state_horizon": 1,
        "action_horizon": head.chunk_size,
        "max_state_dim": head.state,
        "max_action_dim": head.action,
        "formalize_language": False,
        "normalize_min_max": True,
    }
    eagle = {"tokenizer_assets_repo": config["tokenizer_assets_repo"]}
    before = [
        *BEGINNING,
        step(PACKING, **packing),
        step("groot_eagle_encode_v3", **eagle),
        step("groot_eagle_collate_v3", **eagle),
        CPU,
    ]
    unpacking = step("groot_action_unpack_unnormalize_v1", env_action_dim=policy.actions, normalize_min_max=True)
    write_processors(folder, before, [unpacking, CPU], statistics_of(policy, (Mode.MIN_MAX, Mode.MIN_MAX)))
