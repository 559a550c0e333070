"""Published weights of pi0 and pi0.5, in the naming of transformers, LeRobot or openpi, with their statistics.

All was tested with small models; no published weights have been loaded yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from embodied.errors import UserError
from embodied.extras import needs_extra
from embodied.saving.json_text import loads
from embodied.training.compute import enough_memory
from policies.vla import adapters
from policies.vla.adaptive import Pi05Model
from policies.vla.checkpoints import openpi_jax, settings, statistics
from policies.vla.checkpoints.settings import CONFIG, Settings
from policies.vla.checkpoints.statistics import UNREADABLE, reason
from policies.vla.model import Pi0Model

TOKENIZER = "google/paligemma-3b-pt-224"
"""Name of the tokenizer on the hub, for weights without one."""
NATIVE = ("model.vlm.", "model.dit.", "embed_action_time.", "final_norm.")
"""Beginnings of the names of our tensors, which are also transformers'."""
RENAMED = {
    "paligemma_with_expert.paligemma.model.": "model.vlm.",
    "paligemma_with_expert.paligemma.": "model.vlm.",
    "paligemma_with_expert.gemma_expert.model.": "model.dit.",
    "action_in_proj.": "embed_action_time.action_in_proj.",
    "action_time_mlp_": "embed_action_time.action_time_mlp_",
    "state_proj.": "embed_action_time.state_proj.",
    "time_mlp_": "embed_action_time.time_mlp_",
}
"""Beginnings of openpi's and LeRobot's names of tensors, and ours."""
LAST_NORM = "paligemma_with_expert.gemma_expert.model.norm."
"""Last norm of the expert, which is outside the expert in pi0.5."""
HEADS = "model.vlm.lm_head.weight", "model.vlm.language_model.lm_head.weight"
EMBEDDING = "model.vlm.language_model.embed_tokens.weight"
"""Name of the embedding, also in files that store it only as the language model's head, to which it is tied."""
ADAPTIVE = {"time_mlp_in.weight", "model.time_mlp_in.weight"}
"""Names of a tensor that only pi0.5 has."""
FLOATS = {"F64", "F32", "F16", "BF16"}
"""Types of weights, by safetensors' names."""


@dataclass
class Published:
    """Model, its tokenizer, its settings, and `statistics.STATISTICS` by name, if it has any.

    `base` is the source of its weights without adapters, and `fingerprint` theirs (`policies.vla.adapters`).
    """

    model: Pi0Model
    tokenizer: Any
    settings: Settings
    statistics: dict[str, Tensor]
    base: str
    fingerprint: Tensor


Loader = Callable[[str, Path, str, str | None], Published]
"""Function that loads a model from `weights`, their folder, its kind, and the data set of its statistics."""


def published(weights: str, kind: str = "pi0", key: str | None = None, load: Loader | None = None) -> Published:
    """Load a model of a `kind` (pi0 or pi05) from a folder or a name on the hub; or adapters and their base model.

    Adapters are in peft's format. `key` names one of several data sets with statistics (`statistics.read`). Models of
    other kinds are read by `load`.

    Raises:
        UserError: on one line, if there is none, it is of another kind or incomplete, or transformers is missing.
    """
    option = f"policy.weights={weights}"
    load = load or _model
    folder = folder_of(weights, kind)
    if not (folder / adapters.CONFIG).exists():
        return load(weights, folder, kind, key)
    with reading(f"{option}: cannot read {adapters.CONFIG}"):
        base = str(loads((folder / adapters.CONFIG).read_text(encoding="utf-8"))["base_model_name_or_path"])
    statistics_files = list(folder.rglob("norm_stats.json"))  # the key then refers to these
    checkpoint = load(base, folder_of(base, kind), kind, statistics.DEMONSTRATIONS if statistics_files else key)
    adapters.read(checkpoint.model, folder, checkpoint.fingerprint)
    checkpoint.statistics = (
        statistics.read(folder, checkpoint.settings.modes, key if statistics_files else None) or checkpoint.statistics
    )
    return checkpoint


def _model(weights: str, folder: Path, kind: str, key: str | None) -> Published:
    option = f"policy.weights={weights}"
    names = check_files(option, folder, kind)
    has_arrays = openpi_jax.is_checkpoint(folder)
    adaptive = None if planned() or has_arrays else bool(names & ADAPTIVE)
    source = f"the arrays in {openpi_jax.ARRAYS} as those" if has_arrays else f"{CONFIG} as that"
    with reading(f"{option}: cannot read {source} of a {kind}"):
        options = settings.read(folder, kind, adaptive=adaptive)
    norm_statistics = statistics.read(folder, options.modes, key)
    tokenizer = load_tokenizer(option, folder, TOKENIZER, "pi0")
    if tokenizer.bos_token_id is None:
        raise UserError(f"{option} has a tokenizer without a token for the beginning; {advice('pi0')}")
    with reading(f"{option}: cannot read the weights"):
        from transformers import PI0ForConditionalGeneration

        model = (Pi05Model if kind == "pi05" else Pi0Model)(PI0ForConditionalGeneration(options.model))
    fill(model.native, option, folder, kind, lambda name: _renamed(name, adaptive=kind == "pi05"))
    return Published(model, tokenizer, options, norm_statistics, weights, adapters.fingerprint(model.native))


def advice(kind: str) -> str:
    """Advice for a folder without the tokenizer of a `kind` of model."""
    return f"put {kind}'s tokenizer.json and tokenizer_config.json there"


def load_tokenizer(option: str, folder: Path, elsewhere: str, kind: str) -> Any:  # noqa: ANN401 - of transformers
    """Load the tokenizer in `folder`, or if it has none, the one of the folder or the name on the hub `elsewhere`.

    Raises:
        UserError: if neither can be read.
    """
    from transformers import AutoTokenizer

    has_tokenizer = (folder / "tokenizer.json").exists() or (folder / "tokenizer.model").exists()
    problem = "a tokenizer that cannot be read" if has_tokenizer else f"no tokenizer, and {elsewhere} is not here"
    with reading(f"{option} has {problem}; {advice(kind)}"):
        return AutoTokenizer.from_pretrained(folder if has_tokenizer else elsewhere, trust_remote_code=False)


def check_files(option: str, folder: Path, kind: str) -> set[str]:
    """Check that there is a configuration, and that the weights are complete; returns the tensors' names.

    There are no names while a run is only planned, which looks for no weights, and of arrays of JAX, which are checked
    where their sizes are read.

    Raises:
        UserError: for missing or damaged files, and where transformers is missing.
    """
    with needs_extra("vla"):
        from transformers.utils import logging as messages
    messages.set_verbosity_error()  # missing tensors are reported by `fill`
    messages.disable_progress_bar()
    if not settings.has_fields(folder):
        raise UserError(f"{option}: cannot read {CONFIG} as that of a {kind} (No such file or directory)")
    return set() if planned() or openpi_jax.is_checkpoint(folder) else _check_files(option, folder)


def _check_files(option: str, folder: Path) -> set[str]:
    """Check by the headers of the weight files that they are complete, and of floats; returns the tensors' names."""
    files = sorted(folder.glob("model*.safetensors"))
    names = set[str]()
    if not files:
        raise UserError(f"{option} has no model.safetensors")
    for file in files:
        with (
            reading(f"{file} is damaged, or not whole: download or export it again"),
            safe_open(file, "pt") as tensors,
        ):
            types = {tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118 - not a dict
            names |= set(tensors.keys())
        if not types <= FLOATS:
            raise UserError(
                f"expected weights of type {', '.join(sorted(FLOATS))}, got {min(types - FLOATS)} in {file}"
            )
    return names


def has_adaptive_norms(folder: Path) -> bool:
    """Whether the weights in `folder` have pi0.5's adaptive norms, by the names of their tensors."""
    return bool(_check_files(str(folder), folder) & ADAPTIVE)


def _finite(weight: Tensor) -> bool:
    return bool(weight.sum().isfinite())


@torch.no_grad()
def fill(native: nn.Module, option: str, folder: Path, kind: str, renamed: Callable[[str], str]) -> None:
    """Fill `native` with the weights in `folder`, by our names (`renamed`), unless a run is only planned.

    Raises:
        UserError: for tensors of a `kind` of model that are missing, of another shape, or not finite.
    """
    if planned():
        return
    weights: dict[str, Tensor] = dict(native.state_dict())
    missing_names = set(weights)
    others = []
    with reading(f"{option}: cannot read the weights"):
        for name, read in _tensors(folder):
            own_name = renamed(name)
            if own_name in HEADS:  # if both exist, LeRobot and openpi read the embedding
                own_name = EMBEDDING if EMBEDDING in missing_names else ""
            if own_name in weights:
                value, expected = read(), weights[own_name].shape
                if value.shape != expected:
                    others.append((own_name, list(value.shape), list(expected)))
                else:
                    weights[own_name].copy_(value)
                missing_names.discard(own_name)
                del value  # otherwise it holds the memory of stacked layers while the next are read
            del read
    if missing := sorted(missing_names):
        raise UserError(f"{option} lacks {len(missing)} tensors of {kind}, such as {missing[0]}")
    if others:
        name, got, expected = min(others)
        raise UserError(f"{option}: expected {name} of shape {expected} after {CONFIG}, got {got}")
    if broken := [name for name, weight in native.named_parameters() if not _finite(weight)]:
        raise UserError(f"{option} has infinity or not a number in {broken[0]}; download or export the weights again")


def _tensors(folder: Path) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Published names of the tensors in `folder`, one after the other, each with the function that reads it."""
    if openpi_jax.is_checkpoint(folder):
        for name, value in openpi_jax.tensors(folder):
            yield name, lambda value=value: value
            del value
        return
    for file in sorted(folder.glob("model*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dict
                yield name, partial(tensors.get_tensor, name)


def _renamed(name: str, *, adaptive: bool) -> str:
    """Our name of a tensor of any of the three namings."""
    name = name if name.startswith(NATIVE) else name.removeprefix("model.")
    for layer in ("vision_tower.vision_model.", "language_model.model."):  # of earlier releases of transformers
        name = name.replace(layer, layer.partition(".")[0] + ".")
    if adaptive and name.startswith(LAST_NORM):
        return "final_norm." + name.removeprefix(LAST_NORM)
    prefix = next((old for old in RENAMED if name.startswith(old)), "")
    return RENAMED.get(prefix, "") + name.removeprefix(prefix)


@contextmanager
def reading(option: str) -> Iterator[None]:
    """Context that reports errors of the body, except a lack of memory, as `option` with the reason."""
    try:
        with enough_memory():
            yield
    except UserError:
        raise
    except UNREADABLE as error:
        raise UserError(f"{option} ({reason(error)})") from error


def planned() -> bool:
    """Whether a model is built for its shapes alone (`embodied/training/plan.py`): then no weights are read."""
    return torch.get_default_device().type == "meta"


def folder_of(weights: str, kind: str, *also: str, tensors: bool = True) -> Path:
    """Folder of that name, or a download from the hub: texts and, unless planned, `tensors` and files like `also`.

    Raises:
        UserError: if there is none.
    """
    if Path(weights).exists():
        if not Path(weights).is_dir():
            raise UserError(f"policy.weights={weights} is a file; expected the folder with {CONFIG} and weights")
        if (Path(weights) / openpi_jax.TREE).is_file():
            raise UserError(f"policy.weights={weights} are arrays without statistics; name the folder that holds both")
        return Path(weights)
    with needs_extra("vla"):
        from huggingface_hub import snapshot_download

    large = [*(["*.safetensors"] if tensors else []), *also]
    patterns = ["*.json", "tokenizer*", "merges.txt", *([] if planned() else large)]
    with reading(f"policy.weights={weights}: expected a folder or a name on the hub of {kind}"):
        return Path(snapshot_download(weights, allow_patterns=patterns))
