"""GR00T N1.5 as NVIDIA and LeRobot publish it: small files with their names of tensors; its velocity in plain torch.

Names and shapes of the tensors are those of GR00TN15 in LeRobot 0.4.4 (src/lerobot/policies/groot), on transformers
4.57. tests/policies/vla/groot/test_groot_lerobot.py compares with LeRobot's own classes, where they are installed.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn.functional import conv2d, gelu, layer_norm, linear, silu

SIDE, PATCH = 32, 8
PATCHES = (SIDE // PATCH) ** 2
SEEING, SEEING_INNER, SEEING_HEADS, SEEING_LAYERS = 16, 24, 2, 2
READING, READING_INNER, READING_LAYERS, KEPT = 32, 48, 4, 3
HEADS, GROUPS, HEAD = 4, 2, 8
ROPE = 1_000_000.0
CONTEXT_HEADS, CONTEXT_LAYERS = 4, 2
ACTING, ACTING_HEADS, ACTING_LAYERS, HIDDEN = 24, 3, 4, 20
EMBODIMENTS, EMBODIMENT, FUTURE, LONGEST = 5, 3, 3, 16
STATE_SIZE, ACTION_SIZE, CHUNK, STEPS, BUCKETS = 40, 32, 4, 3, 1000
STATE, ACTION = ([-0.1, 0.2], [0.9, 1.4]), ([-1.0, 0.0, 0.5], [1.0, 3.0, 3.5])
"""Smallest and largest values of the elements."""
SPECIAL = ["<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>", "<pad>"]
PICTURE_TOKEN = 256 + SPECIAL.index("<IMG_CONTEXT>")
VOCABULARY = 256 + len(SPECIAL)
TEMPLATE = (
    "{% set image_count = namespace(value=0) %}{% for message in messages %}{% if loop.first and message['role'] != "
    "'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] "
    "}}\n{% for content in message['content'] %}{% if content['type'] == 'image' %}{% set image_count.value = "
    "image_count.value + 1 %}<image-{{ image_count.value }}>{% else %}{{ content['text'] }}{% endif %}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PROMPT = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n{}{}<|im_end|>\n"
    "<|im_start|>assistant\n"
)
EAGLE, BASE = "eagle", "base"
"""Folders of Eagle's files and of NVIDIA's configuration, in the policy's folder."""
PACKED = "policy_preprocessor_step_2_groot_pack_inputs_v3.safetensors"


def prompt(pictures: int, instruction: str) -> str:
    """The prompt of an instruction with that number of pictures."""
    seen = "".join(f"<image {i + 1}><img>{'<IMG_CONTEXT>' * PATCHES}</img>" for i in range(pictures))
    return PROMPT.format(seen, f"['{instruction}']")


def tokens(pictures: int, instruction: str) -> list[int]:
    """Tokens of the prompt, whose bytes are numbered as in the tokenizer."""
    alphabet = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    rest, found = prompt(pictures, instruction), []
    letters = dict(zip(b" \n", "ĠĊ", strict=True))
    while rest:
        special = next((each for each in SPECIAL if rest.startswith(each)), None)
        found.append(256 + SPECIAL.index(special) if special else alphabet[letters.get(ord(rest[0]), rest[0])])
        rest = rest[len(special or rest[0]) :]
    return found


def _block(prefix: str, width: int, read: int, *, adaptive: bool) -> dict[str, tuple[int, ...]]:
    dense = {"attn1.to_q": (width, width), "attn1.to_k": (width, read), "attn1.to_v": (width, read)}
    dense |= {"attn1.to_out.0": (width, width), "ff.net.0.proj": (4 * width, width), "ff.net.2": (width, 4 * width)}
    dense |= {"norm1.linear": (2 * width, width)} if adaptive else {"norm1": (width,), "norm3": (width,)}
    shapes = {}
    for name, shape in dense.items():
        shapes |= {f"{prefix}.{name}.weight": shape, f"{prefix}.{name}.bias": shape[:1]}
    return shapes


def shapes() -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors by NVIDIA's names."""
    eagle, head = "backbone.eagle_model.", "action_head."
    vision, language = f"{eagle}vision_model.vision_model.", f"{eagle}language_model."
    found: dict[str, tuple[int, ...]] = {
        f"{vision}embeddings.patch_embedding.weight": (SEEING, 3, PATCH, PATCH),
        f"{vision}embeddings.patch_embedding.bias": (SEEING,),
        f"{vision}embeddings.position_embedding.weight": (PATCHES, SEEING),
        f"{vision}post_layernorm.weight": (SEEING,),
        f"{vision}post_layernorm.bias": (SEEING,),
        f"{vision}head.probe": (1, 1, SEEING),  # of SigLIP's head, which nobody reads
        f"{eagle}mlp1.0.weight": (READING, SEEING),
        f"{eagle}mlp1.0.bias": (READING,),
        f"{language}model.embed_tokens.weight": (VOCABULARY, READING),
        f"{language}model.norm.weight": (READING,),
        f"{language}lm_head.weight": (VOCABULARY, READING),
        f"{head}future_tokens.weight": (FUTURE, ACTING),
        f"{head}position_embedding.weight": (LONGEST, ACTING),
    }
    for index in range(SEEING_LAYERS):
        layer = f"{vision}encoder.layers.{index}."
        dense = {f"self_attn.{name}": (SEEING, SEEING) for name in ("k_proj", "v_proj", "q_proj", "out_proj")}
        dense |= {"mlp.fc1": (SEEING_INNER, SEEING), "mlp.fc2": (SEEING, SEEING_INNER)}
        dense |= {"layer_norm1": (SEEING,), "layer_norm2": (SEEING,)}
        for name, shape in dense.items():
            found |= {f"{layer}{name}.weight": shape, f"{layer}{name}.bias": shape[:1]}
    for index in range(KEPT):
        dense = {"self_attn.q_proj": (HEADS * HEAD, READING), "self_attn.o_proj": (READING, HEADS * HEAD)}
        dense |= {f"self_attn.{name}": (GROUPS * HEAD, READING) for name in ("k_proj", "v_proj")}
        dense |= {"self_attn.q_norm": (HEAD,), "self_attn.k_norm": (HEAD,)}
        dense |= {f"mlp.{name}_proj": (READING_INNER, READING) for name in ("gate", "up")}
        dense |= {"mlp.down_proj": (READING, READING_INNER)}
        dense |= {"input_layernorm": (READING,), "post_attention_layernorm": (READING,)}
        found |= {f"{language}model.layers.{index}.{name}.weight": shape for name, shape in dense.items()}
    dense = {"vlln": (READING,), "model.proj_out_1": (2 * ACTING, ACTING), "model.proj_out_2": (HIDDEN, ACTING)}
    dense |= {f"model.timestep_encoder.timestep_embedder.linear_{n}": (ACTING, {1: 256, 2: ACTING}[n]) for n in (1, 2)}
    for name, shape in dense.items():
        found |= {f"{head}{name}.weight": shape, f"{head}{name}.bias": shape[:1]}
    for index in range(CONTEXT_LAYERS):
        found |= _block(f"{head}vl_self_attention.transformer_blocks.{index}", READING, READING, adaptive=False)
    for index in range(ACTING_LAYERS):
        read = ACTING if index % 2 else READING
        found |= _block(f"{head}model.transformer_blocks.{index}", ACTING, read, adaptive=True)
    layers = {"state_encoder.layer1": (STATE_SIZE, HIDDEN), "state_encoder.layer2": (HIDDEN, ACTING)}
    layers |= {"action_decoder.layer1": (HIDDEN, HIDDEN), "action_decoder.layer2": (HIDDEN, ACTION_SIZE)}
    layers |= {"action_encoder.W1": (ACTION_SIZE, ACTING), "action_encoder.W2": (2 * ACTING, ACTING)}
    layers |= {"action_encoder.W3": (ACTING, ACTING)}
    for name, shape in layers.items():
        found |= {f"{head}{name}.W": (EMBODIMENTS, *shape), f"{head}{name}.b": (EMBODIMENTS, shape[1])}
    return found


def tensors(seed: int = 0) -> dict[str, Tensor]:
    """Random tensors by NVIDIA's names."""
    noise = torch.Generator().manual_seed(seed)

    def drawn(name: str, shape: tuple[int, ...]) -> Tensor:
        if ("norm" in name or "vlln" in name) and len(shape) == 1 and name.endswith("weight"):
            return 1.0 + 0.1 * torch.randn(shape, generator=noise)
        inputs = shape[1] if name.endswith(".W") else math.prod(shape[1:])
        return torch.randn(shape, generator=noise) / math.sqrt(max(1, inputs))

    drawn_tensors = {name: drawn(name, shape) for name, shape in shapes().items()}
    language = "backbone.eagle_model.language_model."
    drawn_tensors[f"{language}lm_head.weight"] = drawn_tensors[f"{language}model.embed_tokens.weight"].clone()
    return drawn_tensors


def base_config() -> dict[str, Any]:
    """NVIDIA's config.json."""
    transformer = {"dropout": 0.2, "final_dropout": True, "positional_embeddings": None}
    diffusion = {"num_attention_heads": ACTING_HEADS, "attention_head_dim": ACTING // ACTING_HEADS}
    diffusion |= {"cross_attention_dim": READING, "num_layers": ACTING_LAYERS, "output_dim": HIDDEN}
    diffusion |= {"norm_type": "ada_norm", "interleave_self_attention": True}
    context = {"num_attention_heads": CONTEXT_HEADS, "attention_head_dim": READING // CONTEXT_HEADS}
    head = {"action_dim": ACTION_SIZE, "action_horizon": CHUNK, "max_action_dim": ACTION_SIZE, "add_pos_embed": True}
    head |= {"backbone_embedding_dim": READING, "hidden_size": HIDDEN, "input_embedding_dim": ACTING}
    head |= {"max_state_dim": STATE_SIZE, "max_seq_len": LONGEST, "max_num_embodiments": EMBODIMENTS}
    head |= {"noise_beta_alpha": 1.5, "noise_beta_beta": 1.0, "noise_s": 0.999, "num_timestep_buckets": BUCKETS}
    head |= {"num_inference_timesteps": STEPS, "num_target_vision_tokens": FUTURE, "use_vlln": True}
    head |= {"diffusion_model_cfg": diffusion | transformer, "model_dtype": "float32"}
    head |= {"vl_self_attention_cfg": context | transformer | {"num_layers": CONTEXT_LAYERS}}
    head |= {"tune_projector": True, "tune_diffusion_model": True}
    backbone = {"eagle_path": "NVEagle/unpublished", "project_to_dim": None, "reproject_vision": False}
    backbone |= {"select_layer": KEPT, "tune_llm": False, "tune_visual": True, "use_flash_attention": True}
    return {
        "model_type": "gr00t_n1_5",
        "architectures": ["GR00T_N1_5"],
        "action_dim": ACTION_SIZE,
        "action_horizon": CHUNK,
        "action_head_cfg": head,
        "backbone_cfg": backbone,
        "compute_dtype": "float32",
        "hidden_size": READING,
    }


def eagle_config() -> dict[str, Any]:
    """Eagle's config.json."""
    text = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "head_dim": HEAD}
    text |= {"hidden_size": READING, "intermediate_size": READING_INNER, "num_hidden_layers": READING_LAYERS}
    text |= {"num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "rms_norm_eps": 1e-6, "rope_theta": ROPE}
    text |= {"rope_scaling": None, "tie_word_embeddings": True, "vocab_size": VOCABULARY, "torch_dtype": "bfloat16"}
    vision = {"model_type": "siglip_vision_model", "hidden_size": SEEING, "intermediate_size": SEEING_INNER}
    vision |= {"num_attention_heads": SEEING_HEADS, "num_hidden_layers": SEEING_LAYERS, "image_size": SIDE}
    vision |= {"patch_size": PATCH, "hidden_act": "gelu_pytorch_tanh", "torch_dtype": "bfloat16"}
    fields = {"model_type": "eagle_2_5_vl", "architectures": ["Eagle25VLForConditionalGeneration"]}
    fields |= {"select_layer": -1, "use_pixel_shuffle": False, "mlp_connector_layers": 1, "downsample_ratio": 0.5}
    fields |= {"image_token_index": PICTURE_TOKEN, "force_image_size": SIDE, "_attn_implementation": "sdpa"}
    return fields | {"text_config": text, "vision_config": vision}


def save_eagle(folder: Path) -> Path:
    """Write Eagle's files: configuration, tokenizer, chat template and processors."""
    folder.mkdir(parents=True, exist_ok=True)
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    words = Tokenizer(models.BPE(vocab=letters, merges=[]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    words.add_special_tokens([AddedToken(each, normalized=False, special=True) for each in SPECIAL])
    words.save(str(folder / "tokenizer.json"))
    contents = {
        "config": eagle_config(),
        "tokenizer_config": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": "<pad>",
            "model_input_names": ["input_ids", "attention_mask"],
        },
        "chat_template": {"chat_template": TEMPLATE},
        "processor_config": {"processor_class": "Eagle25VLProcessor", "tokens_per_tile": PATCHES},
        "preprocessor_config": {"size": {"height": SIDE, "width": SIDE}, "do_resize": False, "do_pad": False},
    }
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def save_base(folder: Path, *, weights: bool = True) -> Path:
    """Write NVIDIA's folder, with or without its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(base_config()))
    if weights:
        save_file(tensors(), folder / "model.safetensors", {"format": "pt"})
    return folder


def config(**changes: Any) -> dict[str, Any]:
    """LeRobot's config.json."""
    inputs = {"observation.state": {"type": "STATE", "shape": [2]}}
    inputs |= {f"observation.images.{name}": {"type": "VISUAL", "shape": [3, 16, 24]} for name in ("wrist", "front")}
    return {
        "type": "groot",
        "n_obs_steps": 1,
        "input_features": inputs,
        "output_features": {"action": {"type": "ACTION", "shape": [3]}},
        "chunk_size": CHUNK,
        "n_action_steps": CHUNK,
        "max_state_dim": STATE_SIZE,
        "max_action_dim": ACTION_SIZE,
        "base_model_path": BASE,
        "tokenizer_assets_repo": EAGLE,
        "embodiment_tag": "unitree_g1",
    } | changes


def statistics() -> dict[str, Tensor]:
    """Statistics of state and action, by LeRobot's names."""
    pairs = (("observation.state", STATE), ("action", ACTION))
    found = {
        f"{key}.{name}": torch.tensor(value)
        for key, pair in pairs
        for name, value in zip(("min", "max"), pair, strict=True)
    }
    return found | {f"{key}.mean": torch.zeros(len(pair[0])) for key, pair in pairs}  # which are not used


def save(folder: Path, **changes: Any) -> Path:
    """Write a folder `pretrained_model` of LeRobot's."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(**changes)))
    stored = {f"_groot_model.{name}": value for name, value in tensors().items()}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    save_file(statistics(), folder / PACKED)
    packing = {"embodiment_tag": "unitree_g1", "embodiment_mapping": {"unitree_g1": EMBODIMENT}}
    steps = [{"registry_name": "groot_pack_inputs_v3", "config": packing | {"normalize_min_max": True}}]
    (folder / "policy_preprocessor.json").write_text(json.dumps({"name": "policy_preprocessor", "steps": steps}))
    save_eagle(folder / EAGLE)
    save_base(folder / BASE, weights=False)
    return folder


def normalised(values: Tensor, limits: tuple[list[float], list[float]]) -> Tensor:
    """Values [..., A] of which the range is [-1, 1]."""
    low, high = (torch.tensor(each) for each in limits)
    return 2.0 * (values - low) / (high - low) - 1.0


class Plain:
    """GR00T in plain torch, from NVIDIA's tensors."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.weights = weights

    def dense(self, name: str, x: Tensor) -> Tensor:
        return linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def norm(self, name: str, x: Tensor, eps: float = 1e-5) -> Tensor:
        return layer_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], eps)

    def rms(self, name: str, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * self.weights[f"{name}.weight"]

    def own(self, name: str, x: Tensor) -> Tensor:
        return x @ self.weights[f"{name}.W"][EMBODIMENT] + self.weights[f"{name}.b"][EMBODIMENT]

    def seen(self, picture: Tensor) -> Tensor:
        """Tokens [PATCHES, READING] of a picture [3, SIDE, SIDE]."""
        eagle = "backbone.eagle_model."
        name = f"{eagle}vision_model.vision_model."
        patch = f"{name}embeddings.patch_embedding"
        x = conv2d(picture[None], self.weights[f"{patch}.weight"], self.weights[f"{patch}.bias"], stride=PATCH)
        x = x[0].flatten(1).T + self.weights[f"{name}embeddings.position_embedding.weight"]
        for index in range(SEEING_LAYERS):
            layer = f"{name}encoder.layers.{index}."
            read = self.norm(f"{layer}layer_norm1", x, 1e-6)
            parts = [self.dense(f"{layer}self_attn.{each}_proj", read).chunk(SEEING_HEADS, -1) for each in "qkv"]
            x = x + self.dense(f"{layer}self_attn.out_proj", mixed(*parts))
            read = self.dense(f"{layer}mlp.fc1", self.norm(f"{layer}layer_norm2", x, 1e-6))
            x = x + self.dense(f"{layer}mlp.fc2", gelu(read, approximate="tanh"))
        return self.dense(f"{eagle}mlp1.0", self.norm(f"{name}post_layernorm", x, 1e-6))

    def read(self, pictures: Tensor, ids: list[int]) -> Tensor:
        """Hidden states [P, READING] of a prompt with pictures [C, 3, SIDE, SIDE]."""
        name = "backbone.eagle_model.language_model.model."
        x = self.weights[f"{name}embed_tokens.weight"][ids].clone()
        x[torch.tensor(ids) == PICTURE_TOKEN] = torch.cat([self.seen(each) for each in pictures])
        causal = torch.ones(len(x), len(x), dtype=torch.bool).tril()
        for index in range(KEPT):
            layer = f"{name}layers.{index}."
            normed = self.rms(f"{layer}input_layernorm", x)
            q, k, v = (self.dense(f"{layer}self_attn.{each}_proj", normed).unflatten(-1, (-1, HEAD)) for each in "qkv")
            q, k = (rotated(self.rms(f"{layer}self_attn.{each}_norm", part)) for each, part in (("q", q), ("k", k)))
            repeated = ([each[:, head // (HEADS // GROUPS)] for head in range(HEADS)] for each in (k, v))
            x = x + self.dense(f"{layer}self_attn.o_proj", mixed(q.unbind(1), *repeated, causal))
            normed = self.rms(f"{layer}post_attention_layernorm", x)
            inner = silu(self.dense(f"{layer}mlp.gate_proj", normed)) * self.dense(f"{layer}mlp.up_proj", normed)
            x = x + self.dense(f"{layer}mlp.down_proj", inner)
        return self.rms(f"{name}norm", x)

    def block(self, name: str, normed: Tensor, x: Tensor, context: Tensor, heads: int, after: Any) -> Tensor:
        parts = (self.dense(f"{name}attn1.to_q", normed), *(self.dense(f"{name}attn1.to_{n}", context) for n in "kv"))
        x = x + self.dense(f"{name}attn1.to_out.0", mixed(*(each.chunk(heads, -1) for each in parts)))
        inner = gelu(self.dense(f"{name}ff.net.0.proj", after(x)), approximate="tanh")
        return x + self.dense(f"{name}ff.net.2", inner)

    def features(self, pictures: Tensor, ids: list[int]) -> Tensor:
        """Features [P, READING] of a prompt."""
        x = self.norm("action_head.vlln", self.read(pictures, ids))
        for index in range(CONTEXT_LAYERS):
            name = f"action_head.vl_self_attention.transformer_blocks.{index}."
            normed = self.norm(f"{name}norm1", x)
            x = self.block(name, normed, x, normed, CONTEXT_HEADS, lambda x, name=name: self.norm(f"{name}norm3", x))
        return x

    def velocity(self, features: Tensor, state: Tensor, x: Tensor, time: float) -> Tensor:
        """Velocity [CHUNK, ACTION_SIZE] from action to noise, at a `time` of 1 for noise; `state` [STATE_SIZE]."""
        head = "action_head."
        bucket = math.floor(round((1.0 - time) * BUCKETS, 3))
        encoded = self.own(f"{head}state_encoder.layer1", state[None]).relu()
        own = self.own(f"{head}state_encoder.layer2", encoded)
        angles = torch.tensor([bucket / 10_000 ** (i / (ACTING // 2)) for i in range(ACTING // 2)])
        times = torch.cat((angles.sin(), angles.cos())).expand(CHUNK, -1)
        actions = torch.cat((self.own(f"{head}action_encoder.W1", x), times), -1)
        actions = self.own(f"{head}action_encoder.W3", silu(self.own(f"{head}action_encoder.W2", actions)))
        actions = actions + self.weights[f"{head}position_embedding.weight"][:CHUNK]
        hidden = torch.cat((own, self.weights[f"{head}future_tokens.weight"], actions))
        angles = torch.tensor([bucket / 10_000 ** (i / 127) for i in range(128)])
        condition = torch.cat((angles.cos(), angles.sin()))
        name = f"{head}model.timestep_encoder.timestep_embedder.linear_"
        condition = silu(self.dense(f"{name}2", silu(self.dense(f"{name}1", condition))))
        for index in range(ACTING_LAYERS):
            name = f"{head}model.transformer_blocks.{index}."
            scale, shift = self.dense(f"{name}norm1.linear", condition).chunk(2)
            normed = layer_norm(hidden, hidden.shape[-1:]) * (1 + scale) + shift
            context = normed if index % 2 else features
            hidden = self.block(name, normed, hidden, context, ACTING_HEADS, lambda x: layer_norm(x, x.shape[-1:]))
        shift, scale = self.dense(f"{head}model.proj_out_1", condition).chunk(2)
        hidden = layer_norm(hidden, hidden.shape[-1:], eps=1e-6) * (1 + scale) + shift
        hidden = self.dense(f"{head}model.proj_out_2", hidden)[-CHUNK:]
        decoded = self.own(f"{head}action_decoder.layer1", hidden).relu()
        return -self.own(f"{head}action_decoder.layer2", decoded)


def mixed(queries: Any, keys: Any, values: Any, mask: Tensor | None = None) -> Tensor:
    """Attention of heads [T, width], side by side."""
    rows = []
    for q, k, v in zip(queries, keys, values, strict=True):
        scores = q @ k.T / math.sqrt(q.shape[-1])
        rows.append((scores if mask is None else scores.masked_fill(~mask, -torch.inf)).softmax(-1) @ v)
    return torch.cat(rows, -1)


def rotated(x: Tensor) -> Tensor:
    """Rotated [T, heads, HEAD] by the place of each token."""
    turned = x.clone()
    for place in range(len(x)):
        for i in range(HEAD // 2):
            angle = place / ROPE ** (2 * i / HEAD)
            first, second = x[place, :, i], x[place, :, i + HEAD // 2]
            turned[place, :, i] = first * math.cos(angle) - second * math.sin(angle)
            turned[place, :, i + HEAD // 2] = second * math.cos(angle) + first * math.sin(angle)
    return turned
