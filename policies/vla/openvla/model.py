"""OpenVLA's Prismatic model on parts of `transformers`: OpenVLA (2406.09246) and OpenVLA-OFT (2502.19645).

DINOv2 with registers and SigLIP encode each picture (arXiv 2402.07865); their concatenated patches pass a
projector. OFT decodes a chunk at once: a Llama without a causal mask reads the beginning, the patches of every
picture, the robot's state, the prompt, an empty token for each element of the chunk, and the end. OpenVLA writes one
element after the other: a causal Llama reads the same up to the prompt, then the tokens of the elements before. As in
any language model the output at a position belongs to the next one, so that the first element is the output at the
prompt's last token.
Source of these facts: github.com/moojink/openvla-oft and its fork of transformers; github.com/openvla/openvla.
Differs from them: pictures do not pass JPEG. Letters: N observations, C cameras, S pixels of a side, L tokens of a
prompt, A action dimension, H actions of a chunk, W width of a hidden state.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from policies.vla.computing import Computing
from policies.vla.inputs import Inputs, Tokenizer, quantile
from policies.vla.openvla.parallel import StateProjector

FRAME = "In: What action should the robot take to {}?\nOut:"
SPACE = "▁"
"""Token between the prompt and the action."""
LONGEST = 64
"""Number of tokens of a prompt, with padding, which comes first."""
CROPPED = 0.9
"""Share of a picture's area that is cropped from its middle, the size of the crops in training."""
LOBES = 3
"""Number of lobes of the Lanczos kernel that resizes pictures."""


class Projector(nn.Module):
    """Projection of patches to the width of the language model, with Prismatic's layers."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(inputs, 4 * inputs)
        self.fc2 = nn.Linear(4 * inputs, width)
        self.fc3 = nn.Linear(width, width)

    def forward(self, patches: Tensor) -> Tensor:
        """Embeddings [..., W] of patches [..., inputs]."""
        return self.fc3(nn.functional.gelu(self.fc2(nn.functional.gelu(self.fc1(patches)))))


class Prismatic(nn.Module):
    """Container of the parts: `dino`, `siglip` and `language_model` of transformers, and the vocabulary's `bins`.

    The vision models lack the layers after the second-to-last one and the last norm, because nothing reads them.
    """

    def __init__(self, dino: nn.Module, siglip: nn.Module, language_model: nn.Module, bins: int) -> None:
        super().__init__()
        self.dino: Any = dino
        self.siglip: Any = siglip
        self.language_model: Any = language_model
        self.dino.layernorm = nn.Identity()
        self.siglip.post_layernorm = nn.Identity()
        self.dino.embeddings.mask_token = None
        width = self.language_model.config.hidden_size
        self.projector = Projector(self.dino.config.hidden_size + self.siglip.config.hidden_size, width)
        self.bins = nn.Linear(width, bins, bias=False)


class OpenVLAModel(nn.Module):
    """Network from pictures, prompt and state to the hidden states of a chunk's elements, like `ParallelModel`.

    With `autoregressive` these also depend on the elements before, whose bins begin at the token `first_bin`. `means`
    and `deviations` [2, 3] of colours from 0 to 1 are for DINOv2 and SigLIP. With a `state_size` of 0 the state has no
    token. Adapters are on layers with names like `adapted`.
    """

    adapted = r".*\.layers?\.\d+\.(.*_proj|mlp\.fc\d)|projector\.fc\d"
    unread = ()
    means: Tensor
    deviations: Tensor

    def __init__(
        self,
        native: Prismatic,
        state_size: int,
        elements: int,
        means: list[list[float]],
        deviations: list[list[float]],
        *,
        autoregressive: bool = False,
        first_bin: int = 0,
    ) -> None:
        super().__init__()
        self.native = native
        self.elements = elements
        self.autoregressive = autoregressive
        self.first_bin = first_bin
        self.computing = Computing()
        self.picture_size: int = native.dino.config.image_size
        self.width: int = native.language_model.config.hidden_size
        self.state = StateProjector(state_size, self.width) if state_size else None
        self.register_buffer("means", torch.tensor(means))
        self.register_buffer("deviations", torch.tensor(deviations))

    def forward(
        self, tokens: Tensor, real: Tensor, pictures: Tensor, state: Tensor | None, bins: Tensor | None = None
    ) -> Tensor:
        """Hidden states [N, H * A, W] of the elements.

        Inputs are tokens [N, L] that are `real` [N, L] or padding, which comes first, pictures [N, C, 3, S, S] in
        [-1, 1], and states [N, state_size], if they are read. Written one after the other, the elements are the first
        one and those after `bins` [N, M]: [N, M + 1, W].
        """
        if self.autoregressive:
            assert bins is not None, "expected the elements before"
            return self.computing.run(OpenVLAModel._follow, self, tokens, real, state, pictures, bins).float()
        return self.computing.run(OpenVLAModel._read, self, tokens, real, state, pictures).float()

    @torch.no_grad()
    def write(
        self,
        tokens: Tensor,
        real: Tensor,
        pictures: Tensor,
        state: Tensor | None,
        choose: Callable[[Tensor, int], Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Hidden states [N, H * A, W] and bins [N, H * A] of elements that are written one after the other.

        `choose` returns the bins [N] given the hidden states [N, W] and the number of an element.
        """
        from transformers import DynamicCache

        cache = DynamicCache()
        embedded, real = self.computing.run(OpenVLAModel._context, self, tokens, real, state, pictures)
        hidden, bins = [], []
        for element in range(self.elements):
            output = self.computing.run(OpenVLAModel._next, self, cache, real, embedded)
            hidden.append(output.float())
            bins.append(choose(hidden[-1], element))
            embedded = self.native.language_model.embed_tokens(self.first_bin + bins[-1].unsqueeze(1))
            real = torch.cat((real, real.new_ones(len(real), 1)), 1)
        return torch.stack(hidden, 1), torch.stack(bins, 1)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores [..., BINS] of an element's values, from hidden states [..., W]."""
        return (hidden @ self.native.bins.weight.T.float()).float()

    def _read(self, tokens: Tensor, real: Tensor, state: Tensor | None, pictures: Tensor) -> Tensor:
        """Hidden states of all elements at once."""
        context, real = self._context(tokens, real, state, pictures)
        language_model = self.native.language_model
        end = language_model.embed_tokens(tokens.new_full((len(tokens), 1), language_model.config.eos_token_id))
        # order: context, H * A empty tokens, end
        embedded = torch.cat((context, context.new_zeros(len(tokens), self.elements, self.width), end), 1)
        real = torch.cat((real, real.new_ones(len(real), self.elements + 1)), 1)
        output = language_model(
            inputs_embeds=embedded,
            position_ids=real.cumsum(-1) - 1,
            use_cache=False,
            # every token attends to every other
            attention_mask=real.bool()[:, None, None].expand(-1, 1, real.shape[1], -1),
        )
        return output.last_hidden_state[:, -self.elements - 2 : -2]  # each output is one position before its element

    def _follow(self, tokens: Tensor, real: Tensor, state: Tensor | None, pictures: Tensor, bins: Tensor) -> Tensor:
        """Hidden states of the first element and of those after `bins`."""
        context, real = self._context(tokens, real, state, pictures)
        language_model = self.native.language_model
        embedded = torch.cat((context, language_model.embed_tokens(self.first_bin + bins)), 1)
        real = torch.cat((real, real.new_ones(bins.shape)), 1)
        output = language_model(
            inputs_embeds=embedded, position_ids=real.cumsum(-1) - 1, use_cache=False, attention_mask=real
        )
        return output.last_hidden_state[:, -bins.shape[1] - 1 :]

    def _next(self, cache: Any, real: Tensor, embedded: Tensor) -> Tensor:  # noqa: ANN401 - of transformers
        """Hidden state [N, W] at the last of the tokens `embedded` after those in the `cache`."""
        output = self.native.language_model(
            inputs_embeds=embedded,
            position_ids=(real.cumsum(-1) - 1)[:, -embedded.shape[1] :],
            attention_mask=real,
            past_key_values=cache,
            use_cache=True,
        )
        return output.last_hidden_state[:, -1]

    def _context(self, tokens: Tensor, real: Tensor, state: Tensor | None, pictures: Tensor) -> tuple[Tensor, Tensor]:
        """Embedded beginning, patches, state and prompt, and which of them are real."""
        count = len(pictures)
        embed = self.native.language_model.embed_tokens
        beginning = embed(tokens.new_full((count, 1), self.native.language_model.config.bos_token_id))
        patches = self.native.projector(self._patches(pictures.flatten(0, 1))).reshape(count, -1, self.width)
        before = [beginning, patches]
        if self.state:
            before.append(self.state(state).unsqueeze(1))
        real_before = real.new_ones(count, sum(part.shape[1] for part in before))
        return torch.cat((*before, embed(tokens)), 1), torch.cat((real_before, real), 1)

    def _patches(self, pictures: Tensor) -> Tensor:
        """Concatenated patch features of DINOv2 and SigLIP, of pictures [M, 3, S, S] in [-1, 1]."""
        shares = (pictures + 1.0) / 2.0
        native, (dino, siglip) = (
            self.native,
            (
                (shares - mean[:, None, None]) / deviation[:, None, None]
                for mean, deviation in zip(self.means, self.deviations, strict=True)
            ),
        )
        unread = 1 + native.dino.config.num_register_tokens
        first = native.dino(pixel_values=dino).last_hidden_state[:, unread:]
        return torch.cat((first, native.siglip(pixel_values=siglip).last_hidden_state), -1)


class PromptedInputs(Inputs):
    """Inputs of OpenVLA-OFT: pictures in the contract's order, stretched and cropped; a prompt; the state in [-1, 1].

    The state is scaled by its range between the first and the last of a hundred quantiles, which is stored in `state`
    as `mean` (its beginning) and `std` (its length).
    """

    @torch.no_grad()
    def fit(self, observation: TensorDict) -> None:
        """Compute the range of the state from observations [N]."""
        super().fit(observation)
        values = self.state.concatenated(observation, self.state.keys)
        low, high = (quantile(values, share) for share in (0.01, 0.99))
        self.take(low, high - low)

    @torch.no_grad()
    def take(self, begin: Tensor, length: Tensor) -> None:
        """Set the range of the first elements of the state, from vectors of equal length."""
        self.state.mean[: len(begin)] = begin
        self.state.std[: len(begin)] = length
        self.state.fitted.fill_(True)

    def standardised_state(self, observation: TensorDict) -> Tensor:
        """Robot's state [N, state_size] in [-1, 1]; RuntimeError before `fit`."""
        # 2 (x - begin) / length - 1, clamped to [-1, 1]
        return (2.0 * super().standardised_state(observation) - 1.0).clamp(-1.0, 1.0)

    def pictures(self, observation: TensorDict, size: int) -> Tensor:
        """Pictures [N, C, 3, size, size] in [-1, 1]."""
        return torch.stack([cropped(observation[key], size) for key in self.cameras], 1)


class PromptTokenizer(Tokenizer):
    """Tokenizer of prompts, of the library `tokenizers`, which appends `SPACE`; the model adds the beginning."""

    longest = LONGEST
    spaces_underscores = False

    def _ids(self, instruction: str) -> list[int]:
        return [*self.tokenizer.encode(FRAME.format(instruction.lower()), add_special_tokens=False).ids, self.space]

    @property
    def space(self) -> int:
        """Id of the token `SPACE`."""
        return self.tokenizer.token_to_id(SPACE)

    def _padded(self, row: list[int], padding: int, length: int) -> list[int]:
        return [padding] * (length - len(row)) + row


def cropped(images: Tensor, size: int) -> Tensor:
    """Resize images [N, height, width, 3], uint8, and crop the middle `CROPPED`: [N, 3, size, size] in [-1, 1].

    Numbers are rounded like TensorFlow's in OpenVLA-OFT, between both steps and at the end.
    """
    resized = images.movedim(-1, 1).float()
    if resized.shape[-2:] != (size, size):
        row_weights, column_weights = (lanczos(pixels, size).to(resized.device) for pixels in resized.shape[-2:])
        resized = (row_weights @ resized @ column_weights.T).round().clamp(0.0, 255.0)
    middle = torch.eye(2, 3, device=resized.device) * math.sqrt(CROPPED)
    grid = nn.functional.affine_grid(middle.expand(len(resized), 2, 3), list(resized.shape), align_corners=True)
    resized = nn.functional.grid_sample(resized, grid, padding_mode="border", align_corners=True)
    return (resized * (255.5 / 255.0)).floor() / 127.5 - 1.0


@cache
def lanczos(source: int, target: int) -> Tensor:
    """Weights [target, source] of a row's pixels in a row resized by Lanczos' kernel, without aliasing."""
    scale = source / target
    centres = (torch.arange(target, device="cpu") + 0.5) * scale
    offset = (torch.arange(source, device="cpu") + 0.5 - centres[:, None]) / max(scale, 1.0)
    # L(x) = sinc(x) sinc(x / LOBES) within LOBES, stretched by the scale when shrinking
    shares = torch.where(offset.abs() < LOBES, torch.sinc(offset) * torch.sinc(offset / LOBES), 0.0)
    return shares / shares.sum(-1, keepdim=True)
