"""Checkpoints of openpi's JAX models: arrays that Orbax wrote, by the names of openpi's converter to PyTorch.

In the folder `params`, `_METADATA` has the tree of names; arrays are in tensorstore's key-value store OCDBT, or each in
a folder of its own, as zarr or zarr3. They are read without JAX, one after the other. Layers are stacked on the leading
axis. Sizes of the model are in no file, since openpi has them in its code: here they are those of the arrays.

Letters of axes: L layers of the language model and of the action expert, N their heads of queries and K of keys, H
width of a head, D and E widths of their hidden states, F and G of their dense layers, T tokens of the vocabulary; B
layers of the vision model, V width of its hidden states, M of its dense layers, Q heads, R width of one, S patches of
P x P pixels; A elements of an action.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied.errors import UserError
from embodied.extras import needs_extra
from embodied.saving.json_text import loads

ARRAYS = "params"
TREE = "_METADATA"
MANIFEST = "manifest.ocdbt"
"""Names of the folder of the arrays, and in it of the tree of names, and of a file of the key-value store OCDBT."""
ROOT = "params."
TRAINED = ".value"
"""Beginning of all names, and the end that flax adds to them in checkpoints of a training."""
FLOATS = {"float64", "float32", "float16", "bfloat16"}
"""Types of weights, by tensorstore's names."""
ADAPTIVE = "time_mlp_in.kernel"
"""Name of an array that only pi0.5 has."""
MULTIPLES = {"p": (1, "P"), "e": (1, "E"), "X": (3, "E"), "Y": (2, "E")}
"""Letters of axes that are multiples of others: scale, shift and gate of adaptive norms; an action and a time."""
STACKED = "LB"
"""Letters of axes on which layers are stacked."""
Stores = dict[str, Any]
"""Tensorstore's arrays by name."""


@dataclass(frozen=True)
class Layout:
    """Axes of an array, and the tensors that are in it for each layer if layers are stacked.

    Several tensors are parts along the next axis. `order` has the letters of a tensor's axes: those of "NH D" are N * H
    and D. A layer's number stands for {} in the names of `tensors`.
    """

    axes: str
    order: str
    tensors: tuple[str, ...]


def is_checkpoint(folder: Path) -> bool:
    """Whether `folder` has arrays of JAX alone: as for openpi, a file model.safetensors is read first."""
    return (folder / ARRAYS / TREE).is_file() and not any(folder.glob("model*.safetensors"))


def model_fields(folder: Path) -> dict[str, Any]:
    """Fields of config.json that the arrays in `folder` determine: pi0 or pi0.5, and sizes by transformers' names.

    Raises:
        UserError: on one line, for arrays that are missing, unexpected, of wrong shapes or damaged.
    """
    stores, adaptive = _stores(folder)
    size = _sizes(folder, stores, _layouts(adaptive))
    heads = {"num_hidden_layers": "L", "num_attention_heads": "N", "num_key_value_heads": "K", "head_dim": "H"}
    reading = heads | {"hidden_size": "D", "intermediate_size": "F", "vocab_size": "T"}
    acting = heads | {"hidden_size": "E", "intermediate_size": "G"}
    seeing = {"hidden_size": "V", "intermediate_size": "M", "num_hidden_layers": "B", "num_attention_heads": "Q"}
    text, expert, vision = ({key: size[axis] for key, axis in part.items()} for part in (reading, acting, seeing))
    vision |= {"patch_size": size["P"], "image_size": math.isqrt(size["S"]) * size["P"], "vision_use_head": False}
    return {
        "pi05": adaptive,
        "action_dim": size["A"],
        "vlm_config": {
            "model_type": "paligemma",
            "text_config": {"model_type": "gemma", **text},
            "vision_config": {"model_type": "siglip_vision_model", **vision},
            "projection_dim": size["D"],
            "image_token_id": size["T"],
        },
        "dit_config": {"model_type": "gemma", **expert},
    }


def tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Tensors in `folder` by the names of openpi's converter, of which those of one array are views of its memory.

    Raises:
        UserError: as `model_fields`.
    """
    stores, adaptive = _stores(folder)
    layouts = _layouts(adaptive)
    _sizes(folder, stores, layouts)
    for name, layout in layouts.items():
        yield from _parts(layout, _read(folder, name, stores.pop(name)))


def _parts(layout: Layout, array: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Tensors in an `array` by name."""
    stacked, split = layout.axes[0] in STACKED, len(layout.tensors) > 1
    axes = layout.axes[stacked + split :]
    for index, layer in enumerate(array if stacked else (array,)):
        for name, part in zip(layout.tensors, layer if split else (layer,), strict=True):
            yield name.format(index), _ordered(part, axes, layout.order)


def _ordered(array: Tensor, axes: str, order: str) -> Tensor:
    """Array of `axes` in another `order`, see `Layout`."""
    groups = order.split()
    sizes = dict(zip(axes, array.shape, strict=True))
    permuted = array.permute([axes.index(axis) for group in groups for axis in group])
    return permuted.reshape([math.prod(sizes[axis] for axis in group) for group in groups])


def _stores(folder: Path) -> tuple[Stores, bool]:
    """Open the arrays in `folder`; returns also whether they are of pi0.5, with adaptive norms.

    Raises:
        UserError: where tensorstore is missing, and for arrays that are missing, unexpected, damaged or no floats.
    """
    with needs_extra("orbax"):
        import tensorstore
    try:
        fields = loads((folder / ARRAYS / TREE).read_text(encoding="utf-8"))
        keys = [
            ".".join(str(part["key"]) for part in node["key_metadata"]) for node in fields["tree_metadata"].values()
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{folder / ARRAYS / TREE} is damaged; download the checkpoint again") from error
    end = TRAINED if all(key.endswith(TRAINED) for key in keys) else ""
    names = {key.removeprefix(ROOT).removesuffix(end): key for key in keys}
    adaptive = ADAPTIVE in names
    _check_names(folder, set(names), set(_layouts(adaptive)), "pi05" if adaptive else "pi0")
    context = tensorstore.Context()
    stores = {}
    for name, key in names.items():
        try:
            stores[name] = tensorstore.open(_spec(folder / ARRAYS, key, fields), context=context, read=True).result()
        except (ValueError, OSError) as error:
            raise _damaged(folder, name, error) from error
        if (kind := stores[name].dtype.name) not in FLOATS:
            raise UserError(f"expected arrays of type {', '.join(sorted(FLOATS))}, got {kind} of {name} in {folder}")
    return stores, adaptive


def _spec(arrays: Path, key: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Tensorstore's description of the array `key` in the folder `arrays`, with the `fields` of its tree."""
    files = {"driver": "file", "path": f"{arrays.resolve()}/"}
    in_store = (arrays / MANIFEST).is_file()
    store = {"driver": "ocdbt", "base": files, "path": f"{key}/"}
    return {
        "driver": "zarr3" if fields.get("use_zarr3") else "zarr",
        "kvstore": store if in_store else files | {"path": f"{files['path']}{key}/"},
        # Orbax writes all chunks since it says so here; before, a chunk of zeros was left out
        "fill_missing_data_reads": not fields.get("store_array_data_equal_to_fill_value"),
    }


def _check_names(folder: Path, names: set[str], expected: set[str], kind: str) -> None:
    advice = "expected the arrays of openpi's pi0 or pi0.5, without adapters"
    if missing := sorted(expected - names):
        raise UserError(f"{folder} lacks {len(missing)} arrays of {kind}, such as {missing[0]}; {advice}")
    if unexpected := sorted(names - expected):
        raise UserError(f"{folder} has {len(unexpected)} unknown arrays for {kind}, such as {unexpected[0]}; {advice}")


def _sizes(folder: Path, stores: Stores, layouts: dict[str, Layout]) -> dict[str, int]:
    """Sizes of all axes by their letters; a digit is its size.

    Raises:
        UserError: for an array whose shape does not fit the others.
    """
    sizes: dict[str, int] = {}
    for name, layout in layouts.items():
        shape = list(stores[name].shape)
        if len(shape) != len(layout.axes):
            raise UserError(f"{folder}: expected {name} of {len(layout.axes)} axes, got the shape {shape}")
        expected = [_expected(axis, size, sizes) for axis, size in zip(layout.axes, shape, strict=True)]
        if shape != expected:
            raise UserError(f"{folder}: expected {name} of shape {expected}, which fits the others, got {shape}")
    return sizes


def _expected(axis: str, size: int, sizes: dict[str, int]) -> int:
    """Size of an `axis` by `sizes`, to which the `size` of an array is added if its letter is new."""
    if axis.isdigit():
        return int(axis)
    factor, base = MULTIPLES.get(axis, (1, axis))
    return factor * sizes.setdefault(base, size)


def _read(folder: Path, name: str, store: Any) -> Tensor:  # noqa: ANN401 - of tensorstore
    try:
        array = store.read().result()
    except (ValueError, OSError) as error:
        raise _damaged(folder, name, error) from error
    if array.dtype.name == "bfloat16":  # a type that torch does not take from numpy
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _damaged(folder: Path, name: str, error: Exception) -> UserError:
    reason = str(error).partition(":")[0]  # tensorstore begins with a code, and goes on for many lines
    return UserError(f"{folder}: the array {name} is damaged, or not whole ({reason}): download the checkpoint again")


def _layouts(adaptive: bool) -> dict[str, Layout]:
    """Layouts of all arrays of pi0, or with `adaptive` norms of pi0.5."""
    model = "paligemma_with_expert.paligemma.model."
    language, expert = f"{model}language_model.", "paligemma_with_expert.gemma_expert.model."
    projected = {"action_in_proj": "AE", "action_out_proj": "EA"}
    if adaptive:
        projected |= {"time_mlp_in": "eE", "time_mlp_out": "eE"}
    else:
        projected |= {"state_proj": "AE", "action_time_mlp_in": "YE", "action_time_mlp_out": "eE"}
    layouts = {"PaliGemma.llm.embedder.input_embedding": Layout("TD", "T D", (f"{language}embed_tokens.weight",))}
    layouts |= _gemma("", language, "D", "F") | _norms("", language, "D")
    layouts |= _gemma("_1", expert, "E", "G") | (_adaptive_norms(expert) if adaptive else _norms("_1", expert, "E"))
    layouts |= _siglip(f"{model}vision_tower.vision_model.")
    layouts |= _dense("PaliGemma.img.head", f"{model}multi_modal_projector.linear", "VD")
    for name, axes in projected.items():
        layouts |= _dense(name, name, axes)
    return layouts


def _dense(array: str, tensor: str, axes: str, stack: str = "") -> dict[str, Layout]:
    """Layouts of a kernel of two `axes`, inputs and outputs, and of its bias, in layers of a `stack`."""
    inputs, outputs = axes
    return {
        f"{array}.kernel": Layout(f"{stack}{inputs}{outputs}", f"{outputs} {inputs}", (f"{tensor}.weight",)),
        f"{array}.bias": Layout(f"{stack}{outputs}", outputs, (f"{tensor}.bias",)),
    }


def _gemma(expert: str, tensor: str, width: str, inner: str) -> dict[str, Layout]:
    """Layouts of attention and dense layers of the language model (`expert` is "") or the action expert ("_1")."""
    attention, dense = "PaliGemma.llm.layers.attn.", f"PaliGemma.llm.layers.mlp{expert}."
    q, k, v, o = (f"{tensor}layers.{{}}.self_attn.{part}_proj.weight" for part in "qkvo")
    gate, up, down = (f"{tensor}layers.{{}}.mlp.{part}_proj.weight" for part in ("gate", "up", "down"))
    return {
        f"{attention}q_einsum{expert}.w": Layout(f"LN{width}H", f"NH {width}", (q,)),
        f"{attention}kv_einsum{expert}.w": Layout(f"L2K{width}H", f"KH {width}", (k, v)),
        f"{attention}attn_vec_einsum{expert}.w": Layout(f"LNH{width}", f"{width} NH", (o,)),
        f"{dense}gating_einsum": Layout(f"L2{width}{inner}", f"{inner} {width}", (gate, up)),
        f"{dense}linear": Layout(f"L{inner}{width}", f"{width} {inner}", (down,)),
    }


def _norms(expert: str, tensor: str, width: str) -> dict[str, Layout]:
    """Layouts of norms of the language model (`expert` is "") or the action expert ("_1")."""
    layers = f"{tensor}layers.{{}}."
    return {
        f"PaliGemma.llm.layers.pre_attention_norm{expert}.scale": Layout(
            f"L{width}", width, (f"{layers}input_layernorm.weight",)
        ),
        f"PaliGemma.llm.layers.pre_ffw_norm{expert}.scale": Layout(
            f"L{width}", width, (f"{layers}post_attention_layernorm.weight",)
        ),
        f"PaliGemma.llm.final_norm{expert}.scale": Layout(width, width, (f"{tensor}norm.weight",)),
    }


def _adaptive_norms(tensor: str) -> dict[str, Layout]:
    """Layouts of adaptive norms of the action expert."""
    layers, arrays = f"{tensor}layers.{{}}.", "PaliGemma.llm.layers."
    return {
        **_dense(f"{arrays}pre_attention_norm_1.Dense_0", f"{layers}input_layernorm.dense", "EX", "L"),
        **_dense(f"{arrays}pre_ffw_norm_1.Dense_0", f"{layers}post_attention_layernorm.dense", "EX", "L"),
        **_dense("PaliGemma.llm.final_norm_1.Dense_0", f"{tensor}norm.dense", "EX"),
    }


def _siglip(tensor: str) -> dict[str, Layout]:
    """Layouts of the vision model."""
    layers, image = f"{tensor}encoder.layers.{{}}.", "PaliGemma.img."
    block = f"{image}Transformer.encoderblock."
    layouts = {
        f"{image}embedding.kernel": Layout("Pp3V", "V 3 P p", (f"{tensor}embeddings.patch_embedding.weight",)),
        f"{image}embedding.bias": Layout("V", "V", (f"{tensor}embeddings.patch_embedding.bias",)),
        f"{image}pos_embedding": Layout("1SV", "1S V", (f"{tensor}embeddings.position_embedding.weight",)),
        f"{block}MultiHeadDotProductAttention_0.out.kernel": Layout(
            "BQRV", "V QR", (f"{layers}self_attn.out_proj.weight",)
        ),
        f"{block}MultiHeadDotProductAttention_0.out.bias": Layout("BV", "V", (f"{layers}self_attn.out_proj.bias",)),
        f"{image}Transformer.encoder_norm.scale": Layout("V", "V", (f"{tensor}post_layernorm.weight",)),
        f"{image}Transformer.encoder_norm.bias": Layout("V", "V", (f"{tensor}post_layernorm.bias",)),
        **_dense(f"{block}MlpBlock_0.Dense_0", f"{layers}mlp.fc1", "VM", "B"),
        **_dense(f"{block}MlpBlock_0.Dense_1", f"{layers}mlp.fc2", "MV", "B"),
    }
    for name in ("query", "key", "value"):
        array, own = f"{block}MultiHeadDotProductAttention_0.{name}", f"{layers}self_attn.{name[0]}_proj"
        layouts[f"{array}.kernel"] = Layout("BVQR", "QR V", (f"{own}.weight",))
        layouts[f"{array}.bias"] = Layout("BQR", "QR", (f"{own}.bias",))
    for number in (0, 1):
        array, own = f"{block}LayerNorm_{number}", f"{layers}layer_norm{number + 1}"
        layouts[f"{array}.scale"] = Layout("BV", "V", (f"{own}.weight",))
        layouts[f"{array}.bias"] = Layout("BV", "V", (f"{own}.bias",))
    return layouts
