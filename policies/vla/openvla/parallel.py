"""Unchanged PaliGemma of `transformers`, which decodes all tokens of a chunk at once: OpenVLA-OFT (2502.19645).

Letters: N observations, C cameras, S pixels of a side, L tokens of an instruction, H actions of a chunk, A action
dimension, W width of a hidden state.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from embodied.extras import needs_extra
from policies.vla.computing import Computing
from policies.vla.inputs import VOCABULARY
from policies.vla.sizes import SIZES, Size

BINS = 256
"""Number of values of an action element in OpenVLA."""


class StateProjector(nn.Module):
    """Projection of the robot's state to one token, with OpenVLA-OFT's layers."""

    def __init__(self, state: int, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(state, width)
        self.fc2 = nn.Linear(width, width)

    def forward(self, state: Tensor) -> Tensor:
        """Tokens [N, W] of states [N, state]."""
        return self.fc2(nn.functional.gelu(self.fc1(state)))


class ParallelModel(nn.Module):
    """Network on pictures, instruction, state and an empty token for each of H * A elements, all attending to all.

    `native` is transformers' PaliGemmaModel, and the last `bins` entries of its vocabulary are an element's values. An
    empty token is a learned embedding of its position: zeros, as in OpenVLA-OFT, would distinguish positions only
    from the second layer on, which is late in a model of few layers.
    """

    def __init__(self, native: nn.Module, state: int, elements: int, bins: int) -> None:
        super().__init__()
        self.native: Any = native
        self.bins = bins
        self.computing = Computing()
        self.picture_size: int = native.config.vision_config.image_size
        self.width: int = native.config.text_config.hidden_size
        self.state = StateProjector(state, self.width)
        self.empty = nn.Parameter(torch.randn(elements, self.width))

    def forward(self, tokens: Tensor, real: Tensor, pictures: Tensor, state: Tensor) -> Tensor:
        """Hidden states [N, H * A, W] of the elements.

        Inputs are tokens [N, L] that are `real` [N, L] or padding, pictures [N, C, 3, S, S] in [-1, 1], and states [N,
        state].
        """
        return self.computing.run(ParallelModel._read, self, tokens, real, pictures, state).float()

    def _read(self, tokens: Tensor, real: Tensor, pictures: Tensor, state: Tensor) -> Tensor:
        count = len(pictures)
        patches = self.native.get_image_features(pictures.flatten(0, 1)).pooler_output.reshape(count, -1, self.width)
        words = self.native.get_input_embeddings()(tokens)
        empty = self.empty.expand(count, -1, -1)
        # [N, patches + L + 1 + H * A, W]
        embedded = torch.cat((patches, words, self.state(state).unsqueeze(1), empty), 1)
        before, after = (real.new_ones(count, places) for places in (patches.shape[1], 1 + len(self.empty)))
        real = torch.cat((before, real, after), 1)
        output = self.native(
            inputs_embeds=embedded,
            attention_mask=real,
            position_ids=real.cumsum(-1) - 1,
            token_type_ids=torch.zeros_like(real),
            use_cache=False,  # tokens of type 0: every token attends to every other
        )
        return output.last_hidden_state[:, -len(self.empty) :]

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores [..., bins] of an element's values, from hidden states [..., W]."""
        return (hidden @ self.native.get_input_embeddings().weight[-self.bins :].T.float()).float()


class Regression(nn.Module):
    """OpenVLA-OFT's regression from the hidden states of an action's elements to the action, with its layers."""

    def __init__(self, width: int, actions: int, blocks: int = 2) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(width * actions)
        self.fc1 = nn.Linear(width * actions, width)
        self.mlp_resnet_blocks = nn.ModuleList(
            nn.ModuleDict({"ffn": nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU())})
            for _ in range(blocks)
        )
        self.layer_norm2 = nn.LayerNorm(width)
        self.fc2 = nn.Linear(width, actions)

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalised actions [N, H, A] from hidden states [N, H, A, W]."""
        x = torch.relu(self.fc1(self.layer_norm1(hidden.flatten(-2))))
        for block in self.mlp_resnet_blocks:
            x = x + block["ffn"](x)
        return self.fc2(self.layer_norm2(x))


def untrained(size: Size, bins: int) -> nn.Module:
    """Build a PaliGemma of random weights.

    After the words its vocabulary has an unread entry for pictures, and the `bins`.

    Raises:
        UserError: where transformers is not installed.
    """
    with needs_extra("vla"):
        from transformers import PaliGemmaConfig, PaliGemmaModel
    sizes = SIZES[size]
    settings = PaliGemmaConfig(
        text_config=sizes.text(VOCABULARY + 1 + bins),
        vision_config=sizes.vision(),
        projection_dim=sizes.reading[0],
        image_token_id=VOCABULARY,
    )
    return PaliGemmaModel(settings)
