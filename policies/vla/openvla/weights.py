"""Published folders of OpenVLA and OpenVLA-OFT: config.json, shards of safetensors, statistics, and OFT's .pt files.

Tensors have Prismatic's names, whose vision is timm's. Sizes follow from the tensors, except the heads of attention,
which are those of ViT-L and SO400M. Source: github.com/moojink/openvla-oft. Tested with a small model in this
layout; no published weights have been loaded yet. Not read: FiLM, diffusion, other vision, unmerged adapters.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn

from embodied.errors import UserError
from embodied.extras import needs_extra
from embodied.saving.json_text import loads
from policies.vla.checkpoints.statistics import DEMONSTRATIONS, UNREADABLE, reason
from policies.vla.checkpoints.weights import folder_of, planned
from policies.vla.openvla.model import SPACE, Prismatic
from policies.vla.openvla.parallel import BINS

VISION = "vit_large_patch14_reg4_dinov2", "vit_so400m_patch14_siglip"
"""Beginnings of timm's names of the vision models."""
HEADS = 16
"""Number of attention heads in both of them."""
DINO = "vision_backbone.featurizer."
SIGLIP = "vision_backbone.fused_featurizer."
LLAMA = "language_model."
POSITIONS = "dino.embeddings.position_embeddings", "siglip.embeddings.position_embedding.weight"
BEGINNINGS = {
    POSITIONS[0]: f"{DINO}pos_embed",
    "dino.embeddings.register_tokens": f"{DINO}reg_token",
    "dino.embeddings.patch_embeddings.projection.": f"{DINO}patch_embed.proj.",
    "dino.embeddings.": DINO,
    "dino.encoder.layer.": f"{DINO}blocks.",
    POSITIONS[1]: f"{SIGLIP}pos_embed",
    "siglip.embeddings.patch_embedding.": f"{SIGLIP}patch_embed.proj.",
    "siglip.encoder.layers.": f"{SIGLIP}blocks.",
    "language_model.": f"{LLAMA}model.",
    "bins.": f"{LLAMA}lm_head.",
}
"""Beginnings of names of tensors of `Prismatic`, and the published ones; the first that fits."""
LAYERS = {
    r"(self_attn|attention)\.": "attn.",
    r"layer_norm(\d)": r"norm\1",
    r"layer_scale(\d)\.lambda1": r"ls\1.scale_factor",
    r"(o|out)_proj\.": "proj.",
}
"""Names within a layer of transformers' vision, and timm's."""

CODE = "modeling_prismatic.py"
"""File of the authors' code beside published weights."""
CHUNKS = "NUM_ACTIONS_CHUNK"
"""Name in the code of OpenVLA-OFT that OpenVLA's lacks."""


@dataclass
class Published:
    """Model parts, normalisation of colours [2, 3], tokenizer, and the other contents of a published folder.

    `proprio` and `head` are tensors of the two .pt files, by name; `statistics` are those of the requested data set;
    `autoregressive` says whether elements are written one after the other. Each is None if there is none, or nothing
    says so. `first_bin` is the token of the first bin.
    """

    native: Prismatic
    means: list[list[float]]
    deviations: list[list[float]]
    tokenizer: Any
    proprio: dict[str, Tensor] | None
    head: dict[str, Tensor] | None
    statistics: dict[str, Any] | None
    autoregressive: bool | None
    first_bin: int


def published(weights: str, unnorm_key: str | None) -> Published:
    """Read a folder, or a name on the hub, with the statistics of `unnorm_key`, or of the only data set.

    Raises:
        UserError: on one line, if there is none, it is of another kind or incomplete, or transformers is missing.
    """
    with needs_extra("vla"):
        import transformers  # noqa: F401
    try:
        folder = folder_of(weights, "OpenVLA", "*.pt", CODE)
        settings = _settings(folder)
        proprio, head = (_part(folder, name) for name in ("proprio_projector", "action_head"))
        statistics = _statistics(folder, settings, unnorm_key, proprio is not None)
        colours = _colours(folder)
        tokenizer = _tokenizer(folder)
        native = _native(folder, settings)
        autoregressive = writes_in_turn(folder)
        return Published(native, *colours, tokenizer, proprio, head, statistics, autoregressive, _first_bin(settings))
    except UserError:  # has a message already
        raise
    except (*UNREADABLE, TypeError, EOFError, UnpicklingError) as error:
        raise UserError(f"policy.weights={weights}: expected OpenVLA's published files ({reason(error)})") from error


def writes_in_turn(folder: Path) -> bool | None:
    """Whether the weights in `folder` write elements one after the other, as OpenVLA, or at once, as OpenVLA-OFT.

    OFT's weights lie beside its .pt files, or beside OFT's own code, which names the number of actions of a chunk:
    only its text is read. None: there is neither.
    """
    if any(folder.glob("*_checkpoint.pt")):
        return False
    code = folder / CODE
    return CHUNKS not in code.read_text(encoding="utf-8") if code.exists() else None


def fill(module: nn.Module, tensors: dict[str, Tensor], what: str) -> None:
    """Copy `tensors` into `module`, which is called `what`.

    Raises:
        UserError: on one line, for other names or sizes.
    """
    expected = module.state_dict()
    if other := sorted(expected.keys() ^ tensors.keys()):
        raise UserError(f"{what} has other layers than OpenVLA-OFT's: {len(other)} tensors differ, such as {other[0]}")
    for name, value in expected.items():
        if value.shape != tensors[name].shape:
            sizes = f"{tuple(value.shape)}, got {tuple(tensors[name].shape)}"
            raise UserError(f"{what} does not fit: expected {name} of {sizes}")
    module.load_state_dict(tensors)


def action_range(of: dict[str, Any], low: Sequence[float]) -> tuple[list[float], list[float]]:
    """Actions in robot units at -1 and at 1, from a data set's statistics and the limits `low` of a contract.

    The element that is not normalised is the gripper, from 0 (closed) to 1 (open): robosuite's goes from 1 (closed) to
    -1 (open), which a limit below 0 indicates; others are unchanged.
    """
    ends = [
        (first, last + 1e-8) if normalised else (3.0, -1.0) if lowest < 0.0 else (-1.0, 1.0)
        for first, last, normalised, lowest in zip(of["q01"], of["q99"], _mask(of), low, strict=True)
    ]
    return [begin for begin, _ in ends], [end for _, end in ends]


def two_valued(of: dict[str, Any], low: Sequence[float]) -> list[bool]:
    """Which elements are the gripper's of robosuite, of which the published evaluation sends the sign alone."""
    return [not normalised and lowest < 0.0 for normalised, lowest in zip(_mask(of), low, strict=True)]


def state_range(of: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Beginnings and lengths of the ranges of the state's elements, from a data set's statistics."""
    ends = [
        (first, last - first + 1e-8) if normalised else (-1.0, 2.0)
        for first, last, normalised in zip(of["q01"], of["q99"], _mask(of), strict=True)
    ]
    return [begin for begin, _ in ends], [length for _, length in ends]


def _mask(of: dict[str, Any]) -> list[bool]:
    return of.get("mask") or [True] * len(of["q01"])


def _settings(folder: Path) -> dict[str, Any]:
    settings = loads((folder / "config.json").read_text(encoding="utf-8"))
    if settings.get("model_type") != "openvla":
        raise ValueError(f"config.json is of type {settings.get('model_type', 'unknown')}")
    vision = settings.get("timm_model_ids", [])
    if len(vision) != 2 or not all(each.startswith(ours) for each, ours in zip(vision, VISION, strict=True)):
        raise ValueError(f"pictures are seen by {' and '.join(vision) or 'nothing'}, expected {' and '.join(VISION)}")
    if settings.get("n_action_bins", BINS) != BINS:
        raise ValueError(f"n_action_bins is {settings['n_action_bins']}, expected {BINS}")
    if len(set(settings.get("image_sizes", []))) != 1:
        raise ValueError(f"image_sizes are {settings.get('image_sizes')}, expected the same for both")
    if settings.setdefault("text_config", {}).get("model_type", "llama") != "llama":
        raise ValueError(f"the language model is {settings['text_config']['model_type']}, expected llama")
    for begin, option in {"vision_backbone": "FiLM", "noisy_action_projector": "diffusion"}.items():
        if files := sorted(folder.glob(f"{begin}--*.pt")):
            raise ValueError(f"{files[0].name} is of {option}, which is not read here")
    return settings


def _statistics(folder: Path, settings: dict[str, Any], key: str | None, proprio: bool) -> dict[str, Any] | None:
    if key == DEMONSTRATIONS:
        return None
    path = folder / "dataset_statistics.json"
    statistics = loads(path.read_text(encoding="utf-8")) if path.exists() else settings.get("norm_stats")
    hint = f"policy.unnorm_key={DEMONSTRATIONS} takes those of the demonstrations"
    if not statistics:
        raise ValueError(f"there are no statistics in dataset_statistics.json or config.json; {hint}")
    if key is None and len(statistics) > 1:
        raise ValueError(
            f"there are statistics of {len(statistics)} data sets; choose policy.unnorm_key={'|'.join(statistics)}"
        )
    key = next(iter(statistics)) if key is None else key
    if key not in statistics:
        raise ValueError(f"there are no statistics of unnorm_key={key}; expected one of {', '.join(statistics)}")
    if "aloha" in key.lower():  # OpenVLA-OFT chooses them by this name, too
        raise ValueError(f"the data set {key} is normalised by its extremes, which are not read; {hint}")
    for group in ("action", *(["proprio"] if proprio else [])):
        if not {"q01", "q99"} <= statistics[key].get(group, {}).keys():
            raise ValueError(f"the statistics of {key} lack q01 or q99 of {group}; {hint}")
    return statistics[key]


def _part(folder: Path, name: str) -> dict[str, Tensor] | None:
    """Tensors of the only file of a part, without the prefixes of distributed training."""
    files = sorted(folder.glob(f"{name}--*checkpoint.pt"))
    if len(files) > 1:
        raise ValueError(f"there are {len(files)} files {name}--*_checkpoint.pt, expected one")
    if not files:
        return None
    tensors = torch.load(files[0], map_location="meta" if planned() else "cpu", weights_only=True)
    return {key.removeprefix("module.").removeprefix("model."): value.float() for key, value in tensors.items()}


def _colours(folder: Path) -> tuple[list[list[float]], list[list[float]]]:
    preprocessor = loads((folder / "preprocessor_config.json").read_text(encoding="utf-8"))
    rounded = preprocessor.get("tvf_normalize_params")  # values of training: the means rounded to bfloat16
    if rounded:
        return [each["mean"] for each in rounded], [each["std"] for each in rounded]
    return preprocessor["means"], preprocessor["stds"]


def _tokenizer(folder: Path) -> Any:  # noqa: ANN401 - of tokenizers
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.exists():
        raise ValueError("there is no tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises no narrower class
        raise ValueError(f"tokenizer.json cannot be read: {reason(error)}") from error
    if tokenizer.token_to_id(SPACE) is None:
        raise ValueError(f"tokenizer.json has no token {SPACE}")
    return tokenizer


class _Tensors:
    """Tensors of all shards, by published name."""

    def __init__(self, folder: Path, files: ExitStack) -> None:
        from safetensors import safe_open

        opened = [
            files.enter_context(safe_open(path, framework="pt")) for path in sorted(folder.glob("model*.safetensors"))
        ]
        if not opened:
            raise ValueError("there is no model*.safetensors; plan=true reads sizes from it, too")
        self._files = {name: file for file in opened for name in file.keys()}  # noqa: SIM118 - not a dict

    def shape(self, name: str) -> list[int]:
        """Shape of a tensor, without reading it."""
        self.check([name])
        return self._files[name].get_slice(name).get_shape()

    def __getitem__(self, name: str) -> Tensor:
        return self._files[name].get_tensor(name)

    def check(self, names: Sequence[str]) -> None:
        """Raise ValueError if any is missing."""
        if missing := sorted(set(names) - self._files.keys()):
            raise ValueError(f"{len(missing)} tensors are missing, such as {missing[0]}")

    def depth(self, begin: str) -> int:
        """Number of layers below a published name."""
        matches = [re.match(rf"{re.escape(begin)}blocks\.(\d+)\.", name) for name in self._files]
        return 1 + max((int(match[1]) for match in matches if match), default=-1)


def _first_bin(settings: dict[str, Any]) -> int:
    """Token of the first bin: bins are the last of the vocabulary before its padding."""
    return settings["text_config"]["vocab_size"] - settings.get("pad_to_multiple_of", 64) - BINS


@torch.no_grad()
def _native(folder: Path, settings: dict[str, Any]) -> Prismatic:
    from transformers.initialization import no_init_weights

    with ExitStack() as files:
        tensors = _Tensors(folder, files)
        with no_init_weights():
            native = _empty(tensors, settings)
        weights = dict(native.named_parameters())
        sources = {name: _source(name) for name in weights}
        tensors.check([name for name, _ in sources.values()])
        first = _first_bin(settings)
        for name, weight in weights.items():
            source, part = sources[name]
            if weight.is_meta:
                continue
            value = tensors[source]
            if part:
                value = value.chunk(3)["qkv".index(part)]
            elif name == POSITIONS[0]:
                value = nn.functional.pad(value, (0, 0, 1, 0))  # timm's class token has no position
            elif name == POSITIONS[1]:
                value = value[0]
            elif name == "bins.weight":
                value = value[first : first + BINS]
            if value.shape != weight.shape:
                raise ValueError(f"expected {source} of {tuple(weight.shape)}, got {tuple(value.shape)}")
            weight.copy_(value)
    return native


def _empty(tensors: _Tensors, settings: dict[str, Any]) -> Prismatic:
    """Build the parts without their weights."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import (
        Dinov2WithRegistersConfig,
        Dinov2WithRegistersModel,
        LlamaConfig,
        LlamaModel,
        SiglipVisionConfig,
        SiglipVisionModel,
    )

    vision = []
    for begin in (DINO, SIGLIP):
        width, _, patch, _ = tensors.shape(f"{begin}patch_embed.proj.weight")
        if (depth := tensors.depth(begin)) < 2 or width % HEADS:
            raise ValueError(
                f"{begin}blocks are {depth} of width {width}, expected 2 at least, of a multiple of {HEADS}"
            )
        vision.append(
            {
                "hidden_size": width,
                "num_hidden_layers": depth - 1,
                "num_attention_heads": HEADS,
                "patch_size": patch,
                "image_size": settings["image_sizes"][0],
                "hidden_act": "gelu",
                "layer_norm_eps": 1e-6,
            }
        )
    inner = tensors.shape(f"{DINO}blocks.0.mlp.fc1.weight")[0]
    dino = Dinov2WithRegistersConfig(
        **vision[0],
        mlp_ratio=inner // vision[0]["hidden_size"],
        num_register_tokens=tensors.shape(f"{DINO}reg_token")[1],
    )
    inner = tensors.shape(f"{SIGLIP}blocks.0.mlp.fc1.weight")[0]
    siglip = SiglipVisionConfig(**vision[1], intermediate_size=inner, vision_use_head=False)
    try:
        llama = LlamaConfig(**settings["text_config"])
    except StrictDataclassError as error:
        raise ValueError(f"text_config cannot be read: {reason(error)}") from error
    return Prismatic(Dinov2WithRegistersModel(dino), SiglipVisionModel(siglip), LlamaModel(llama), BINS)


def _source(name: str) -> tuple[str, str]:
    """Published name of a tensor of `Prismatic`, and its third of that tensor: q, k, v, or all ("")."""
    begin = next((each for each in BEGINNINGS if name.startswith(each)), "")
    rest = name.removeprefix(begin)
    part = ""
    if begin.startswith(("dino", "siglip")):
        for own_pattern, timm_name in LAYERS.items():
            rest = re.sub(own_pattern, timm_name, rest)
        if projection := re.search(r"attn\.([qkv])_proj", rest):
            rest = rest.replace(projection[0], "attn.qkv")
            part = projection[1]
    return BEGINNINGS.get(begin, "") + rest, part
