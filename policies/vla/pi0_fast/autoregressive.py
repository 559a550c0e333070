"""Unchanged PaliGemma of `transformers` that writes an answer token by token, as pi0-FAST (arXiv 2501.09747).

Tokens of pictures and prompt attend to each other, those of the answer to them and to earlier ones. Letters: N
observations, C cameras, S pixels of a side, L tokens of a prompt, M of an answer, W width of a hidden state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from policies.vla.computing import Computing


@dataclass
class Reading:
    """Hidden state [N, W] at the last token, the mean one [N, W] of the prompt, the cache, and the mask of tokens."""

    last: Tensor
    mean: Tensor
    cache: Any
    real: Tensor  # [N, tokens so far]


class AutoregressiveModel(nn.Module):
    """Network on pictures, prompt and the answer so far; `native` is transformers' PaliGemmaModel."""

    def __init__(self, native: nn.Module) -> None:
        super().__init__()
        self.native: Any = native
        self.computing = Computing()
        self.picture_size: int = native.config.vision_config.image_size
        self.width: int = native.config.text_config.hidden_size
        self.vocabulary: int = native.config.text_config.vocab_size

    def forward(self, pictures: Tensor, tokens: Tensor, real: Tensor, answer: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states [N, M, W] at the tokens of an `answer` [N, M], and the mean one [N, W] of what comes before.

        Inputs are pictures [N, C, 3, S, S] in [-1, 1] and tokens [N, L] of the prompt that are `real` [N, L] or
        padding.
        """
        hidden, mean = self.computing.run(AutoregressiveModel._whole, self, pictures, real, answer, tokens)
        return hidden.float(), mean.float()

    def _whole(self, pictures: Tensor, real: Tensor, answer: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        reading = self._pass(pictures, real, answer, None, tokens)
        return reading[0][:, -answer.shape[1] :], reading[1]

    @torch.no_grad()
    def read(self, pictures: Tensor, tokens: Tensor, real: Tensor, lead: Tensor) -> Reading:
        """Read pictures, prompt and the first tokens `lead` [N, M] of the answer, from which `write` goes on."""
        from transformers import DynamicCache

        cache = DynamicCache()
        hidden, mean, real = self.computing.run(AutoregressiveModel._pass, self, pictures, real, lead, cache, tokens)
        return Reading(hidden[:, -1].float(), mean.float(), cache, real)

    @torch.no_grad()
    def write(self, reading: Reading, token: Tensor) -> None:
        """Append a `token` [N] to the answer."""
        reading.real = torch.cat((reading.real, reading.real.new_ones(len(token), 1)), 1)
        hidden = self.computing.run(AutoregressiveModel._next, self, reading.real, reading.cache, token)
        reading.last = hidden[:, -1].float()

    def _next(self, real: Tensor, cache: Any, token: Tensor) -> Tensor:  # noqa: ANN401 - of transformers
        """Hidden state [N, 1, W] at a `token` [N] after those in the `cache`."""
        return self.native(
            inputs_embeds=self.native.get_input_embeddings()(token.unsqueeze(1)),
            attention_mask=real,
            position_ids=real.sum(1, keepdim=True) - 1,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state

    def _pass(
        self,
        pictures: Tensor,
        real: Tensor,
        answer: Tensor,
        cache: Any,  # noqa: ANN401 - of transformers
        tokens: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states of all tokens, the mean one of those before the answer, and the mask of tokens."""
        count = len(pictures)
        patches = self.native.get_image_features(pictures.flatten(0, 1)).pooler_output.reshape(count, -1, self.width)
        words = self.native.get_input_embeddings()(torch.cat((tokens, answer), 1))
        before = torch.cat((real.new_ones(count, patches.shape[1]), real), 1)
        mask = torch.cat((before, torch.ones_like(answer)), 1)
        output = self.native(
            inputs_embeds=torch.cat((patches, words), 1),
            attention_mask=mask,
            position_ids=mask.cumsum(-1) - 1,
            # tokens of type 0 attend to each other, those of type 1 to earlier ones
            token_type_ids=torch.cat((torch.zeros_like(before), torch.ones_like(answer)), 1),
            past_key_values=cache,
            use_cache=cache is not None,
        )
        hidden = output.last_hidden_state
        weight = before.unsqueeze(-1).to(hidden.dtype)
        mean = (hidden[:, : before.shape[1]] * weight).sum(1) / weight.sum(1)
        return hidden, mean, mask

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores [..., vocabulary] of the next token, from hidden states [..., W]."""
        return (hidden @ self.native.get_input_embeddings().weight.T.float()).float()
