"""A tiny OpenVLA or OpenVLA-OFT in its published layout, and an independent computation of it, in plain torch.

Everything is computed from tensors by their published names: DINOv2 and SigLIP as timm 0.9 computes them, Llama as its
paper says, and the order of tokens as github.com/moojink/openvla-oft has it. Nothing here knows of transformers.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from torch.nn import functional as F

Weights = dict[str, torch.Tensor]
DINO, SIGLIP, LLAMA = "vision_backbone.featurizer.", "vision_backbone.fused_featurizer.", "language_model.model."
SIDE, PATCH, HEADS, WIDTH, DEPTH, REGISTERS = 28, 14, 16, 64, 3, 4
SIGLIP_WIDTH, SIGLIP_INNER, SIGLIP_DEPTH = 48, 86, 4
TEXT = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
WORDS = ("<unk>", "<s>", "</s>", "▁", "In", ":", "What", "action", "should", "the", "robot", "take", "to", "?", "Out")
WORDS = (*WORDS, "pick", "milk", "open", "\n")
TOKENS, PADDED = len(WORDS) + 256, 64
"""Entries of the vocabulary, whose last 256 are bins, and what follows them."""
KEY = "libero_spatial_no_noops"
ACTION = {"q01": [-0.5, -1.0, 0.0], "q99": [0.75, 1.5, 1.0], "mask": [True, True, False]}
PROPRIO = {"q01": [0.2, 0.1], "q99": [0.9, 0.8]}
MEANS = [[0.484375, 0.455078125, 0.40625], [0.5, 0.5, 0.5]]
DEVIATIONS = [[0.228515625, 0.2236328125, 0.224609375], [0.5, 0.5, 0.5]]
ACTIONS, CHUNK = 3, 4


def weights() -> Weights:
    """Random tensors under the published names, those that nothing reads too, in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    found: Weights = {}

    def add(name: str, *shape: int, about: float = 0.0, spread: float | None = None) -> None:
        spread = spread if spread is not None else 1.0 / math.sqrt(math.prod(shape[1:]) or 1)
        found[name] = (about + spread * torch.randn(shape, generator=generator)).bfloat16()

    def dense(name: str, inputs: int, outputs: int, bias: bool = True) -> None:
        add(f"{name}.weight", outputs, inputs)
        if bias:
            add(f"{name}.bias", outputs, spread=0.2)

    def norm(name: str, width: int, bias: bool = True) -> None:
        add(f"{name}.weight", width, about=1.0, spread=0.2)
        if bias:
            add(f"{name}.bias", width, spread=0.2)

    def transformer(begin: str, width: int, inner: int, depth: int, scaled: bool) -> None:
        add(f"{begin}pos_embed", 1, (SIDE // PATCH) ** 2, width, spread=0.3)
        add(f"{begin}patch_embed.proj.weight", width, 3, PATCH, PATCH)
        add(f"{begin}patch_embed.proj.bias", width, spread=0.2)
        for block in (f"{begin}blocks.{layer}." for layer in range(depth)):
            norm(f"{block}norm1", width)
            dense(f"{block}attn.qkv", width, 3 * width)
            dense(f"{block}attn.proj", width, width)
            norm(f"{block}norm2", width)
            dense(f"{block}mlp.fc1", width, inner)
            dense(f"{block}mlp.fc2", inner, width)
            for scale in ("ls1", "ls2") if scaled else ():
                add(f"{block}{scale}.scale_factor", width, about=0.7, spread=0.2)
        norm(f"{begin}norm", width)

    transformer(DINO, WIDTH, 4 * WIDTH, DEPTH, scaled=True)
    add(f"{DINO}cls_token", 1, 1, WIDTH, spread=0.5)
    add(f"{DINO}reg_token", 1, REGISTERS, WIDTH, spread=0.5)
    transformer(SIGLIP, SIGLIP_WIDTH, SIGLIP_INNER, SIGLIP_DEPTH, scaled=False)
    add(f"{SIGLIP}attn_pool.latent", 1, 1, SIGLIP_WIDTH)
    seen, width = WIDTH + SIGLIP_WIDTH, TEXT["hidden_size"]
    dense("projector.fc1", seen, 4 * seen)
    dense("projector.fc2", 4 * seen, width)
    dense("projector.fc3", width, width)
    add(f"{LLAMA}embed_tokens.weight", TOKENS + PADDED, width, spread=1.0)
    for layer in (f"{LLAMA}layers.{number}." for number in range(TEXT["num_hidden_layers"])):
        for name in "qkvo":
            dense(f"{layer}self_attn.{name}_proj", width, width, bias=False)
        dense(f"{layer}mlp.gate_proj", width, TEXT["intermediate_size"], bias=False)
        dense(f"{layer}mlp.up_proj", width, TEXT["intermediate_size"], bias=False)
        dense(f"{layer}mlp.down_proj", TEXT["intermediate_size"], width, bias=False)
        norm(f"{layer}input_layernorm", width, bias=False)
        norm(f"{layer}post_attention_layernorm", width, bias=False)
    norm(f"{LLAMA}norm", width, bias=False)
    add("language_model.lm_head.weight", TOKENS + PADDED, width, spread=0.5)
    return found


def parts() -> dict[str, Weights]:
    """Random tensors of OFT's two .pt files, as distributed training names them."""
    generator, width = torch.Generator().manual_seed(1), TEXT["hidden_size"]

    def dense(inputs: int, outputs: int) -> tuple[torch.Tensor, torch.Tensor]:
        weight = torch.randn(outputs, inputs, generator=generator) / math.sqrt(inputs)
        return weight, 0.2 * torch.randn(outputs, generator=generator)

    def norm(inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
        return 1.0 + 0.2 * torch.randn(inputs, generator=generator), 0.2 * torch.randn(inputs, generator=generator)

    def named(begin: str, layers: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> Weights:
        return {
            f"{begin}{name}.{kind}": value
            for name, pair in layers.items()
            for kind, value in zip(("weight", "bias"), pair, strict=True)
        }

    head = {
        "layer_norm1": norm(ACTIONS * width),
        "fc1": dense(ACTIONS * width, width),
        "mlp_resnet_blocks.0.ffn.0": norm(width),
        "mlp_resnet_blocks.0.ffn.1": dense(width, width),
        "mlp_resnet_blocks.1.ffn.0": norm(width),
        "mlp_resnet_blocks.1.ffn.1": dense(width, width),
        "layer_norm2": norm(width),
        "fc2": dense(width, ACTIONS),
    }
    proprio = {"fc1": dense(len(PROPRIO["q01"]), width), "fc2": dense(width, width)}
    return {"proprio_projector": named("module.", proprio), "action_head": named("module.model.", head)}


def config() -> dict[str, Any]:
    return {
        "model_type": "openvla",
        "architectures": ["OpenVLAForActionPrediction"],
        "n_action_bins": 256,
        "timm_model_ids": ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"],
        "timm_override_act_layers": [None, None],
        "image_sizes": [SIDE, SIDE],
        "use_fused_vision_backbone": True,
        "image_resize_strategy": "resize-naive",
        "pad_to_multiple_of": PADDED,
        "pad_token_id": TOKENS,
        "norm_stats": {"bridge_orig": {"action": ACTION}, "fractal": {"action": ACTION}},
        "text_config": TEXT | {"model_type": "llama", "vocab_size": TOKENS + PADDED, "torch_dtype": "bfloat16"},
    }


def tokenizer() -> Tokenizer:
    vocabulary = dict.fromkeys(WORDS) | dict.fromkeys(f"bin{number}" for number in range(256))
    found = Tokenizer(models.WordLevel({word: number for number, word in enumerate(vocabulary)}, "<unk>"))
    found.normalizer = normalizers.Replace(Regex(" +"), " ")
    splits = [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.Split(Regex(r"[:?\n]"), "isolated")]
    found.pre_tokenizer = pre_tokenizers.Sequence(splits)
    return found


def save(folder: Path, *, proprio: bool = True, head: bool = False) -> None:
    """A folder as OpenVLA-OFT's training leaves it: two shards, an index, statistics, tokenizer and .pt files."""
    tensors = weights()
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, inside in shards.items():
        save_file({name: tensors[name] for name in inside}, folder / file, {"format": "pt"})
    index = {name: file for file, inside in shards.items() for name in inside}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / "config.json").write_text(json.dumps(config()))
    colours = [{"inplace": False, "mean": m, "std": d} for m, d in zip(MEANS, DEVIATIONS, strict=True)]
    processor = {"image_processor_type": "PrismaticImageProcessor", "tvf_normalize_params": colours}
    processor |= {"means": [[0.485, 0.456, 0.406], [0.5] * 3], "stds": [[0.229, 0.224, 0.225], [0.5] * 3]}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    said = {KEY: {"action": ACTION, "proprio": PROPRIO, "num_transitions": 52970}}
    (folder / "dataset_statistics.json").write_text(json.dumps(said))
    tokenizer().save(str(folder / "tokenizer.json"))
    for name, wanted in (("proprio_projector", proprio), ("action_head", head)):
        if wanted:
            torch.save(parts()[name], folder / f"{name}--150000_checkpoint.pt")


def hidden(
    tensors: Weights, pictures: list[torch.Tensor], prompt: list[int], proprio: np.ndarray | None
) -> torch.Tensor:
    """Hidden states [CHUNK * ACTIONS, width] of one observation, which the chunk is read off.

    Of `pictures` [SIDE, SIDE, 3] from 0 to 1, tokens of the prompt without the beginning, and the robot's state.
    """
    before = _embedded_context(tensors, pictures, prompt, proprio)
    embeddings = tensors[f"{LLAMA}embed_tokens.weight"].float()
    empty = torch.zeros(CHUNK * ACTIONS, embeddings.shape[1])
    read = _llama_states(tensors, torch.cat((before, empty, embeddings[[2]])))
    # from the last token of the prompt on, which predicts the first element
    return read[len(before) - 1 : len(before) - 1 + CHUNK * ACTIONS]


def written_bins(
    tensors: Weights, pictures: list[torch.Tensor], prompt: list[int], elements: int
) -> tuple[list[int], Any]:
    """The likeliest bins of OpenVLA's elements, one after the other, and the scores [elements, 256] of them."""
    first, embeddings = TOKENS - 256, tensors[f"{LLAMA}embed_tokens.weight"].float()
    sequence = _embedded_context(tensors, pictures, prompt, None)
    chosen: list[int] = []
    rated = []
    for _ in range(elements):
        rated.append(scores(tensors, _llama_states(tensors, sequence, causal=True)[-1])[first:TOKENS])
        chosen.append(int(rated[-1].argmax()))
        sequence = torch.cat((sequence, embeddings[[first + chosen[-1]]]))
    return chosen, torch.stack(rated)


def _embedded_context(
    tensors: Weights, pictures: list[torch.Tensor], prompt: list[int], proprio: np.ndarray | None
) -> Any:
    """Embedded beginning, patches, state and prompt."""
    tensors = {name: value.float() for name, value in tensors.items()}
    embeddings = tensors[f"{LLAMA}embed_tokens.weight"]
    patches = torch.cat([_projected(tensors, _seen(tensors, picture)) for picture in pictures])
    if proprio is not None:
        first, last = np.array(PROPRIO["q01"]), np.array(PROPRIO["q99"])
        scaled = np.clip(2 * (proprio - first) / (last - first + 1e-8) - 1, -1.0, 1.0)
        layers = {name.removeprefix("module."): value for name, value in parts()["proprio_projector"].items()}
        token = _dense(layers, "fc2", F.gelu(_dense(layers, "fc1", torch.tensor(scaled).float())))
        patches = torch.cat((patches, token[None]))
    return torch.cat((embeddings[[1]], patches, embeddings[prompt]))


def scores(tensors: Weights, read: torch.Tensor) -> torch.Tensor:
    """Logits [CHUNK * ACTIONS, vocabulary] of hidden states."""
    return read @ tensors["language_model.lm_head.weight"].float().T


def from_tokens(tokens: np.ndarray) -> np.ndarray:
    """Normalised actions [N, ACTIONS] of tokens [N * ACTIONS], from OpenVLA's 255 centres."""
    edges = np.linspace(-1, 1, 256)
    middle = (edges[:-1] + edges[1:]) / 2.0
    return middle[np.clip(TOKENS - tokens - 1, 0, 254)].reshape(-1, ACTIONS)


def from_head(read: torch.Tensor) -> np.ndarray:
    """Normalised actions [CHUNK, ACTIONS] of hidden states, by L1 regression."""
    layers = {name.removeprefix("module.model."): value for name, value in parts()["action_head"].items()}
    x = F.relu(_dense(layers, "fc1", _norm(layers, "layer_norm1", read.reshape(CHUNK, -1), 1e-5)))
    for block in ("mlp_resnet_blocks.0.ffn.", "mlp_resnet_blocks.1.ffn."):
        x = x + F.relu(_dense(layers, f"{block}1", _norm(layers, f"{block}0", x, 1e-5)))
    return _dense(layers, "fc2", _norm(layers, "layer_norm2", x, 1e-5)).numpy()


def to_robot(normalised: np.ndarray) -> np.ndarray:
    """Actions [CHUNK, ACTIONS] as the published evaluation sends them to LIBERO, whose gripper opens at -1."""
    low, high = np.array(ACTION["q01"]), np.array(ACTION["q99"])
    found = np.where(ACTION["mask"], 0.5 * (normalised + 1) * (high - low + 1e-8) + low, normalised)
    found[:, -1] = -np.sign(2.0 * found[:, -1] - 1.0)
    return found


def prepared(picture: np.ndarray) -> np.ndarray:
    """A picture [SIDE, SIDE, 3], uint8, resized by Lanczos and cropped to the middle 90% by bilinear interpolation."""
    resized = picture if picture.shape[:2] == (SIDE, SIDE) else _resized(picture)
    share, last = math.sqrt(0.9), SIDE - 1
    places = (1.0 - share) / 2.0 * last + np.arange(SIDE) * share * last / (SIDE - 1)
    low = np.floor(places).astype(int)
    part, high = places - low, np.minimum(low + 1, last)
    tall = resized[low] * (1.0 - part)[:, None, None] + resized[high] * part[:, None, None]
    wide = tall[:, low] * (1.0 - part)[None, :, None] + tall[:, high] * part[None, :, None]
    return np.floor(wide / 255.0 * 255.5)


def _resized(picture: np.ndarray) -> np.ndarray:
    """By real numbers, rounded at the end, as TensorFlow does; PIL rounds pictures of integers in between, too."""
    channels = [Image.fromarray(channel.astype(np.float32)) for channel in picture.transpose(2, 0, 1)]
    resized = [np.asarray(channel.resize((SIDE, SIDE), Image.Resampling.LANCZOS)) for channel in channels]
    return np.stack(resized, -1).astype(float).round().clip(0.0, 255.0)


def _seen(tensors: Weights, picture: torch.Tensor) -> torch.Tensor:
    """Features of patches [patches, WIDTH + SIGLIP_WIDTH]."""
    shares = picture.permute(2, 0, 1)
    first, second = (
        (shares - torch.tensor(mean)[:, None, None]) / torch.tensor(deviation)[:, None, None]
        for mean, deviation in zip(MEANS, DEVIATIONS, strict=True)
    )
    dino = _transformer(tensors, DINO, first, DEPTH)[1 + REGISTERS :]
    return torch.cat((dino, _transformer(tensors, SIGLIP, second, SIGLIP_DEPTH)), -1)


def _transformer(tensors: Weights, begin: str, picture: torch.Tensor, depth: int) -> torch.Tensor:
    """Output of the second-to-last block, without a last norm, of a picture [3, SIDE, SIDE]."""
    x = F.conv2d(
        picture[None], tensors[f"{begin}patch_embed.proj.weight"], tensors[f"{begin}patch_embed.proj.bias"], PATCH
    )
    x = x[0].flatten(1).T + tensors[f"{begin}pos_embed"][0]
    if begin == DINO:
        x = torch.cat((tensors[f"{begin}cls_token"][0], tensors[f"{begin}reg_token"][0], x))
    for block in (f"{begin}blocks.{layer}." for layer in range(depth - 1)):
        first, second = (tensors.get(f"{block}{name}.scale_factor", torch.ones(())) for name in ("ls1", "ls2"))
        y = _dense(tensors, f"{block}attn.qkv", _norm(tensors, f"{block}norm1", x, 1e-6))
        y = _attention(*y.reshape(len(x), 3, HEADS, -1).permute(1, 2, 0, 3))
        x = x + first * _dense(tensors, f"{block}attn.proj", y)
        y = _dense(tensors, f"{block}mlp.fc1", _norm(tensors, f"{block}norm2", x, 1e-6))
        x = x + second * _dense(tensors, f"{block}mlp.fc2", F.gelu(y))
    return x


def _projected(tensors: Weights, seen: torch.Tensor) -> torch.Tensor:
    x = F.gelu(_dense(tensors, "projector.fc1", seen))
    return _dense(tensors, "projector.fc3", F.gelu(_dense(tensors, "projector.fc2", x)))


def _llama_states(tensors: Weights, x: torch.Tensor, *, causal: bool = False) -> torch.Tensor:
    """Last hidden states of embedded tokens [L, width], all attending to all, or to those before."""
    tensors = {name: value.float() for name, value in tensors.items()}
    heads = TEXT["num_attention_heads"]
    size = x.shape[1] // heads
    angles = torch.arange(len(x))[:, None] / 10000.0 ** (torch.arange(0, size, 2) / size)

    def turned(of: torch.Tensor) -> torch.Tensor:
        first, second = of[..., : size // 2], of[..., size // 2 :]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def rms(name: str, of: torch.Tensor) -> torch.Tensor:
        return of / (of.square().mean(-1, keepdim=True) + 1e-6).sqrt() * tensors[f"{name}.weight"]

    for layer in (f"{LLAMA}layers.{number}." for number in range(TEXT["num_hidden_layers"])):
        y = rms(f"{layer}input_layernorm", x)
        q, k, v = (
            (y @ tensors[f"{layer}self_attn.{name}_proj.weight"].T).reshape(len(x), heads, size).transpose(0, 1)
            for name in "qkv"
        )
        x = x + _attention(turned(q), turned(k), v, causal=causal) @ tensors[f"{layer}self_attn.o_proj.weight"].T
        y = rms(f"{layer}post_attention_layernorm", x)
        gate, up = (y @ tensors[f"{layer}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ tensors[f"{layer}mlp.down_proj.weight"].T
    return rms(f"{LLAMA}norm", x)


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False) -> torch.Tensor:
    """Of heads [heads, L, size] what all attend to, [L, width]."""
    similar = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
    if causal:
        similar = similar.masked_fill(torch.ones_like(similar[0]).triu(1) > 0, -torch.inf)
    shares = similar.softmax(-1)
    return (shares @ v).transpose(0, 1).flatten(1)


def _dense(tensors: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    return x @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"]


def _norm(tensors: Weights, name: str, x: torch.Tensor, eps: float) -> torch.Tensor:
    centred = x - x.mean(-1, keepdim=True)
    shares = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()
    return shares * tensors[f"{name}.weight"] + tensors[f"{name}.bias"]
