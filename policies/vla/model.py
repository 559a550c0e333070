"""Pi0 (arXiv 2410.24164) of `transformers`, split into the part computed once and the part of each denoising step.

A vision-language model reads pictures and instruction (the prefix); an action expert reads the robot's state and the
noisy chunk, and attends to the prefix by its cached keys and values. Letters: N observations, C cameras, S pixels of a
side, L tokens, H chunk length, D action elements with padding, W width of a hidden state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from embodied.extras import needs_extra
from policies.vla.computing import Computing
from policies.vla.inputs import VOCABULARY
from policies.vla.sizes import SIZES, Size

PADDED = 32
"""Number of elements of pi0's states and actions; shorter ones are padded with zeros."""

UNREAD = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
"""Dense layers of a language model's last layer that neither its keys nor its values depend on."""


KeysValues = tuple[tuple[Tensor, Tensor], ...]
"""Keys and values [N, heads, P, width of a head] of every layer."""


@dataclass
class Prefix:
    """Keys and values of the vision-language model, its hidden state [N, P, W], and the mask of real tokens [N, P]."""

    keys_values: KeysValues
    hidden: Tensor
    real: Tensor

    def __getitem__(self, rows: slice) -> Prefix:
        """Prefixes `rows` of N."""
        keys_values = tuple((keys[rows], values[rows]) for keys, values in self.keys_values)
        return Prefix(keys_values, self.hidden[rows], self.real[rows])

    def mean(self) -> Tensor:
        """Mean hidden state of real tokens, [N, W]."""
        weight = self.real.unsqueeze(-1).float()
        return (self.hidden * weight).sum(1) / weight.sum(1)

    def repeated(self, count: int) -> Prefix:
        """Repeat each of N prefixes `count` times, for as many chunks."""
        if count == 1:
            return self
        repeated_cache = tuple(
            (keys.repeat_interleave(count, 0), values.repeat_interleave(count, 0)) for keys, values in self.keys_values
        )
        return Prefix(repeated_cache, *(x.repeat_interleave(count, 0) for x in (self.hidden, self.real)))


class Cache:
    """Cache for layers of transformers: it records a prefix's keys and values, or prepends `keys_values` to new ones.

    Unlike a cache of transformers it does not grow: a denoising step does not attend to the one before, and a layer
    that is computed again in a backward pass gets the same cache.
    """

    is_initialized = False
    """False for a prefix, all of whose tokens attend to each other."""

    def __init__(self, keys_values: KeysValues = ()) -> None:
        self.keys_values = keys_values
        self.new_keys_values: dict[int, tuple[Tensor, Tensor]] = {}
        self.length = keys_values[0][0].shape[-2] if keys_values else 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of cached tokens."""
        return self.length

    get_query_offset = get_seq_length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Number of tokens that `query_length` new ones attend to, and the index of the first."""
        return self.length + query_length, 0

    def update(self, keys: Tensor, values: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Keys and values that a layer's new tokens attend to."""
        if not self.keys_values:
            self.new_keys_values.setdefault(layer_idx, (keys, values))
            return keys, values
        cached = self.keys_values[layer_idx]
        return torch.cat((cached[0], keys), -2), torch.cat((cached[1], values), -2)


def picture_tokens(encoded: Tensor, count: int, rows: int) -> Tensor:
    """Tokens [M, C * patches, W] of `rows` = M prompts from pictures [N * C, patches, W] of `count` = N observations.

    M is a multiple of N: prompt i is of the pictures of observation i % N.
    """
    return encoded.reshape(count, -1, encoded.shape[-1]).repeat(rows // count, 1, 1)


class FlowModel(nn.Module):
    """Network of a vision-language-action model: a prefix of each observation, `velocity` for each denoising step.

    `native` is the published network. An expert that reads keys and values of the vision-language model does not read
    the dense layers after the last of them, which are frozen, as they get no gradient; `unread` are their names.
    `computing` has the precision; outputs are float32. Adapters are on layers with names like `adapted`.
    """

    adapted: str
    width: int
    expert_width: int
    picture_size: int
    tokens_of_picture: int
    state_size: int
    action_size: int
    vocabulary: int

    def __init__(self, native: nn.Module, layers: str = "", count: int = 0) -> None:
        """`layers` names the stack of `count` layers whose keys and values are read; "": their output is read."""
        super().__init__()
        self.native: Any = native
        self.computing = Computing()
        last = f"{layers}.{count - 1}"
        self.unread = [f"{last}.{name}" for name in UNREAD] if layers else []
        self._norms = [f"{last}.post_attention_layernorm", f"{layers.rpartition('.')[0]}.norm"] if layers else []
        self.train_all()

    @property
    def vision_language(self) -> nn.Module:
        """Vision-language model, without the action expert."""
        raise NotImplementedError

    def train_all(self) -> None:
        """Make all weights trainable that get a gradient."""
        self.native.requires_grad_(True)
        for name in [*self.unread, *self._norms]:
            self.native.get_submodule(name).requires_grad_(False)

    def velocity(self, prefix: Prefix, state: Tensor, x: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        """Velocity [N, H, D] and the expert's hidden state [N, H, W] at noisy chunks `x` [N, H, D] and times.

        Times are one per chunk [N], or one per action [N, H]. `state` [N, state_size] is padded.
        """
        # the cached prefix is read again at every step, only the expert runs
        velocity, hidden = self.computing.run(
            type(self)._denoise, self, prefix.keys_values, prefix.real, state, time, x
        )
        return velocity.float(), hidden.float()

    def training_times(self, count: int, device: torch.device) -> Tensor:
        """Draw `count` denoising times of the supervised loss: Beta(1.5, 1), scaled to [0.001, 1]."""
        return 0.999 * torch.rand(count, device=device) ** (1.0 / 1.5) + 0.001

    def _denoise(
        self, keys_values: KeysValues, real: Tensor, state: Tensor, time: Tensor, x: Tensor
    ) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


class Pi0Model(FlowModel):
    """Network of pi0: `prefix` of an observation, then `velocity` for each denoising step.

    `native` is transformers' PI0ForConditionalGeneration.
    """

    adapted = r".*(language_model|dit)\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)"

    def __init__(self, native: nn.Module) -> None:
        settings: Any = native.config
        super().__init__(native, "model.vlm.language_model.layers", settings.vlm_config.text_config.num_hidden_layers)
        self.native.model.dit.embed_tokens = None  # a vocabulary that the action expert never reads
        self.picture_size = settings.vlm_config.vision_config.image_size
        self.width = settings.vlm_config.text_config.hidden_size
        self.expert_width = settings.dit_config.hidden_size
        self.state_size = settings.max_state_dim
        self.action_size = settings.max_action_dim
        patches = self.picture_size // settings.vlm_config.vision_config.patch_size
        self.tokens_of_picture = patches**2
        self.vocabulary = settings.vlm_config.text_config.vocab_size

    @property
    def vision_language(self) -> nn.Module:
        """PaliGemma."""
        return self.native.model.vlm

    def prefix(self, pictures: Tensor, tokens: Tensor, real: Tensor) -> Prefix:
        """Read pictures [N, C, 3, S, S] in [-1, 1] and tokens [M, L], which are `real` [M, L] or padding.

        M is N or a multiple: then further rows are of the same pictures in turn, which are encoded once.
        """
        return Prefix(*self.computing.run(Pi0Model._read, self, tokens, real, pictures))

    def _read(self, tokens: Tensor, real: Tensor, pictures: Tensor) -> tuple[KeysValues, Tensor, Tensor]:
        vlm = self.native.model.vlm
        picture_features = picture_tokens(
            vlm.get_image_features(pictures.flatten(0, 1)).pooler_output, len(pictures), len(tokens)
        )
        words = vlm.get_input_embeddings()(tokens)
        embedded = torch.cat((picture_features.to(words.dtype), words), 1)
        # tokens of pictures come first and are all real: [M, C * patches + L]
        real = torch.cat((real.new_ones(picture_features.shape[:2]), real), 1)
        cache = Cache()
        output = vlm(
            inputs_embeds=embedded,
            attention_mask=real,
            position_ids=real.cumsum(-1) - 1,
            token_type_ids=torch.zeros_like(real),
            use_cache=True,
            past_key_values=cache,
        )
        keys_values = tuple(cache.new_keys_values[layer] for layer in sorted(cache.new_keys_values))
        return keys_values, output.last_hidden_state, real

    def _denoise(
        self, keys_values: KeysValues, real: Tensor, state: Tensor, time: Tensor, x: Tensor
    ) -> tuple[Tensor, Tensor]:
        embedded = self._embedded(state, time, x)
        output = self.native.model(action_embeds=embedded, attention_mask=real, past_key_values=Cache(keys_values))
        hidden = output.last_hidden_state[:, -x.shape[1] :]
        return self.native.action_out_proj(hidden), hidden

    def _embedded(self, state: Tensor, time: Tensor, x: Tensor) -> Tensor:
        """Tokens of the state and the actions, [N, 1 + H, W]; transformers supports only one time for all actions."""
        parts = self.native.embed_action_time
        if time.ndim == 1:
            return parts(state, x, time)
        actions = parts.action_in_proj(x)
        times = parts.sinusoid_embeds(time.flatten()).view(*time.shape, -1).to(actions.dtype)
        merged = nn.functional.silu(parts.action_time_mlp_in(torch.cat((actions, times), -1)))
        return torch.cat((parts.state_proj(state).unsqueeze(1), parts.action_time_mlp_out(merged)), 1)


def untrained(size: Size, horizon: int, state: int, action: int) -> Pi0Model:
    """Build a model of random weights for chunks of `horizon` actions.

    Raises:
        UserError: where transformers is not installed.
    """
    with needs_extra("vla"):
        from transformers import PI0Config, PI0ForConditionalGeneration
    sizes = SIZES[size]
    settings = PI0Config(
        vlm_config={
            "model_type": "paligemma",
            "text_config": sizes.text(VOCABULARY + 1),
            "vision_config": sizes.vision(),
            "projection_dim": sizes.reading[0],
            "image_token_id": VOCABULARY,
        },
        dit_config=sizes.expert(),
        chunk_size=horizon,
        max_state_dim=max(PADDED, state),
        max_action_dim=max(PADDED, action),
    )
    return Pi0Model(PI0ForConditionalGeneration(settings))
