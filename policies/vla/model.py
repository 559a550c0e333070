"""pi0 (arXiv 2410.24164) as `transformers` has it, split into what is computed once and once a denoising step.

A vision-language model reads pictures and instruction (the prefix); an action expert reads the robot's state and the
noisy chunk, and attends to the prefix by the keys and values cached of it. Letters: N observations, C cameras,
S pixels of a side, L tokens, H chunk length, D action elements with padding, W width of a hidden state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from embodied.command_line.extras import needs_extra
from policies.vla.inputs import VOCABULARY
from policies.vla.sizes import SIZES, Size

PADDED = 32
"""Elements of pi0's states and actions; shorter ones end in zeros."""

UNREAD = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
"""Dense layers of a language model's last layer that neither its keys nor its values depend on."""


@dataclass
class Prefix:
    """The vision-language model's keys and values, hidden state [N, P, W], and which of P tokens are real [N, P]."""

    cache: Any
    hidden: Tensor
    real: Tensor

    def mean(self) -> Tensor:
        """Mean hidden state of real tokens, [N, W]."""
        weight = self.real.unsqueeze(-1).to(self.hidden.dtype)
        return (self.hidden * weight).sum(1) / weight.sum(1)

    def repeated(self, count: int) -> Prefix:
        """Each of N `count` times, for as many chunks; the cache itself is repeated."""
        if count > 1:
            self.cache.batch_repeat_interleave(count)
        return Prefix(self.cache, *(x.repeat_interleave(count, 0) for x in (self.hidden, self.real)))


class Pi0Model(nn.Module):
    """The network of pi0: `prefix` of an observation, then `velocity` for each denoising step.

    `native` is transformers' PI0ForConditionalGeneration. The expert reads keys and values of the last layer of the
    vision-language model, not what follows them, which is frozen, as it would get no gradient; `unread` are the names
    of those dense layers.
    """

    def __init__(self, native: nn.Module) -> None:
        super().__init__()
        self.native: Any = native
        self.native.model.dit.embed_tokens = None  # a vocabulary that an expert in actions never reads
        settings = native.config
        self.picture_size: int = settings.vlm_config.vision_config.image_size
        self.width: int = settings.vlm_config.text_config.hidden_size
        self.expert_width: int = settings.dit_config.hidden_size
        self.state_size, self.action_size = settings.max_state_dim, settings.max_action_dim
        patches = self.picture_size // settings.vlm_config.vision_config.patch_size
        self.tokens_of_picture = patches**2
        self.image_token: int = settings.vlm_config.image_token_id
        last = f"model.vlm.language_model.layers.{settings.vlm_config.text_config.num_hidden_layers - 1}"
        self.unread = [f"{last}.{name}" for name in UNREAD]
        self._norms = [f"{last}.post_attention_layernorm", "model.vlm.language_model.norm"]
        self.train_all()

    def train_all(self) -> None:
        """Let everything learn that gets a gradient."""
        self.native.requires_grad_(True)
        for name in [*self.unread, *self._norms]:
            self.native.get_submodule(name).requires_grad_(False)

    def prefix(self, pictures: Tensor, tokens: Tensor, real: Tensor) -> Prefix:
        """Read pictures [N, C, 3, S, S] in [-1, 1] and tokens [N, L], which are `real` [N, L] or padding."""
        count, cameras = pictures.shape[:2]
        places = tokens.new_full((count, cameras * self.tokens_of_picture), self.image_token)
        real = torch.cat((torch.ones_like(places), real), 1)
        given = torch.ones(count, cameras, dtype=torch.bool, device=pictures.device)
        embedded = self.native.model.embed_prefix(torch.cat((places, tokens), 1), pictures, given)
        read = self.native.model.vlm(
            inputs_embeds=embedded, attention_mask=real, position_ids=real.cumsum(-1) - 1,
            token_type_ids=torch.zeros_like(real), use_cache=True,
        )  # fmt: skip
        return Prefix(read.past_key_values, read.last_hidden_state, real)

    def velocity(self, prefix: Prefix, state: Tensor, x: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        """Velocity [N, H, D] and the expert's hidden state [N, H, W] at noisy chunks `x` [N, H, D] and times [N].

        `state` [N, state_size] is padded. The cache is left as it was, so that the next step does not see this one.
        """
        embedded = self.native.embed_action_time(state, x, time)
        length = prefix.cache.get_seq_length()
        found = self.native.model(action_embeds=embedded, attention_mask=prefix.real, past_key_values=prefix.cache)
        prefix.cache.crop(length - prefix.cache.get_seq_length())
        hidden = found.last_hidden_state[:, -x.shape[1] :]
        return self.native.action_out_proj(hidden), hidden


def untrained(size: Size, horizon: int, state: int, action: int) -> Pi0Model:
    """A model of random weights for chunks of `horizon` actions.

    Raises:
        UserError: where transformers is not installed.
    """
    with needs_extra("vla"):
        from transformers import PI0Config, PI0ForConditionalGeneration
    sizes = SIZES[size]
    settings = PI0Config(
        vlm_config={
            "model_type": "paligemma", "text_config": sizes.text(VOCABULARY + 1), "vision_config": sizes.vision(),
            "projection_dim": sizes.reading[0], "image_token_id": VOCABULARY,
        },
        dit_config=sizes.expert(), chunk_size=horizon, max_state_dim=max(PADDED, state),
        max_action_dim=max(PADDED, action),
    )  # fmt: skip
    return Pi0Model(PI0ForConditionalGeneration(settings))
