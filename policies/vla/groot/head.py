"""Action head of GR00T N1.5 (arXiv 2503.14734): a diffusion transformer that attends to features of pictures and words.

Each embodiment (kind of robot) has weights of its own to encode states and noisy actions, and to decode velocities; one
tensor holds those of all. Blocks alternate between attention to the features and among the tokens of the state, of the
future and of the actions. Tensors have the published names; layers are diffusers'.
Letters: N observations, P tokens of a prompt, T tokens of the transformer, H chunk length, W width of a hidden state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, relu, scaled_dot_product_attention, silu

from policies.vla.model import KeysValues

TIMES = 256
"""Width of the sines and cosines of a denoising time."""
INITIAL_STD = 0.02


@dataclass(frozen=True)
class Head:
    """Sizes of an action head.

    The transformer has `layers` of `width` with `heads`, and outputs `hidden` elements, which are also the width inside
    the encoder of states and the decoder. Features have `context` elements and pass through `context_layers` with
    `context_heads`. States and actions are padded to `state` and `action` elements. `future` tokens are learned.
    Chunks have `chunk_size` actions, and at most `longest`. Times are one of `buckets`.
    """

    width: int
    heads: int
    layers: int
    hidden: int
    context: int
    context_heads: int
    context_layers: int
    state: int
    action: int
    embodiments: int
    future: int
    chunk_size: int
    longest: int
    buckets: int


class EmbodimentLinear(nn.Module):
    """Linear layer with weights of its own for each embodiment."""

    def __init__(self, embodiments: int, inputs: int, outputs: int) -> None:
        super().__init__()
        # NVIDIA starts with deviations of 0.02, with which the signal vanishes in narrow layers
        self.W = nn.Parameter(torch.randn(embodiments, inputs, outputs) / inputs**0.5)
        self.b = nn.Parameter(torch.zeros(embodiments, outputs))

    def forward(self, x: Tensor, embodiment: int) -> Tensor:
        """Outputs [..., outputs] of inputs [..., inputs]."""
        return x @ self.W[embodiment] + self.b[embodiment]


class EmbodimentMLP(nn.Module):
    """Two layers for each embodiment."""

    def __init__(self, embodiments: int, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.layer1 = EmbodimentLinear(embodiments, inputs, hidden)
        self.layer2 = EmbodimentLinear(embodiments, hidden, outputs)

    def forward(self, x: Tensor, embodiment: int) -> Tensor:
        """Outputs [..., outputs] of inputs [..., inputs]."""
        return self.layer2(relu(self.layer1(x, embodiment)), embodiment)


class ActionEncoder(nn.Module):
    """Encoder of noisy actions and their time, for each embodiment."""

    def __init__(self, embodiments: int, action: int, width: int) -> None:
        super().__init__()
        self.W1 = EmbodimentLinear(embodiments, action, width)
        self.W2 = EmbodimentLinear(embodiments, 2 * width, width)
        self.W3 = EmbodimentLinear(embodiments, width, width)

    def forward(self, x: Tensor, bucket: Tensor, embodiment: int) -> Tensor:
        """Tokens [N, H, W] of noisy chunks [N, H, D] at times [N] in buckets."""
        from diffusers.models.embeddings import get_timestep_embedding

        actions = self.W1(x, embodiment)
        times = get_timestep_embedding(bucket, actions.shape[-1], downscale_freq_shift=0)
        times = times.to(actions.dtype).unsqueeze(1).expand_as(actions)
        return self.W3(silu(self.W2(torch.cat((actions, times), -1), embodiment)), embodiment)


class AdaptiveNorm(nn.Module):
    """Norm layer_norm(x) * (1 + scale) + shift; scale and shift are linear in a condition."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 2 * width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """Normed x [N, T, W] at a condition [N, W]."""
        scale, shift = self.linear(silu(condition)).unsqueeze(1).chunk(2, -1)
        return layer_norm(x, x.shape[-1:]) * (1.0 + scale) + shift


class Block(nn.Module):
    """Attention and dense layers with skip connections; norms are adaptive where a time conditions the block.

    It attends to a `context` of that width, or without one to its own tokens.
    """

    def __init__(self, width: int, heads: int, context: int | None = None, *, adaptive: bool) -> None:
        from diffusers.models.attention import Attention, FeedForward

        super().__init__()
        self.heads = heads
        self.norm1 = AdaptiveNorm(width) if adaptive else nn.LayerNorm(width)
        self.attn1 = Attention(width, context, heads, dim_head=width // heads, bias=True)
        self.norm3 = nn.LayerNorm(width, elementwise_affine=not adaptive)
        self.ff = FeedForward(width, activation_fn="gelu-approximate")

    def keys_values(self, context: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [N, heads, P, width of a head] of what is attended to, [N, P, context]."""
        return self._heads(self.attn1.to_k(context)), self._heads(self.attn1.to_v(context))

    def forward(
        self,
        x: Tensor,
        condition: Tensor | None = None,
        keys_values: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [N, T, W] from those before; `mask` is True for what is attended to."""
        normed = self.norm1(x) if condition is None else self.norm1(x, condition)
        keys, values = keys_values or self.keys_values(normed)
        mixed = scaled_dot_product_attention(self._heads(self.attn1.to_q(normed)), keys, values, mask)
        x = x + self.attn1.to_out[0](mixed.transpose(1, 2).flatten(2))
        return x + self.ff(self.norm3(x))

    def _heads(self, x: Tensor) -> Tensor:
        """Split [N, T, heads * width of a head] into [N, heads, T, width of a head]."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class TimeEncoder(nn.Module):
    """Encoder of a denoising time, the condition of all blocks."""

    def __init__(self, width: int) -> None:
        from diffusers.models.embeddings import TimestepEmbedding, Timesteps

        super().__init__()
        self.time_proj = Timesteps(TIMES, flip_sin_to_cos=True, downscale_freq_shift=1)
        self.timestep_embedder = TimestepEmbedding(TIMES, width)

    def forward(self, bucket: Tensor) -> Tensor:
        """Conditions [N, W] of times [N] in buckets."""
        return self.timestep_embedder(self.time_proj(bucket))


class DiffusionTransformer(nn.Module):
    """Transformer whose even blocks attend to features and whose odd blocks attend to its own tokens."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        width = head.width
        self.timestep_encoder = TimeEncoder(width)
        self.transformer_blocks = nn.ModuleList(
            Block(width, head.heads, None if layer % 2 else head.context, adaptive=True) for layer in range(head.layers)
        )
        self.proj_out_1 = nn.Linear(width, 2 * width)
        self.proj_out_2 = nn.Linear(width, head.hidden)

    def keys_values(self, features: Tensor) -> KeysValues:
        """Keys and values of features [N, P, context] for every block that attends to them."""
        return tuple(block.keys_values(features) for block in self.transformer_blocks[::2])

    def forward(self, x: Tensor, keys_values: KeysValues, mask: Tensor, bucket: Tensor) -> Tensor:
        """Hidden states [N, T, hidden] of tokens [N, T, W]; `mask` [N, 1, 1, P] is True for real features."""
        condition = self.timestep_encoder(bucket)
        for layer, block in enumerate(self.transformer_blocks):
            x = block(x, condition) if layer % 2 else block(x, condition, keys_values[layer // 2], mask)
        shift, scale = self.proj_out_1(silu(condition)).unsqueeze(1).chunk(2, -1)
        return self.proj_out_2(layer_norm(x, x.shape[-1:], eps=1e-6) * (1.0 + scale) + shift)


class ContextEncoder(nn.Module):
    """Transformer over the features of pictures and words."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        self.transformer_blocks = nn.ModuleList(
            Block(head.context, head.context_heads, adaptive=False) for _ in range(head.context_layers)
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Features [N, P, W] from those before; `mask` [N, 1, 1, P] is True for real ones."""
        for block in self.transformer_blocks:
            x = block(x, mask=mask)
        return x


class ActionHead(nn.Module):
    """Action head by the published names of its modules."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        self.buckets = head.buckets
        self.model = DiffusionTransformer(head)
        self.state_encoder = EmbodimentMLP(head.embodiments, head.state, head.hidden, head.width)
        self.action_encoder = ActionEncoder(head.embodiments, head.action, head.width)
        self.action_decoder = EmbodimentMLP(head.embodiments, head.hidden, head.hidden, head.action)
        self.future_tokens = nn.Embedding(head.future, head.width)
        self.vlln = nn.LayerNorm(head.context)
        self.vl_self_attention = ContextEncoder(head)
        self.position_embedding = nn.Embedding(head.longest, head.width)
        for embedding in (self.future_tokens, self.position_embedding):
            nn.init.normal_(embedding.weight, std=INITIAL_STD)

    def features(self, hidden: Tensor, real: Tensor) -> Tensor:
        """Features [N, P, W] from the language model's hidden states, which are `real` [N, P] or padding."""
        return self.vl_self_attention(self.vlln(hidden), attended(real))

    def forward(
        self, state: Tensor, x: Tensor, time: Tensor, keys_values: KeysValues, real: Tensor, embodiment: int
    ) -> tuple[Tensor, Tensor]:
        """Direction [N, H, D] from noise to action, and the hidden states [N, H, hidden] before the decoder.

        `state` is [N, state], noisy chunks `x` [N, H, D], times [N] are 1 for noise and 0 for actions.
        """
        bucket = self._bucket(time)
        actions = self.action_encoder(x, bucket, embodiment) + self.position_embedding.weight[: x.shape[1]]
        future = self.future_tokens.weight.expand(len(x), -1, -1)
        tokens = torch.cat((self.state_encoder(state.unsqueeze(1), embodiment), future, actions), 1)
        hidden = self.model(tokens, keys_values, attended(real), bucket)[:, -x.shape[1] :]
        return self.action_decoder(hidden, embodiment), hidden

    def _bucket(self, time: Tensor) -> Tensor:
        """Bucket [N] of a time, counted from the noise."""
        # 1 - t is exact in no float: without the margin, a thousandth of a bucket, 0.3 may fall into the bucket below
        return ((1.0 - time) * self.buckets + 1e-3).long().clamp_min(0)


def attended(real: Tensor) -> Tensor:
    """Mask [N, 1, 1, P] of tokens that are attended to, from `real` [N, P]."""
    return real[:, None, None].bool()
