"""Published weights of pi0, in transformers', LeRobot's or openpi's PyTorch naming, with their statistics.

transformers itself renames the tensors of the other two. It was tried with small models in the three namings; no
published weights have been loaded yet.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from embodied.command_line.extras import needs_extra
from embodied.errors import UserError
from policies.vla import adapters
from policies.vla.model import Pi0Model

TOKENIZER = "google/paligemma-3b-pt-224"
"""Where the tokenizer is if it does not lie with the weights."""
SIZES = {"paligemma_variant": "gemma_2b", "action_expert_variant": "gemma_300m"}
"""LeRobot's and openpi's names of pi0's sizes."""
UNUSED = "model.dit.embed_tokens.weight"
UNREADABLE = OSError, ValueError, KeyError, RuntimeError, SafetensorError
"""Errors of reading missing or damaged files."""
STATISTICS = ("state_mean", "state_std", "action_mean", "action_std")


@dataclass
class Published:
    """A model, its tokenizer, the actions of its chunks, and `STATISTICS` by name (none, if it brings none).

    `base` is where its weights without adapters are, and `fingerprint` theirs (`policies.vla.adapters`).
    """

    model: Pi0Model
    tokenizer: Any
    horizon: int
    statistics: dict[str, Tensor]
    base: str
    fingerprint: Tensor


def published(weights: str) -> Published:
    """The model in a folder, or of a name on the hub; or adapters in peft's format, on the model that they name.

    Raises:
        UserError: on one line, if there is none, it is of another kind or incomplete, or transformers is missing.
    """
    try:
        folder = _folder(weights)
        if not (folder / adapters.CONFIG).exists():
            return _model(weights, folder)
        base = json.loads((folder / adapters.CONFIG).read_text())["base_model_name_or_path"]
        statistics, below = _statistics(folder), _folder(base)
    except (*UNREADABLE, TypeError) as error:
        raise _refusal(weights, error) from error
    found = _model(base, below)
    adapters.read(found.model, folder, found.fingerprint)
    found.statistics = statistics or found.statistics
    return found


def _model(weights: str, folder: Path) -> Published:
    with needs_extra("vla"):
        from transformers import AutoTokenizer, PI0ForConditionalGeneration
        from transformers.utils import logging as messages
    messages.set_verbosity_error()  # what is missing is reported below
    messages.disable_progress_bar()
    try:
        settings = _settings(folder)
        native, found = PI0ForConditionalGeneration.from_pretrained(
            folder, config=settings, dtype=torch.float32, output_loading_info=True
        )
        lies_there = (folder / "tokenizer.json").exists() or (folder / "tokenizer.model").exists()
        tokenizer = AutoTokenizer.from_pretrained(folder if lies_there else TOKENIZER)
        statistics = _statistics(folder)
    except UNREADABLE as error:
        raise _refusal(weights, error) from error
    if missing := sorted(found["missing_keys"] - {UNUSED}):
        raise UserError(f"policy.weights={weights} lacks {len(missing)} tensors of pi0, such as {missing[0]}")
    model = Pi0Model(native)
    return Published(model, tokenizer, settings.chunk_size, statistics, weights, adapters.fingerprint(native))


def _refusal(weights: str, error: Exception) -> UserError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return UserError(f"policy.weights={weights}: expected a folder or a name on the hub of pi0 ({reason})")


def _folder(weights: str) -> Path:
    if Path(weights).is_dir():
        return Path(weights)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(weights, allow_patterns=["*.json", "*.safetensors", "tokenizer*"]))


def _settings(folder: Path) -> Any:  # noqa: ANN401 - of transformers
    """The configuration; ValueError for that of another model."""
    from transformers import PI0Config

    said = json.loads((folder / "config.json").read_text())
    if said.get("model_type") == "pi0":
        return PI0Config.from_pretrained(folder)
    kind = said.get("type", "pi0" if "action_horizon" in said and not said.get("pi05") else "unknown")
    if kind != "pi0":
        raise ValueError(f"config.json is of type {kind}")
    for key, expected in SIZES.items():
        if said.get(key, expected) != expected:
            raise ValueError(f"{key} is {said[key]}, which is not {expected}")
    action = said.get("max_action_dim", said.get("action_dim", 32))
    sizes = {key: said[key] for key in ("vlm_config", "dit_config") if key in said}
    return PI0Config(
        chunk_size=said.get("chunk_size", said.get("action_horizon", 50)), max_action_dim=action,
        max_state_dim=said.get("max_state_dim", action), **sizes,
    )  # fmt: skip


def _statistics(folder: Path) -> dict[str, Tensor]:
    """`STATISTICS` from where transformers, LeRobot or openpi leave them; {} if there are none."""
    from safetensors.torch import load_file

    for path in sorted(folder.glob("*processor_config.json")):
        said = json.loads(path.read_text())
        if said.get("state_mean") and said.get("actions_mean"):
            names = [name.replace("action_", "actions_") for name in STATISTICS]
            return {mine: torch.tensor(said[name]) for mine, name in zip(STATISTICS, names, strict=True)}
    for path in sorted(folder.glob("policy_preprocessor_step_*_normalizer_processor.safetensors")):
        said = load_file(path)
        names = ["observation.state.mean", "observation.state.std", "action.mean", "action.std"]
        if set(names) <= said.keys():
            return {mine: said[name].float() for mine, name in zip(STATISTICS, names, strict=True)}
    for path in sorted(folder.rglob("norm_stats.json")):
        said = json.loads(path.read_text())
        said = said.get("norm_stats", said)
        ways = [("state", "mean"), ("state", "std"), ("actions", "mean"), ("actions", "std")]
        return {mine: torch.tensor(said[of][what]) for mine, (of, what) in zip(STATISTICS, ways, strict=True)}
    return {}


def fitting(mean: Tensor, std: Tensor, size: int) -> tuple[Tensor, Tensor] | None:
    """Mean and deviation of the first `size` elements if all others are padding, which never varies; else None.

    Elements that never varied are divided by 1.
    """
    if len(mean) < size or bool(std[size:].any()):
        return None
    return mean[:size], torch.where(std[:size] < 1e-6, 1.0, std[:size])
