"""Network of pi0.5 (arXiv 2504.16054): pi0's network with another expert, whose norms are adaptive (AdaRMS).

Letters: N observations, H chunk length, D action elements with padding, W width of a hidden state.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from policies.vla.model import Cache, KeysValues, Pi0Model


class AdaptiveNorm(nn.Module):
    """Adaptive norm x / rms(x) * (1 + scale) + shift with a gate; scale, shift and gate are linear in a condition."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.dense = nn.Linear(width, 3 * width)
        nn.init.zeros_(self.dense.weight)
        nn.init.zeros_(self.dense.bias)

    def forward(self, x: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        """Normed x [N, H, W] and the gate [N, 1 or H, W] for a condition [N, W], or [N, H, W] of each action."""
        modulation = self.dense(condition)
        parts = (modulation if modulation.ndim == 3 else modulation.unsqueeze(1)).unflatten(-1, (3, -1))
        scale, shift, gate = (parts[..., part, :] for part in range(3))
        # x / sqrt(mean(x^2) + epsilon), in float32
        normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.epsilon)
        return (normed * (1.0 + scale) + shift).type_as(x), gate


class AdaptiveLayer(nn.Module):
    """Layer of Gemma with adaptive norms, whose gates scale the outputs of attention and of the dense layers."""

    def __init__(self, layer: Any, width: int, epsilon: float) -> None:  # noqa: ANN401 - of transformers
        super().__init__()
        self.self_attn = layer.self_attn
        self.mlp = layer.mlp
        self.input_layernorm = AdaptiveNorm(width, epsilon)
        self.post_attention_layernorm = AdaptiveNorm(width, epsilon)

    def forward(self, hidden_states: Tensor, *, condition: Tensor, **attention: Any) -> Tensor:  # noqa: ANN401
        """Hidden states [N, H, W] at a condition [N, W] or [N, H, W]."""
        normed, gate = self.input_layernorm(hidden_states, condition)
        hidden_states = hidden_states + gate * self.self_attn(hidden_states=normed, **attention)[0]
        normed, gate = self.post_attention_layernorm(hidden_states, condition)
        return hidden_states + gate * self.mlp(normed)


class TimeEmbedding(nn.Module):
    """Embeddings of noisy chunks, and of denoising times as a condition."""

    def __init__(self, embedding: Any, width: int) -> None:  # noqa: ANN401 - of transformers
        super().__init__()
        self.sinusoid_embeds = embedding.sinusoid_embeds
        self.action_in_proj = embedding.action_in_proj
        self.time_mlp_in = nn.Linear(width, width)
        self.time_mlp_out = nn.Linear(width, width)

    def forward(self, x: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings [N, H, W] and condition [N, W] of chunks [N, H, D] and times [N]; or [N, H, W] of [N, H]."""
        embedded = self.sinusoid_embeds(time.flatten()).view(*time.shape, -1).to(x.dtype)
        condition = nn.functional.silu(self.time_mlp_out(nn.functional.silu(self.time_mlp_in(embedded))))
        return self.action_in_proj(x), condition


class Pi05Model(Pi0Model):
    """Network of pi0.5: transformers' pi0 with another expert."""

    def __init__(self, native: nn.Module) -> None:
        super().__init__(native)
        expert = self.native.model.dit
        settings = self.native.config.dit_config
        sizes = settings.hidden_size, settings.rms_norm_eps
        expert.layers = nn.ModuleList(AdaptiveLayer(layer, *sizes) for layer in expert.layers)
        expert.norm = nn.Identity()  # the last norm needs the condition, which transformers does not pass to it
        self.native.final_norm = AdaptiveNorm(*sizes)
        self.native.embed_action_time = TimeEmbedding(self.native.embed_action_time, settings.hidden_size)

    def _denoise(
        self, keys_values: KeysValues, real: Tensor, state: Tensor, time: Tensor, x: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Denoise as in pi0; the state is in the prefix, and actions attend to it and to each other."""
        embedded, condition = self.native.embed_action_time(x, time)
        mask = torch.cat((real.bool(), real.new_ones(x.shape[:2], dtype=torch.bool)), 1)
        positions = real.sum(1, keepdim=True) + torch.arange(x.shape[1], device=x.device)
        output = self.native.model.dit(
            inputs_embeds=embedded,
            attention_mask=mask[:, None, None].expand(-1, 1, x.shape[1], -1),
            position_ids=positions,
            past_key_values=Cache(keys_values),
            condition=condition,
        ).last_hidden_state
        hidden, _ = self.native.final_norm(output, condition)
        return self.native.action_out_proj(hidden), hidden
