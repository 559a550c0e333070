"""SmolVLA as LeRobot publishes it: small files with its names of tensors, and its velocity in plain torch.

Names and shapes of the tensors are those of VLAFlowMatching and SmolVLMWithExpertModel in LeRobot 0.6.2 (commit
7427f31; src/lerobot/policies/smolvla), with SmolVLMForConditionalGeneration of transformers.
tests/policies/lerobot/test_lerobot_itself.py compares with LeRobot's own class, where LeRobot is installed.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.nn.functional import conv2d, gelu, layer_norm, linear, pad, silu
from transformers import PreTrainedTokenizerFast, SmolVLMConfig

SIDE, PATCH, SHUFFLE = 32, 8, 2
SEEING, SEEING_INNER, SEEING_HEADS, SEEING_LAYERS = 16, 24, 2, 2
READING, READING_INNER, VOCABULARY = 32, 48, 40
HEADS, GROUPS, HEAD = 4, 2, 8
LAYERS, KEPT = 5, 4
"""Layers of the language model, and those that SmolVLA keeps."""
ACTING, ACTING_INNER = 24, 256
"""0.75 of the language model's width, and four times two thirds of that, rounded up to 256."""
PADDED, CHUNK, STEPS = 32, 4, 3
STATE, ACTION = ([0.1, 0.2], [0.3, 0.5]), ([1.0, 2.0, 3.0], [0.5, 0.6, 0.7])
WORDS = {"<pad>": 0, "<unk>": 1, "pick": 2, "the": 3, "milk\n": 4, "open\n": 5}
VLM = "vlm"
"""Folder of the vision-language model's configuration, in the policy's folder."""


def shapes() -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors by LeRobot's names."""
    vlm, expert = "model.vlm_with_expert.vlm.model.", "model.vlm_with_expert.lm_expert."
    found: dict[str, tuple[int, ...]] = {
        f"{vlm}vision_model.embeddings.patch_embedding.weight": (SEEING, 3, PATCH, PATCH),
        f"{vlm}vision_model.embeddings.patch_embedding.bias": (SEEING,),
        f"{vlm}vision_model.embeddings.position_embedding.weight": ((SIDE // PATCH) ** 2, SEEING),
        f"{vlm}vision_model.post_layernorm.weight": (SEEING,),
        f"{vlm}vision_model.post_layernorm.bias": (SEEING,),
        f"{vlm}connector.modality_projection.proj.weight": (READING, SEEING * SHUFFLE**2),
        f"{vlm}text_model.embed_tokens.weight": (VOCABULARY, READING),
        f"{vlm}text_model.norm.weight": (READING,),
        "model.vlm_with_expert.vlm.lm_head.weight": (VOCABULARY, READING),
        f"{expert}norm.weight": (ACTING,),
    }
    for index in range(SEEING_LAYERS):
        layer = f"{vlm}vision_model.encoder.layers.{index}."
        dense = {f"self_attn.{name}": (SEEING, SEEING) for name in ("k_proj", "v_proj", "q_proj", "out_proj")}
        dense |= {"mlp.fc1": (SEEING_INNER, SEEING), "mlp.fc2": (SEEING, SEEING_INNER)}
        for name, shape in dense.items():
            found |= {f"{layer}{name}.weight": shape, f"{layer}{name}.bias": shape[:1]}
        for name in ("layer_norm1", "layer_norm2"):
            found |= {f"{layer}{name}.weight": (SEEING,), f"{layer}{name}.bias": (SEEING,)}
    for prefix, width, inner in ((f"{vlm}text_model", READING, READING_INNER), (expert[:-1], ACTING, ACTING_INNER)):
        for index in range(KEPT):
            # keys and values of every second layer of the expert are projected from those of the language model
            read = GROUPS * HEAD if prefix == expert[:-1] and index % 2 else width
            dense = {"self_attn.q_proj": (HEADS * HEAD, width), "self_attn.o_proj": (width, HEADS * HEAD)}
            dense |= {f"self_attn.{name}": (GROUPS * HEAD, read) for name in ("k_proj", "v_proj")}
            dense |= {"mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width), "mlp.down_proj": (width, inner)}
            dense |= {"input_layernorm": (width,), "post_attention_layernorm": (width,)}
            found |= {f"{prefix}.layers.{index}.{name}.weight": shape for name, shape in dense.items()}
    dense = {"state_proj": (READING, PADDED), "action_in_proj": (ACTING, PADDED), "action_out_proj": (PADDED, ACTING)}
    dense |= {"action_time_mlp_in": (ACTING, 2 * ACTING), "action_time_mlp_out": (ACTING, ACTING)}
    for name, shape in dense.items():
        found |= {f"model.{name}.weight": shape, f"model.{name}.bias": shape[:1]}
    return found


def tensors(seed: int = 0) -> dict[str, Tensor]:
    """Random tensors by LeRobot's names."""
    noise = torch.Generator().manual_seed(seed)

    def drawn(name: str, shape: tuple[int, ...]) -> Tensor:
        if "norm" in name and name.endswith("weight"):
            return 1.0 + 0.1 * torch.randn(shape, generator=noise)
        return torch.randn(shape, generator=noise) / math.sqrt(max(1, math.prod(shape[1:])))

    return {name: drawn(name, shape) for name, shape in shapes().items()}


def config(**changes: Any) -> dict[str, Any]:
    """config.json."""
    inputs = {"observation.state": {"type": "STATE", "shape": [2]}}
    inputs |= {f"observation.images.{name}": {"type": "VISUAL", "shape": [3, 16, 24]} for name in ("wrist", "front")}
    return {
        "type": "smolvla",
        "n_obs_steps": 1,
        "input_features": inputs,
        "output_features": {"action": {"type": "ACTION", "shape": [3]}},
        "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"},
        "chunk_size": CHUNK,
        "n_action_steps": CHUNK,
        "max_state_dim": PADDED,
        "max_action_dim": PADDED,
        "resize_imgs_with_padding": [SIDE, SIDE],
        "empty_cameras": 0,
        "adapt_to_pi_aloha": False,
        "use_delta_joint_actions_aloha": False,
        "tokenizer_max_length": 48,
        "num_steps": STEPS,
        "vlm_model_name": VLM,
        "add_image_special_tokens": False,
        "attention_mode": "cross_attn",
        "prefix_length": -1,
        "pad_language_to": "longest",
        "num_expert_layers": -1,
        "num_vlm_layers": KEPT,
        "self_attn_every_n_layers": 2,
        "expert_width_multiplier": 0.75,
        "min_period": 0.004,
        "max_period": 4.0,
    } | changes


def vlm_config(dtype: str = "bfloat16") -> SmolVLMConfig:
    """A small SmolVLM2, whose rotary embedding has another wavelength than SmolVLA's."""
    text = {"model_type": "llama", "hidden_size": READING, "intermediate_size": READING_INNER, "head_dim": HEAD}
    text |= {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": GROUPS}
    text |= {"vocab_size": VOCABULARY, "rms_norm_eps": 1e-5, "pad_token_id": 0, "max_position_embeddings": 512}
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0}}
    seeing = {"hidden_size": SEEING, "intermediate_size": SEEING_INNER, "num_hidden_layers": SEEING_LAYERS}
    seeing |= {"num_attention_heads": SEEING_HEADS, "image_size": SIDE, "patch_size": PATCH}
    stored = {"dtype": dtype}  # bfloat16 is SmolVLM2's
    return SmolVLMConfig(text_config=text | stored, vision_config=seeing | stored, scale_factor=SHUFFLE, **stored)


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer without a beginning, as SmolVLM2's."""
    words = Tokenizer(models.WordLevel(WORDS, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", unk_token="<unk>")


def statistics() -> dict[str, Tensor]:
    """Statistics of state and action, by LeRobot's names."""
    pairs = (("observation.state", STATE), ("action", ACTION))
    return {
        f"{key}.{name}": torch.tensor(value)
        for key, pair in pairs
        for name, value in zip(("mean", "std"), pair, strict=True)
    }


def save(folder: Path, *, earlier: bool = False, **changes: Any) -> Path:
    """Write a folder `pretrained_model`, as releases of LeRobot `earlier` than 0.4 or later."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(**changes)))
    stored = tensors()
    if earlier:
        state, action = ([torch.tensor(each) for each in pair] for pair in (STATE, ACTION))
        for name, value in zip(("mean", "std"), state, strict=True):
            stored[f"normalize_inputs.buffer_observation_state.{name}"] = value
        for part in ("normalize_targets", "unnormalize_outputs"):
            stored |= {
                f"{part}.buffer_action.{name}": value.clone()
                for name, value in zip(("mean", "std"), action, strict=True)
            }
    else:
        save_file(statistics(), folder / "policy_preprocessor_step_5_normalizer_processor.safetensors")
        steps = [{"registry_name": "normalizer_processor", "config": {"norm_map": config()["normalization_mapping"]}}]
        (folder / "policy_preprocessor.json").write_text(json.dumps({"name": "policy_preprocessor", "steps": steps}))
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    vlm_config().save_pretrained(folder / VLM)
    tokenizer().save_pretrained(folder / VLM)
    return folder


def velocity(
    weights: dict[str, Tensor], pictures: Tensor, tokens: list[int], state: Tensor, x: Tensor, time: float
) -> Tensor:
    """Velocity [CHUNK, PADDED] of one observation, from everything at once, as LeRobot computes its loss.

    Pictures are [C, 3, SIDE, SIDE] in [-1, 1], `state` [PADDED], `x` [CHUNK, PADDED].
    """
    own = {name.removeprefix("model."): value for name, value in weights.items()}

    def dense(name: str, value: Tensor) -> Tensor:
        return linear(value, own[f"{name}.weight"], own.get(f"{name}.bias"))

    def norm(name: str, value: Tensor) -> Tensor:
        return value / (value.square().mean(-1, keepdim=True) + 1e-5).sqrt() * own[f"{name}.weight"]

    def rotated(value: Tensor, places: list[int]) -> Tensor:
        turned = value.clone()
        for row, place in enumerate(places):
            for i in range(HEAD // 2):
                angle = place / 10_000 ** (2 * i / HEAD)
                first, second = value[row, :, i], value[row, :, i + HEAD // 2]
                turned[row, :, i] = first * math.cos(angle) - second * math.sin(angle)
                turned[row, :, i + HEAD // 2] = second * math.cos(angle) + first * math.sin(angle)
        return turned

    def attended(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        rows = []
        for head in range(HEADS):
            group = head // (HEADS // GROUPS)
            scores = queries[:, head] @ keys[:, group].T / math.sqrt(HEAD)
            rows.append(scores.masked_fill(~mask, -torch.inf).softmax(-1) @ values[:, group])
        return torch.cat(rows, -1)

    def heads(name: str, value: Tensor) -> Tensor:
        return dense(name, value).unflatten(-1, (-1, HEAD))

    def mixed(layer: str, hidden: Tensor, attention: Tensor) -> Tensor:
        hidden = hidden + dense(f"{layer}.self_attn.o_proj", attention)
        read = norm(f"{layer}.post_attention_layernorm", hidden)
        inner = silu(dense(f"{layer}.mlp.gate_proj", read)) * dense(f"{layer}.mlp.up_proj", read)
        return hidden + dense(f"{layer}.mlp.down_proj", inner)

    vlm, expert = "vlm_with_expert.vlm.model", "vlm_with_expert.lm_expert"
    seen = torch.cat([_seen(own, picture) for picture in pictures])
    words = own[f"{vlm}.text_model.embed_tokens.weight"][tokens]
    prefix = torch.cat((torch.cat((seen, words)) * math.sqrt(READING), dense("state_proj", state)[None]))
    times = [2 * math.pi * time / (0.004 * (4.0 / 0.004) ** (i / (ACTING // 2 - 1))) for i in range(ACTING // 2)]
    angles = torch.tensor(times, dtype=torch.float64)
    embedded = torch.cat((angles.sin(), angles.cos())).float().expand(CHUNK, -1)
    suffix = torch.cat((dense("action_in_proj", x), embedded), -1)
    suffix = dense("action_time_mlp_out", silu(dense("action_time_mlp_in", suffix)))
    count = len(prefix)
    mask = visible(count, CHUNK)
    places = list(range(count + CHUNK))
    for index in range(KEPT):
        layers = f"{vlm}.text_model.layers.{index}", f"{expert}.layers.{index}"
        normed = [
            norm(f"{layer}.input_layernorm", value) for layer, value in zip(layers, (prefix, suffix), strict=True)
        ]
        own_heads = [heads(f"{layers[0]}.self_attn.{name}_proj", normed[0]) for name in "qkv"]
        queries, keys = (rotated(each, places[:count]) for each in own_heads[:2])
        read = attended(queries, keys, own_heads[2], mask[:count, :count])
        if index % 2:
            projected = [
                heads(f"{layers[1]}.self_attn.{name}_proj", each.flatten(1))
                for name, each in (("k", keys), ("v", own_heads[2]))
            ]
            acting = rotated(heads(f"{layers[1]}.self_attn.q_proj", normed[1]), list(range(CHUNK)))
            acted = attended(acting, *projected, mask[count:, :count])
        else:
            acting, new_keys, new_values = (heads(f"{layers[1]}.self_attn.{name}_proj", normed[1]) for name in "qkv")
            acting, new_keys = (rotated(each, places[count:]) for each in (acting, new_keys))
            both = torch.cat((keys, new_keys)), torch.cat((own_heads[2], new_values))
            acted = attended(acting, *both, mask[count:])
        prefix, suffix = mixed(layers[0], prefix, read), mixed(layers[1], suffix, acted)
    return dense("action_out_proj", norm(f"{expert}.norm", suffix))


def visible(prefix: int, count: int) -> Tensor:
    """Which of the `prefix` and `count` action tokens [T, T] each attends to: blocks of words, state, and actions."""
    block = [0] * (prefix - 1) + [1] + [2 + action for action in range(count)]
    mask = torch.zeros(len(block), len(block), dtype=torch.bool)
    for row, own in enumerate(block):
        for column, other in enumerate(block):
            mask[row, column] = other <= own
    return mask


def _seen(own: dict[str, Tensor], picture: Tensor) -> Tensor:
    """Tokens [4, READING] of a picture [3, SIDE, SIDE], before they are scaled."""
    vlm = "vlm_with_expert.vlm.model"
    name, side = f"{vlm}.vision_model", SIDE // PATCH

    def dense(part: str, value: Tensor) -> Tensor:
        return linear(value, own[f"{part}.weight"], own[f"{part}.bias"])

    def normed(part: str, value: Tensor) -> Tensor:
        return layer_norm(value, (SEEING,), own[f"{part}.weight"], own[f"{part}.bias"], 1e-6)

    patch = f"{name}.embeddings.patch_embedding"
    hidden = conv2d(picture[None], own[f"{patch}.weight"], own[f"{patch}.bias"], stride=PATCH)[0].flatten(1).T
    hidden = hidden + own[f"{name}.embeddings.position_embedding.weight"]
    for index in range(SEEING_LAYERS):
        layer = f"{name}.encoder.layers.{index}"
        read = normed(f"{layer}.layer_norm1", hidden)
        q, k, v = (dense(f"{layer}.self_attn.{each}_proj", read).chunk(SEEING_HEADS, -1) for each in "qkv")
        parts = [(a @ b.T / math.sqrt(a.shape[-1])).softmax(-1) @ c for a, b, c in zip(q, k, v, strict=True)]
        hidden = hidden + dense(f"{layer}.self_attn.out_proj", torch.cat(parts, -1))
        read = dense(f"{layer}.mlp.fc1", normed(f"{layer}.layer_norm2", hidden))
        hidden = hidden + dense(f"{layer}.mlp.fc2", gelu(read, approximate="tanh"))
    grid = normed(f"{name}.post_layernorm", hidden).view(side, side, SEEING)
    tokens = [
        torch.cat([grid[SHUFFLE * row + i, SHUFFLE * column + j] for i in range(SHUFFLE) for j in range(SHUFFLE)])
        for row in range(side // SHUFFLE)
        for column in range(side // SHUFFLE)
    ]
    return torch.stack(tokens) @ own[f"{vlm}.connector.modality_projection.proj.weight"].T


def padded(state: Tensor) -> Tensor:
    """Normalised states [N, PADDED], from states [N, 2]."""
    return pad((state - torch.tensor(STATE[0])) / torch.tensor(STATE[1]), (0, PADDED - 2))
