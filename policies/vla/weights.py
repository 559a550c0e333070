"""Published weights of pi0 and pi0.5, in transformers', LeRobot's or openpi's PyTorch naming, with their statistics.

transformers itself renames pi0's tensors of the other two; it has no pi0.5. All was tried with small models; no
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
from policies.vla.adaptive import Pi05Model
from policies.vla.model import Pi0Model

TOKENIZER = "google/paligemma-3b-pt-224"
"""Where the tokenizer is if it does not lie with the weights."""
SIZES = {"paligemma_variant": "gemma_2b", "action_expert_variant": "gemma_300m"}
"""LeRobot's and openpi's names of pi0's sizes."""
UNUSED = "model.dit.embed_tokens.weight"
RENAMED = {
    "paligemma_with_expert.paligemma.lm_head.": "model.vlm.language_model.embed_tokens.",
    "paligemma_with_expert.paligemma.model.": "model.vlm.",
    "paligemma_with_expert.gemma_expert.model.norm.": "final_norm.",
    "paligemma_with_expert.gemma_expert.model.": "model.dit.",
    "action_in_proj.": "embed_action_time.action_in_proj.",
    "time_mlp_": "embed_action_time.time_mlp_",
}
"""Beginnings of the names of pi0.5's tensors at openpi and LeRobot, and ours."""
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


def published(weights: str, kind: str = "pi0") -> Published:
    """The model, of a `kind` (pi0 or pi05), in a folder or of a name on the hub; or adapters on the model they name.

    Adapters are in peft's format.

    Raises:
        UserError: on one line, if there is none, it is of another kind or incomplete, or transformers is missing.
    """
    try:
        folder = _folder(weights)
        if not (folder / adapters.CONFIG).exists():
            return _model(weights, folder, kind)
        base = json.loads((folder / adapters.CONFIG).read_text())["base_model_name_or_path"]
        statistics, below = _statistics(folder, kind), _folder(base)
    except UserError:  # says what is wrong
        raise
    except (*UNREADABLE, TypeError) as error:
        raise _refusal(weights, kind, error) from error
    found = _model(base, below, kind)
    adapters.read(found.model, folder, found.fingerprint)
    found.statistics = statistics or found.statistics
    return found


def _model(weights: str, folder: Path, kind: str) -> Published:
    with needs_extra("vla"):
        from transformers import AutoTokenizer
        from transformers.utils import logging as messages
    messages.set_verbosity_error()  # what is missing is reported below
    messages.disable_progress_bar()
    try:
        settings = _settings(folder, kind)
        model, lacking = (_pi05 if kind == "pi05" else _pi0)(folder, settings)
        statistics = _statistics(folder, kind)
    except UNREADABLE as error:
        raise _refusal(weights, kind, error) from error
    lies_there = (folder / "tokenizer.json").exists() or (folder / "tokenizer.model").exists()
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder if lies_there else TOKENIZER)
    except UNREADABLE as error:
        wrong = (
            "has a tokenizer that cannot be read" if lies_there else f"has no tokenizer, and {TOKENIZER} is not here"
        )
        raise UserError(
            f"policy.weights={weights} {wrong}; put pi0's tokenizer.json there ({_reason(error)})"
        ) from error
    if missing := sorted(lacking - {UNUSED}):
        raise UserError(f"policy.weights={weights} lacks {len(missing)} tensors of {kind}, such as {missing[0]}")
    return Published(model, tokenizer, settings.chunk_size, statistics, weights, adapters.fingerprint(model.native))


def _pi0(folder: Path, settings: Any) -> tuple[Pi0Model, set[str]]:  # noqa: ANN401 - of transformers
    """The model, and names of tensors that it lacks."""
    from transformers import PI0ForConditionalGeneration

    if planned():
        return Pi0Model(PI0ForConditionalGeneration(settings)), set()
    native, found = PI0ForConditionalGeneration.from_pretrained(
        folder, config=settings, dtype=torch.float32, output_loading_info=True
    )
    return Pi0Model(native), set(found["missing_keys"])


def _pi05(folder: Path, settings: Any) -> tuple[Pi0Model, set[str]]:  # noqa: ANN401 - of transformers
    """As `_pi0`."""
    from safetensors.torch import load_file
    from transformers import PI0ForConditionalGeneration

    model = Pi05Model(PI0ForConditionalGeneration(settings))
    if planned():
        return model, set()
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise ValueError("there is no model.safetensors")
    given = {_renamed(name): value.float() for file in files for name, value in load_file(file).items()}
    return model, set(model.native.load_state_dict(given, strict=False).missing_keys)


def _renamed(name: str) -> str:
    name = name.removeprefix("model.").replace("vision_tower.vision_model.", "vision_tower.")
    found = next((old for old in RENAMED if name.startswith(old)), "")
    return RENAMED.get(found, "") + name.removeprefix(found)


def _refusal(weights: str, kind: str, error: Exception) -> UserError:
    return UserError(f"policy.weights={weights}: expected a folder or a name on the hub of {kind} ({_reason(error)})")


def _reason(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def planned() -> bool:
    """Whether a model is made for its shapes alone (`embodied/training/plan.py`): then no weights are read."""
    return torch.get_default_device().type == "meta"


def _folder(weights: str) -> Path:
    if Path(weights).is_dir():
        return Path(weights)
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "tokenizer*", *([] if planned() else ["*.safetensors"])]
    return Path(snapshot_download(weights, allow_patterns=wanted))


def _settings(folder: Path, expected_kind: str) -> Any:  # noqa: ANN401 - of transformers
    """The configuration; ValueError for that of another model."""
    from transformers import PI0Config

    said = json.loads((folder / "config.json").read_text())
    if said.get("model_type") == "pi0" == expected_kind:
        return PI0Config.from_pretrained(folder)
    openpi = ("pi05" if said.get("pi05") else "pi0") if "action_horizon" in said else "unknown"
    kind = said.get("type", said.get("model_type", openpi))
    if kind != expected_kind:
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


def _statistics(folder: Path, kind: str) -> dict[str, Tensor]:
    """`STATISTICS` from where transformers, LeRobot or openpi leave them; {} if there are none.

    Those of pi05 are middle and half width of the range between the first and the last of a hundred quantiles.
    """
    from safetensors.torch import load_file

    first, second = ("q01", "q99") if kind == "pi05" else ("mean", "std")

    for path in sorted(folder.glob("*processor_config.json")):
        said = json.loads(path.read_text())
        if said.get("state_mean") and said.get("actions_mean"):
            names = [name.replace("action_", "actions_") for name in STATISTICS]
            return {mine: torch.tensor(said[name]) for mine, name in zip(STATISTICS, names, strict=True)}
    for path in sorted(folder.glob("policy_preprocessor_step_*_normalizer_processor.safetensors")):
        said = load_file(path)
        names = [f"{of}.{what}" for of in ("observation.state", "action") for what in (first, second)]
        if set(names) <= said.keys():
            return _located([said[name].float() for name in names], kind)
    for path in sorted(folder.rglob("norm_stats.json")):
        said = json.loads(path.read_text())
        said = said.get("norm_stats", said)
        return _located([torch.tensor(said[of][what]) for of in ("state", "actions") for what in (first, second)], kind)
    return {}


def _located(found: list[Tensor], kind: str) -> dict[str, Tensor]:
    if kind == "pi05":
        pairs = [(found[0], found[1]), (found[2], found[3])]
        found = [value for low, high in pairs for value in ((low + high) / 2.0, (high - low) / 2.0)]
    return dict(zip(STATISTICS, found, strict=True))


def fitting(mean: Tensor, std: Tensor, size: int) -> tuple[Tensor, Tensor] | None:
    """Mean and deviation of the first `size` elements if all others are padding, which never varies; else None.

    Elements that never varied are divided by 1.
    """
    if len(mean) < size or bool(std[size:].any()):
        return None
    return mean[:size], torch.where(std[:size] < 1e-6, 1.0, std[:size])
