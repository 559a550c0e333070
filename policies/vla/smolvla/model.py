"""Network of SmolVLA (arXiv 2506.01844): a small vision-language model, and an expert that attends to its layers.

Pictures, instruction and state are read once (the prefix). The action expert has as many layers as are kept of the
language model. Every `self_attention_every`-th lets the chunk's actions attend to the prefix and to earlier actions;
in all others each action attends to the keys and values of the prefix alone. Tensors have LeRobot's names, so that a
published file is read without renaming; the vision tower and the layers are transformers' SmolVLM and Llama.
Letters: N observations, C cameras, S pixels of a side, L tokens, P tokens of a prefix, H chunk length, D action
elements with padding, W width of a hidden state.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from embodied.extras import needs_extra
from policies.vla.inputs import VOCABULARY
from policies.vla.model import PADDED, Cache, FlowModel, KeysValues, Prefix, picture_tokens
from policies.vla.sizes import SIZES, Size

WIDTH_MULTIPLIER = 0.75
"""Width of the expert in widths of the language model, where a configuration does not name it."""
SELF_ATTENTION_EVERY = 2
PERIODS = 4e-3, 4.0
"""Shortest and longest period of the embedding of denoising times."""
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
"""Rotary embedding of both models: SmolVLM2's own longest wavelength, 100,000, is not used by SmolVLA."""
INNER_MULTIPLE = 256
"""The width of the expert's dense layers is a multiple of this."""
SHUFFLE = 2
"""New models join squares of this many patches a side into one token."""


@dataclass(frozen=True)
class Architecture:
    """Sizes of a SmolVLA: transformers' SmolVLMConfig as `backbone`, of whose language model `layers` are kept.

    Pictures have `picture_size` pixels a side, chunks `chunk_size` actions. States and actions are padded to
    `max_state_dim` and `max_action_dim` elements.
    """

    backbone: Any
    layers: int
    picture_size: int
    chunk_size: int
    max_state_dim: int = PADDED
    max_action_dim: int = PADDED
    self_attention_every: int = SELF_ATTENTION_EVERY
    width_multiplier: float = WIDTH_MULTIPLIER
    periods: tuple[float, float] = PERIODS

    def attends_to_actions(self, layer: int) -> bool:
        """Whether a layer of the expert attends to actions, too, and not to the prefix alone."""
        return self.self_attention_every > 0 and layer % self.self_attention_every == 0


class CrossAttention(nn.Module):
    """Attention of actions to the keys and values of the language model's layer, which are projected once more.

    Queries are rotated by the action's place in the chunk. Keys keep the rotation of the language model.
    """

    def __init__(self, attention: Any, layer: int, config: Any) -> None:  # noqa: ANN401 - of transformers
        super().__init__()
        self.layer = layer
        self.head: int = config.head_dim
        self.groups: int = config.num_attention_heads // config.num_key_value_heads
        self.q_proj: nn.Module = attention.q_proj
        self.o_proj: nn.Module = attention.o_proj
        width = config.num_key_value_heads * self.head
        self.k_proj = nn.Linear(width, width, bias=config.attention_bias)
        self.v_proj = nn.Linear(width, width, bias=config.attention_bias)

    def forward(
        self,
        hidden_states: Tensor,
        *,
        attention_mask: Tensor,
        past_key_values: Cache,
        places: tuple[Tensor, Tensor],
        **_: Any,  # noqa: ANN401 - of transformers, for attention to actions
    ) -> tuple[Tensor, None]:
        """Attend from hidden states [N, H, W] where `attention_mask` [N, 1, H, P + H] allows it.

        `places` are cosines and sines [1, H, width of a head].
        """
        keys, values = (
            self._heads(projection(each.transpose(1, 2).flatten(2))).repeat_interleave(self.groups, 1)
            for projection, each in zip(
                (self.k_proj, self.v_proj), past_key_values.keys_values[self.layer], strict=True
            )
        )
        queries = rotated(self._heads(self.q_proj(hidden_states)), *places)
        mask = attention_mask[..., : keys.shape[-2]]
        mixed = nn.functional.scaled_dot_product_attention(queries, keys, values, mask)
        return self.o_proj(mixed.transpose(1, 2).flatten(2)), None

    def _heads(self, x: Tensor) -> Tensor:
        """Split [N, T, heads * width of a head] into [N, heads, T, width of a head]."""
        return x.unflatten(-1, (-1, self.head)).transpose(1, 2)


def rotated(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate [N, heads, T, F] by angles [1, T, F], element i with element i + F / 2 (arXiv 2104.09864)."""
    first, second = x.chunk(2, -1)
    return (x * cosines.unsqueeze(1) + torch.cat((-second, first), -1) * sines.unsqueeze(1)).type_as(x)


class Network(nn.Module):
    """Modules of SmolVLA by LeRobot's names, without the vocabulary's head, which SmolVLA never reads.

    Raises:
        UserError: where transformers is not installed.
    """

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        with needs_extra("vla"):
            from transformers import LlamaModel, SmolVLMModel
        self.architecture = architecture
        backbone = copy.deepcopy(architecture.backbone)
        backbone.text_config.num_hidden_layers = architecture.layers
        backbone.text_config.rope_parameters = ROPE
        text = backbone.text_config
        width = int(text.hidden_size * architecture.width_multiplier)
        joint: Any = nn.Module()
        joint.vlm = nn.Module()
        joint.vlm.model = SmolVLMModel(backbone)
        joint.lm_expert = LlamaModel(expert_config(text, width))
        joint.lm_expert.embed_tokens = None  # the expert reads no words
        for index, layer in enumerate(joint.lm_expert.layers):
            if not architecture.attends_to_actions(index):
                layer.self_attn = CrossAttention(layer.self_attn, index, joint.lm_expert.config)
        self.vlm_with_expert = joint
        self.state_proj = nn.Linear(architecture.max_state_dim, text.hidden_size)
        self.action_in_proj = nn.Linear(architecture.max_action_dim, width)
        self.action_out_proj = nn.Linear(width, architecture.max_action_dim)
        self.action_time_mlp_in = nn.Linear(2 * width, width)
        self.action_time_mlp_out = nn.Linear(width, width)
        self.float()  # transformers builds a model in the type that its configuration names

    def embedded_actions(self, x: Tensor, time: Tensor) -> Tensor:
        """Tokens [N, H, W] of noisy chunks [N, H, D] at times [N], or [N, H] of each action."""
        actions = self.action_in_proj(x)
        times = time_embedding(time, actions.shape[-1], self.architecture.periods).to(actions.dtype)
        times = (times if time.ndim == 2 else times.unsqueeze(1)).expand_as(actions)
        merged = nn.functional.silu(self.action_time_mlp_in(torch.cat((actions, times), -1)))
        return self.action_time_mlp_out(merged)


def expert_config(text: Any, width: int) -> Any:  # noqa: ANN401 - of transformers
    """Configuration of the expert of a language model with the configuration `text`: its heads, another `width`."""
    config = copy.deepcopy(text)
    # two thirds of four widths, rounded up to a multiple
    inner = 4 * int(2 * width / 3)
    sizes = {
        "head_dim": text.head_dim,
        "hidden_size": width,
        "intermediate_size": INNER_MULTIPLE * math.ceil(inner / INNER_MULTIPLE),
        "vocab_size": 1,
        "pad_token_id": None,
    }
    for name, size in sizes.items():
        setattr(config, name, size)
    return config


def time_embedding(time: Tensor, width: int, periods: tuple[float, float]) -> Tensor:
    """Sines and cosines [..., width] of times [...], whose periods grow geometrically between `periods`."""
    shortest, longest = periods
    share = torch.linspace(0.0, 1.0, width // 2, dtype=torch.float64, device=time.device)
    # angle = 2 pi t / period; a period of 4e-3 makes it large, so that float32 would round it by 1e-4
    angle = time.double().unsqueeze(-1) * (2.0 * math.pi / (shortest * (longest / shortest) ** share))
    return torch.cat((angle.sin(), angle.cos()), -1).float()


def prefix_attention(real: Tensor) -> Tensor:
    """Mask [N, 1, P, P] of a prefix: pictures and words attend to each other, the last token, the state, to all.

    `real` [N, P] is False for padding, to which nothing attends.
    """
    size = real.shape[-1]
    is_state = torch.arange(size, device=real.device) == size - 1
    # no row is empty: what padding itself attends to is never read
    return (real[:, None, None].bool() & (is_state[:, None] | ~is_state)).contiguous()


def action_attention(real: Tensor, count: int) -> Tensor:
    """Mask [N, 1, H, P + H] of `count` actions: they attend to the `real` [N, P] prefix and to no later action."""
    to_prefix = real[:, None].bool().expand(-1, count, -1)
    order = torch.ones(count, count, dtype=torch.bool, device=real.device).tril()
    return torch.cat((to_prefix, order.expand(len(real), -1, -1)), -1).unsqueeze(1)


class SmolVLAModel(FlowModel):
    """Network of SmolVLA: `prefix` of an observation and the robot's state, then `velocity` for each denoising step."""

    adapted = r".*(text_model|lm_expert)\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)"

    def __init__(self, native: Network) -> None:
        architecture = native.architecture
        backbone = architecture.backbone
        super().__init__(native, "vlm_with_expert.vlm.model.text_model.layers", architecture.layers)
        self.picture_size = architecture.picture_size
        self.width = backbone.text_config.hidden_size
        self.expert_width = native.action_out_proj.in_features
        self.state_size = architecture.max_state_dim
        self.action_size = architecture.max_action_dim
        side = self.picture_size // backbone.vision_config.patch_size // backbone.scale_factor
        self.tokens_of_picture = side**2
        self.vocabulary = backbone.text_config.vocab_size

    @property
    def vision_language(self) -> nn.Module:
        """SmolVLM; the projection of the state is trained with the expert, as in LeRobot."""
        return self.native.vlm_with_expert.vlm

    def prefix(self, pictures: Tensor, tokens: Tensor, real: Tensor, state: Tensor) -> Prefix:
        """Read pictures [N, C, 3, S, S] in [-1, 1], tokens [M, L], `real` [M, L] or padding, and padded states [M, D].

        M is N or a multiple: then further rows are of the same pictures in turn, which are encoded once.
        """
        return Prefix(*self.computing.run(SmolVLAModel._read, self, tokens, real, state, pictures))

    def _read(self, tokens: Tensor, real: Tensor, state: Tensor, pictures: Tensor) -> tuple[KeysValues, Tensor, Tensor]:
        model = self.native.vlm_with_expert.vlm.model
        scale = math.sqrt(self.width)
        patches = model.vision_model(pixel_values=pictures.flatten(0, 1)).last_hidden_state
        picture_features = picture_tokens(model.connector(patches), len(pictures), len(tokens)) * scale
        word_tokens = model.text_model.embed_tokens(tokens) * scale
        embedded = torch.cat((picture_features, word_tokens, self.native.state_proj(state).unsqueeze(1)), 1)
        # tokens of pictures come first, the state last, and all of both are real
        real = torch.cat((real.new_ones(picture_features.shape[:2]), real, real.new_ones(len(real), 1)), 1)
        cache = Cache()
        output = model.text_model(
            inputs_embeds=embedded,
            attention_mask=prefix_attention(real),
            position_ids=real.cumsum(-1) - 1,
            use_cache=True,
            past_key_values=cache,
        )
        keys_values = tuple(cache.new_keys_values[layer] for layer in sorted(cache.new_keys_values))
        return keys_values, output.last_hidden_state, real

    def _denoise(
        self, keys_values: KeysValues, real: Tensor, state: Tensor, time: Tensor, x: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Denoise; the `state` is in the prefix."""
        expert = self.native.vlm_with_expert.lm_expert
        embedded = self.native.embedded_actions(x, time)
        order = torch.arange(x.shape[1], device=x.device)
        hidden = expert(
            inputs_embeds=embedded,
            attention_mask=action_attention(real, x.shape[1]),
            position_ids=real.sum(1, keepdim=True) + order,
            past_key_values=Cache(keys_values),
            places=expert.rotary_emb(embedded, order.unsqueeze(0)),
        ).last_hidden_state
        return self.native.action_out_proj(hidden), hidden


def untrained(size: Size, horizon: int, state: int, action: int) -> SmolVLAModel:
    """Build a model of random weights for chunks of `horizon` actions.

    Raises:
        UserError: where transformers is not installed.
    """
    with needs_extra("vla"):
        from transformers import SmolVLMConfig
    sizes = SIZES[size]
    vision = {name: value for name, value in sizes.vision().items() if name not in ("model_type", "vision_use_head")}
    backbone = SmolVLMConfig(
        text_config=sizes.text(VOCABULARY) | {"model_type": "llama"}, vision_config=vision, scale_factor=SHUFFLE
    )
    return SmolVLAModel(
        Network(Architecture(backbone, sizes.layers, sizes.picture, horizon, max(PADDED, state), max(PADDED, action)))
    )
