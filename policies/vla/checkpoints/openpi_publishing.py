"""Publishes a trained pi0 or pi0.5 as a checkpoint of openpi's PyTorch models, which openpi and `policy.weights` read.

Written are model.safetensors with exactly the names that openpi's loader expects, config.json as its converter writes
it, and assets/ID/norm_stats.json; also the tokenizer, the contract and a model card, which openpi does not read. JAX
checkpoints are not written. Differs from acting here: openpi does not clamp actions to their limits.
"""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from embodied.errors import UserError
from embodied.policy import TrainablePolicy
from policies.vla.checkpoints import statistics
from policies.vla.checkpoints.publishing import check_publishable, check_unpadded, merge_adapters, write_description
from policies.vla.checkpoints.settings import CONFIG, OPENPI_RELATIVE, SIZES
from policies.vla.checkpoints.statistics import Mode
from policies.vla.checkpoints.weights import EMBEDDING, LAST_NORM, folder_of
from policies.vla.pi0 import Pi0Policy
from policies.vla.pi05 import Pi05Policy

log = logging.getLogger(__name__)
CAMERAS = "base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb"
"""openpi's names of pictures; it masks those that a robot lacks."""
PERIODS = 0.004, 4.0
"""Periods of openpi's embedding of denoising times."""
ASSET_ID = "embodied"
"""Name of statistics that are of no published data set."""
HEAD = "paligemma_with_expert.paligemma.lm_head.weight"
TIED = "paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"
"""openpi's two names of the embedding; its loader accepts either, but not both."""
UNREAD_HEAD = "paligemma_with_expert.gemma_expert.lm_head.weight"
"""Vocabulary of the action expert, which no computation reads, and without which openpi's loader refuses the file."""
RENAMED = {
    EMBEDDING: HEAD,
    "model.vlm.vision_tower.": "paligemma_with_expert.paligemma.model.vision_tower.vision_model.",
    "model.vlm.": "paligemma_with_expert.paligemma.model.",
    "model.dit.": "paligemma_with_expert.gemma_expert.model.",
    "final_norm.": LAST_NORM,
    "embed_action_time.": "",
}
"""Beginnings of our names of tensors, of which the first that fits counts, and openpi's."""
SHAPE = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "image_size", "patch_size"),
)
"""Fields of transformers' configurations that determine shapes of tensors."""


def publish(policy: TrainablePolicy, folder: Path, run: Path, asset_id: str | None = None) -> None:
    """Write `policy` into `folder`, which must not exist; the card ends with the report of the directory `run`.

    `asset_id` is openpi's name of the statistics, by default that of the published weights if the policy has their
    statistics. Adapters are merged into the weights of `policy`, which has none afterwards.

    Raises:
        UserError: for a folder that exists, an unusable `asset_id`, and policies that openpi cannot represent: other
            ones than pi0 and pi0.5, those without published weights, more cameras than three, relative actions of
            other elements than openpi's.
    """
    if not isinstance(policy, Pi0Policy) or policy.kind not in ("pi0", "pi05"):
        raise UserError(f"target=openpi is for policy=pi0 or pi05, got {type(policy).__name__}; use target=hub")
    check_publishable(policy, folder)
    _check_representable(policy)
    asset_id = _asset_id(policy) if asset_id is None else asset_id
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)*", asset_id):
        raise UserError(f"expected asset_id=NAME or OWNER/NAME, got {asset_id}")
    folder.mkdir(parents=True)
    merge_adapters(policy)
    save_file(tensors(policy), folder / "model.safetensors", {"format": "pt", TIED: HEAD})
    _write(folder / CONFIG, _fields(policy))
    _write(folder / "assets" / asset_id / "norm_stats.json", {"norm_stats": _statistics(policy)})
    assert policy.inputs.tokenizer
    policy.inputs.tokenizer.tokenizer.save_pretrained(folder)
    write_description(policy, folder, run, "openpi", _usage(policy, asset_id))


def openpi_name(name: str) -> str:
    """Name that openpi has for our tensor `name`."""
    start = next((start for start in RENAMED if name.startswith(start)), "")
    return RENAMED.get(start, "") + name.removeprefix(start)


def _check_representable(policy: Pi0Policy) -> None:
    """Raise UserError for a policy that openpi's checkpoints cannot represent; warn about a size that it lacks."""
    if policy.weights_of is None:
        raise UserError("target=openpi is for published weights (policy.weights), whose size alone openpi has")
    if isinstance(policy, Pi05Policy):
        check_unpadded(policy)
    if len(policy.inputs.cameras) > len(CAMERAS):
        raise UserError(f"openpi reads at most {len(CAMERAS)} pictures, got {', '.join(policy.inputs.cameras)}")
    if policy.has_relative and policy.relative.bool().tolist() != list(OPENPI_RELATIVE[: policy.actions]):
        elements = " ".join(map(str, policy.relative.nonzero().flatten().tolist()))
        raise UserError(f"openpi's relative actions are those of a pose, got elements {elements}; use target=hub")
    periods = policy.model.native.config.min_period, policy.model.native.config.max_period
    if periods != PERIODS:
        raise UserError(f"openpi embeds times with periods from {PERIODS[0]} to {PERIODS[1]}, these weights {periods}")
    if policy.kind == "pi0" and policy.model.state_size != policy.model.action_size:
        sizes = f"{policy.model.state_size} and {policy.model.action_size}"
        raise UserError(f"openpi pads state and action to one size, these weights to {sizes}; use target=hub")
    if own_sizes(policy):
        log.warning(f"these weights are not of the sizes {' and '.join(SIZES.values())}: openpi cannot load them")


def _asset_id(policy: Pi0Policy) -> str:
    """Name that the published weights have for their statistics if the policy has them; `ASSET_ID` for others."""
    if not policy.brought_statistics:
        return ASSET_ID
    assert policy.weights_of is not None
    return statistics.data_set(folder_of(policy.weights_of, policy.kind), policy.config.unnorm_key) or ASSET_ID


def tensors(policy: Pi0Policy) -> dict[str, Tensor]:
    """Tensors of the policy by openpi's names, on the CPU."""
    named = {
        openpi_name(name): value.detach().cpu().contiguous() for name, value in policy.model.native.state_dict().items()
    }
    return named | {UNREAD_HEAD: torch.zeros(len(named[HEAD]), policy.model.expert_width, dtype=torch.bfloat16)}


def _fields(policy: Pi0Policy) -> dict[str, Any]:
    """Fields of config.json: those of openpi's converter, and further ones, which `policy.weights` alone reads."""
    return {
        "action_dim": policy.model.action_size,
        "action_horizon": policy.contract.horizon,
        **(own_sizes(policy) or SIZES),
        "precision": "float32",
        "pi05": policy.kind == "pi05",
        "discrete_state_input": isinstance(policy, Pi05Policy) and policy.inputs.states_in_prompt,
        "extra_delta_transform": policy.has_relative,
        "num_inference_steps": policy.grid.steps,
        "antialias": policy.inputs.antialias,
    }


def own_sizes(policy: Pi0Policy) -> dict[str, Any]:
    """Sizes of a model that openpi lacks, by transformers' fields; {} for the published size."""
    from transformers import PI0Config

    fields, published = policy.model.native.config.to_dict(), PI0Config().to_dict()
    parts = "vlm_config", "dit_config"
    differ = any(_shape(fields[part]) != _shape(published[part]) for part in parts)
    return {part: fields[part] for part in parts} if differ else {}


def _shape(fields: dict[str, Any]) -> dict[str, Any]:
    parts = {key: _shape(fields[key]) for key in ("text_config", "vision_config") if key in fields}
    return parts or {key: fields.get(key) for key in SHAPE}


def _statistics(policy: Pi0Policy) -> dict[str, dict[str, list[float] | None]]:
    """Statistics of state and actions in openpi's form, with which it normalises as the policy does."""
    size = policy.inputs.state_size
    state = policy.inputs.state
    pairs = {
        "state": (state.mean[:size], state.scale[:size]),
        "actions": (policy.action_mean, policy.action_std),
    }
    return {name: _normalisation(*pair, ranges=policy.kind == "pi05") for name, pair in pairs.items()}


def _normalisation(centre: Tensor, spread: Tensor, *, ranges: bool) -> dict[str, list[float] | None]:
    """Statistics of the normalisation (x - centre) / spread; quantiles are unknown unless it is of `ranges`.

    openpi requires a mean and a deviation of pi0.5's ranges, too, which are then centre and half width.
    """
    mean, std = centre.double().cpu(), spread.double().cpu()  # in which middle and half width are exact
    low, high = (each.tolist() if ranges else None for each in Mode.QUANTILES.stated(mean, std))
    return {"mean": mean.tolist(), "std": std.tolist(), "q01": low, "q99": high}


def _usage(policy: Pi0Policy, asset_id: str) -> list[str]:
    """Lines of the card on openpi's configuration, which its checkpoints do not contain."""
    model = {
        "pi05": policy.kind == "pi05",
        "action_dim": policy.model.action_size,
        "action_horizon": policy.contract.horizon,
        "discrete_state_input": isinstance(policy, Pi05Policy) and policy.inputs.states_in_prompt,
    }
    pictures = [f"`{name}`: {camera}" for name, camera in zip(CAMERAS, policy.inputs.cameras, strict=False)]
    return [
        "`scripts/serve_policy.py policy:checkpoint --policy.config=NAME --policy.dir=FOLDER` of openpi serves it, with"
        f" a configuration of `Pi0Config({', '.join(f'{key}={value}' for key, value in model.items())})` whose data"
        f" have `asset_id={asset_id!r}`" + (" and actions relative to the state." if policy.has_relative else "."),
        "",
        f"Pictures, {', '.join(pictures)}; the state is, in this order: {', '.join(policy.inputs.state.actor_keys)}."
        " openpi does not clamp actions to their limits.",
    ]


def _write(path: Path, contents: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")
