"""Published weights of pi0 and pi0.5, in transformers', LeRobot's or openpi's PyTorch naming, with their statistics.

transformers itself renames pi0's tensors of the other two; it has no pi0.5. All was tried with small models; no
published weights have been loaded yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from embodied.command_line.compute import enough_memory
from embodied.command_line.extras import needs_extra
from embodied.errors import UserError
from embodied.saving.json_text import loads
from policies.vla import adapters, statistics
from policies.vla.adaptive import Pi05Model
from policies.vla.model import Pi0Model
from policies.vla.statistics import UNREADABLE, reason

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
FLOATS = {"F64", "F32", "F16", "BF16"}
"""Types of weights, as safetensors names them."""
CONFIG = "config.json"


@dataclass
class Published:
    """A model, its tokenizer, the actions of its chunks, and `statistics.STATISTICS` by name, if it brings any.

    `cameras` are those that it has learned with, if its configuration names them, as LeRobot's does. `base` is where
    its weights without adapters are, and `fingerprint` theirs (`policies.vla.adapters`).
    """

    model: Pi0Model
    tokenizer: Any
    horizon: int
    cameras: list[str]
    statistics: dict[str, Tensor]
    base: str
    fingerprint: Tensor


def published(weights: str, kind: str = "pi0") -> Published:
    """The model, of a `kind` (pi0 or pi05), in a folder or of a name on the hub; or adapters on the model they name.

    Adapters are in peft's format.

    Raises:
        UserError: on one line, if there is none, it is of another kind or incomplete, or transformers is missing.
    """
    told = f"policy.weights={weights}"
    folder = folder_of(weights, kind)
    if not (folder / adapters.CONFIG).exists():
        return _model(weights, folder, kind)
    with _reading(f"{told}: cannot read {adapters.CONFIG}"):
        base = str(loads((folder / adapters.CONFIG).read_text(encoding="utf-8"))["base_model_name_or_path"])
    found = _model(base, folder_of(base, kind), kind)
    adapters.read(found.model, folder, found.fingerprint)
    found.statistics = statistics.read(folder, kind) or found.statistics
    return found


def _model(weights: str, folder: Path, kind: str) -> Published:
    with needs_extra("vla"):
        from transformers.utils import logging as messages
    messages.set_verbosity_error()  # what is missing is reported below
    messages.disable_progress_bar()
    told = f"policy.weights={weights}"
    with _reading(f"{told}: cannot read {CONFIG} as that of a {kind}"):
        settings, cameras = _settings(folder, kind)
    brought = statistics.read(folder, kind)
    tokenizer = _tokenizer(told, folder)
    if not planned():
        _check_files(told, folder)
    with _reading(f"{told}: cannot read the weights"):
        model, lacking, others = (_pi05 if kind == "pi05" else _pi0)(folder, settings)
    if missing := sorted(lacking - {UNUSED}):
        raise UserError(f"{told} lacks {len(missing)} tensors of {kind}, such as {missing[0]}")
    if others:
        name, got, expected = min(others)
        raise UserError(f"{told}: expected {name} of shape {expected} after {CONFIG}, got {got}")
    if not planned() and (broken := [name for name, weight in model.native.named_parameters() if not _finite(weight)]):
        raise UserError(f"{told} has infinity or not a number in {broken[0]}; download or export the weights again")
    return Published(
        model, tokenizer, settings.chunk_size, cameras, brought, weights, adapters.fingerprint(model.native)
    )


def _tokenizer(told: str, folder: Path) -> Any:  # noqa: ANN401 - of transformers
    from transformers import AutoTokenizer

    lies_there = (folder / "tokenizer.json").exists() or (folder / "tokenizer.model").exists()
    wrong = "a tokenizer that cannot be read" if lies_there else f"no tokenizer, and {TOKENIZER} is not here"
    advice = "put pi0's tokenizer.json and tokenizer_config.json there"
    with _reading(f"{told} has {wrong}; {advice}"):
        found = AutoTokenizer.from_pretrained(folder if lies_there else TOKENIZER, trust_remote_code=False)
    if found.bos_token_id is None:
        raise UserError(f"{told} has a tokenizer without a token for the beginning; {advice}")
    return found


def _check_files(told: str, folder: Path) -> None:
    """Read the heads of the files of weights, which tell whether they are whole, and of what types."""
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise UserError(f"{told} has no model.safetensors")
    for file in files:
        with _reading(f"{file} is damaged, or not whole: download or export it again"), safe_open(file, "pt") as given:
            types = {given.get_slice(name).get_dtype() for name in given.keys()}  # noqa: SIM118 - not a dict
        if not types <= FLOATS:
            raise UserError(
                f"expected weights of type {', '.join(sorted(FLOATS))}, got {min(types - FLOATS)} in {file}"
            )


def _finite(weight: Tensor) -> bool:
    return bool(weight.sum().isfinite())


Found = tuple[Pi0Model, set[str], list[tuple[str, list[int], list[int]]]]
"""The model, names of tensors that it lacks, and those of another shape: name, shape there, expected shape."""


def _pi0(folder: Path, settings: Any) -> Found:  # noqa: ANN401 - of transformers
    from transformers import PI0ForConditionalGeneration

    if planned():
        return Pi0Model(PI0ForConditionalGeneration(settings)), set(), []
    native, found = PI0ForConditionalGeneration.from_pretrained(
        folder, config=settings, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True,
        use_safetensors=True,
    )  # fmt: skip
    others = [(name, list(got), list(expected)) for name, got, expected in found["mismatched_keys"]]
    return Pi0Model(native), set(found["missing_keys"]), others


def _pi05(folder: Path, settings: Any) -> Found:  # noqa: ANN401 - of transformers
    from safetensors.torch import load_file
    from transformers import PI0ForConditionalGeneration

    model = Pi05Model(PI0ForConditionalGeneration(settings))
    if planned():
        return model, set(), []
    files = sorted(folder.glob("model*.safetensors"))
    given = {_renamed(name): value.float() for file in files for name, value in load_file(file).items()}
    pairs = [
        (name, given[name].shape, value.shape) for name, value in model.native.state_dict().items() if name in given
    ]
    others = [(name, list(got), list(expected)) for name, got, expected in pairs if got != expected]
    fitting = {name: value for name, value in given.items() if name not in {name for name, *_ in others}}
    return model, set(model.native.load_state_dict(fitting, strict=False).missing_keys) - given.keys(), others


def _renamed(name: str) -> str:
    name = name.removeprefix("model.").replace("vision_tower.vision_model.", "vision_tower.")
    found = next((old for old in RENAMED if name.startswith(old)), "")
    return RENAMED.get(found, "") + name.removeprefix(found)


@contextmanager
def _reading(told: str) -> Iterator[None]:
    """Report what goes wrong in the body, save for a lack of memory, as `told`, with the reason."""
    try:
        with enough_memory():
            yield
    except UserError:
        raise
    except UNREADABLE as error:
        raise UserError(f"{told} ({reason(error)})") from error


def planned() -> bool:
    """Whether a model is made for its shapes alone (`embodied/training/plan.py`): then no weights are read."""
    return torch.get_default_device().type == "meta"


def folder_of(weights: str, kind: str, *also: str) -> Path:
    """The folder of that name, or of what lies at the hub: texts, tensors unless planned, and files like `also`.

    Raises:
        UserError: if there is none.
    """
    if Path(weights).exists():
        if not Path(weights).is_dir():
            raise UserError(f"policy.weights={weights} is a file; expected the folder with {CONFIG} and weights")
        return Path(weights)
    with needs_extra("vla"):
        from huggingface_hub import snapshot_download

    wanted = ["*.json", "tokenizer*", *([] if planned() else ["*.safetensors", *also])]
    with _reading(f"policy.weights={weights}: expected a folder or a name on the hub of {kind}"):
        return Path(snapshot_download(weights, allow_patterns=wanted))


def _settings(folder: Path, expected_kind: str) -> tuple[Any, list[str]]:
    """The configuration of transformers, and names of cameras; ValueError for that of another model."""
    with needs_extra("vla"):
        from huggingface_hub.errors import StrictDataclassError
        from transformers import PI0Config

    said = loads((folder / CONFIG).read_text(encoding="utf-8"))
    try:
        if said.get("model_type") == "pi0" == expected_kind:
            return PI0Config.from_pretrained(folder), []
        cameras = [name for name, what in said.get("input_features", {}).items() if what["type"] == "VISUAL"]
        return PI0Config(**_sizes(said, expected_kind)), cameras
    except StrictDataclassError as error:
        raise ValueError(" ".join(str(error).split())) from error


def _sizes(said: dict[str, Any], expected_kind: str) -> dict[str, Any]:
    """Those of transformers' configuration, from LeRobot's or openpi's."""
    openpi = ("pi05" if said.get("pi05") else "pi0") if "action_horizon" in said else "unknown"
    kind = said.get("type", said.get("model_type", openpi))
    if kind != expected_kind:
        raise ValueError(f"it is of type {kind}")
    for key, expected in SIZES.items():
        if said.get(key, expected) != expected:
            raise ValueError(f"{key} is {said[key]}, which is not {expected}")
    action = said.get("max_action_dim", said.get("action_dim", 32))
    return {
        "chunk_size": said.get("chunk_size", said.get("action_horizon", 50)), "max_action_dim": action,
        "max_state_dim": said.get("max_state_dim", action),
    } | {key: said[key] for key in ("vlm_config", "dit_config") if key in said}  # fmt: skip
