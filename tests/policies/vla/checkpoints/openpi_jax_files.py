"""Writes small checkpoints by tensorstore, with the names and the layout that openpi's have by Orbax 0.11.13."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import tensorstore
from torch import nn

LLM, IMG = "PaliGemma.llm.", "PaliGemma.img."
LAYERS, BLOCK = f"{LLM}layers.", f"{IMG}Transformer.encoderblock."
ATTENTION = f"{BLOCK}MultiHeadDotProductAttention_0."
CODES = {"float32": "<f4", "bfloat16": "bfloat16", "int32": "<i4"}
"""Names of types in zarr's headers."""


def write(
    folder: Path, arrays: Mapping[str, np.ndarray | tuple[int, ...]], *, end: str = "", ocdbt: bool = True
) -> None:
    """Write `arrays` as Orbax writes openpi's parameters; only the header of an array that is only a shape."""
    base = folder / "params"
    shutil.rmtree(base, ignore_errors=True)
    tree = {}
    context, transaction = tensorstore.Context({"file_io_sync": False}), tensorstore.Transaction()
    for name, array in arrays.items():
        key = f"params.{name}{end}"
        files = {"driver": "file", "path": f"{base}/"}
        shape = list(array) if isinstance(array, tuple) else list(array.shape)
        kind = "float32" if isinstance(array, tuple) else array.dtype.name
        header = {"shape": shape, "chunks": shape, "dtype": CODES[kind], "compressor": {"id": "zstd", "level": 1}}
        apart = {"driver": "file", "path": f"{base}/{key}/"}
        spec = {
            "driver": "zarr",
            "kvstore": {"driver": "ocdbt", "base": files, "path": f"{key}/"} if ocdbt else apart,
            "metadata": {**header, "dimension_separator": ".", "fill_value": None},
            "store_data_equal_to_fill_value": True,
        }
        store = tensorstore.open(spec, create=True, context=context, transaction=transaction).result()
        if not isinstance(array, tuple):
            store.write(array).result()
        path = key.split(".")
        tree[str(tuple(path))] = {
            "key_metadata": [{"key": part, "key_type": 2} for part in path],
            "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False, "write_shape": shape},
        }
    transaction.commit_async().result()
    fields = {"use_zarr3": False, "store_array_data_equal_to_fill_value": True, "custom_metadata": None}
    (base / "_METADATA").write_text(json.dumps({"tree_metadata": tree, **fields}))


def arrays_of(native: nn.Module, kind: str) -> dict[str, np.ndarray]:
    """Arrays that openpi would have of our model, in float32."""
    weights = {name: value.numpy() for name, value in native.state_dict().items()}
    config = native.config
    arrays: dict[str, np.ndarray] = {}

    def stack(name: str, count: int, change: Callable[[np.ndarray], np.ndarray] = np.transpose) -> np.ndarray:
        return np.stack([change(weights[name.format(index)]) for index in range(count)])

    def dense(array: str, own: str, count: int = 0) -> None:
        arrays[f"{array}.kernel"] = stack(f"{own}.weight", count) if count else weights[f"{own}.weight"].T
        arrays[f"{array}.bias"] = stack(f"{own}.bias", count) if count else weights[f"{own}.bias"]

    language, vision = "model.vlm.language_model.", "model.vlm.vision_tower."
    for expert, own, sizes in (("", language, config.vlm_config.text_config), ("_1", "model.dit.", config.dit_config)):
        count, head = sizes.num_hidden_layers, sizes.head_dim
        layer = own + "layers.{}."
        rows = lambda x, head=head: x.reshape(-1, head, x.shape[1]).transpose(0, 2, 1)  # noqa: E731
        columns = lambda x, head=head: x.T.reshape(-1, head, x.shape[0])  # noqa: E731
        arrays[f"{LAYERS}attn.q_einsum{expert}.w"] = stack(f"{layer}self_attn.q_proj.weight", count, rows)
        arrays[f"{LAYERS}attn.kv_einsum{expert}.w"] = np.stack(
            [stack(f"{layer}self_attn.{part}_proj.weight", count, rows) for part in "kv"], 1
        )
        arrays[f"{LAYERS}attn.attn_vec_einsum{expert}.w"] = stack(f"{layer}self_attn.o_proj.weight", count, columns)
        arrays[f"{LAYERS}mlp{expert}.gating_einsum"] = np.stack(
            [stack(f"{layer}mlp.{part}_proj.weight", count) for part in ("gate", "up")], 1
        )
        arrays[f"{LAYERS}mlp{expert}.linear"] = stack(f"{layer}mlp.down_proj.weight", count)
        norms = {"pre_attention_norm": "input_layernorm", "pre_ffw_norm": "post_attention_layernorm"}
        last = "final_norm" if expert and kind == "pi05" else f"{own}norm"
        if expert and kind == "pi05":
            for array, name in norms.items():
                dense(f"{LAYERS}{array}_1.Dense_0", f"{layer}{name}.dense", count)
            dense(f"{LLM}final_norm_1.Dense_0", f"{last}.dense")
            continue
        for array, name in norms.items():
            arrays[f"{LAYERS}{array}{expert}.scale"] = stack(f"{layer}{name}.weight", count)
        arrays[f"{LLM}final_norm{expert}.scale"] = weights[f"{last}.weight"]
    arrays[f"{LLM}embedder.input_embedding"] = weights[f"{language}embed_tokens.weight"]
    count, heads = (
        config.vlm_config.vision_config.num_hidden_layers,
        config.vlm_config.vision_config.num_attention_heads,
    )
    layer = vision + "encoder.layers.{}."
    for name in ("query", "key", "value"):
        part = f"{layer}self_attn.{name[0]}_proj."
        arrays[f"{ATTENTION}{name}.kernel"] = stack(f"{part}weight", count, lambda x: x.T.reshape(len(x), heads, -1))
        arrays[f"{ATTENTION}{name}.bias"] = stack(f"{part}bias", count, lambda x: x.reshape(heads, -1))
    out = f"{layer}self_attn.out_proj."
    arrays[f"{ATTENTION}out.kernel"] = stack(f"{out}weight", count, lambda x: x.T.reshape(heads, -1, len(x)))
    arrays[f"{ATTENTION}out.bias"] = stack(f"{out}bias", count)
    for number in (0, 1):
        dense(f"{BLOCK}MlpBlock_0.Dense_{number}", f"{layer}mlp.fc{number + 1}", count)
        for part, own in (("scale", "weight"), ("bias", "bias")):
            arrays[f"{BLOCK}LayerNorm_{number}.{part}"] = stack(f"{layer}layer_norm{number + 1}.{own}", count)
            arrays[f"{IMG}Transformer.encoder_norm.{part}"] = weights[f"{vision}post_layernorm.{own}"]
    arrays[f"{IMG}embedding.kernel"] = weights[f"{vision}embeddings.patch_embedding.weight"].transpose(2, 3, 1, 0)
    arrays[f"{IMG}embedding.bias"] = weights[f"{vision}embeddings.patch_embedding.bias"]
    arrays[f"{IMG}pos_embedding"] = weights[f"{vision}embeddings.position_embedding.weight"][None]
    dense(f"{IMG}head", "model.vlm.multi_modal_projector.linear")
    dense("action_out_proj", "action_out_proj")
    embedding = "time_mlp_in time_mlp_out" if kind == "pi05" else "state_proj action_time_mlp_in action_time_mlp_out"
    for name in ("action_in_proj", *embedding.split()):
        dense(name, f"embed_action_time.{name}")
    return arrays
