"""Network of GR00T N1.5 (arXiv 2503.14734): Eagle 2.5, a vision-language model, and a flow-matching action head.

SigLIP encodes pictures, whose tokens replace placeholders in the prompt, which the first layers of Qwen3 read; both are
transformers'. The action head (`policies.vla.groot.head`) reads features of all tokens, which are computed once, and
denoises the chunk. Tensors have the published names, save for those of SigLIP, which transformers has shortened.
Letters: N observations, C cameras, S pixels of a side, L tokens, H chunk length, D action elements with padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from embodied.extras import needs_extra
from policies.vla.groot.head import ActionHead, Head
from policies.vla.inputs import VOCABULARY
from policies.vla.model import PADDED, FlowModel, KeysValues, Prefix, picture_tokens
from policies.vla.sizes import SIZES, Size

NOISE_SCALE = 0.999
"""Times of the supervised loss are Beta(1.5, 1), divided by this."""
BUCKETS = 1000
FUTURE = 4
"""Buckets of times and learned tokens of a new model."""


@dataclass(frozen=True)
class Architecture:
    """Sizes of a GR00T: transformers' configurations of Qwen3 (`text`) and SigLIP (`vision`), and those of the head.

    `picture_token` is the placeholder in prompts. The robot is one of the head's embodiments, `embodiment`.
    """

    text: Any
    vision: Any
    picture_token: int
    head: Head
    embodiment: int = 0

    @property
    def chunk_size(self) -> int:
        """Actions of a chunk."""
        return self.head.chunk_size


class Network(nn.Module):
    """Modules of GR00T by their published names, without the vocabulary's head, which is never read.

    Raises:
        UserError: where transformers or diffusers is not installed.
    """

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        with needs_extra("vla"):
            import diffusers  # noqa: F401 - of the head
            from transformers import Qwen3Model, SiglipVisionModel
        self.architecture = architecture
        text, vision = architecture.text, architecture.vision
        eagle: Any = nn.Module()
        eagle.vision_model = SiglipVisionModel(vision)
        eagle.mlp1 = nn.Sequential(nn.Linear(vision.hidden_size, text.hidden_size))
        eagle.language_model = nn.Module()
        eagle.language_model.model = Qwen3Model(text)
        self.backbone: Any = nn.Module()
        self.backbone.eagle_model = eagle
        self.action_head = ActionHead(architecture.head)
        self.float()  # transformers builds a model in the type that its configuration names


class GrootModel(FlowModel):
    """Network of GR00T: `prefix` of an observation, then `velocity` for each denoising step."""

    adapted = (
        r"(backbone\.eagle_model\.language_model\.model\.layers\.\d+\."
        r"(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj))"
        r"|(action_head\.model\.transformer_blocks\.\d+\.(attn1\.(to_[qkv]|to_out\.0)|ff\.net\.(0\.proj|2)))"
    )

    def __init__(self, native: Network) -> None:
        architecture = native.architecture
        head = architecture.head
        super().__init__(native)
        self.picture_size = architecture.vision.image_size
        self.width = head.context
        self.expert_width = head.hidden
        self.state_size = head.state
        self.action_size = head.action
        self.tokens_of_picture = (self.picture_size // architecture.vision.patch_size) ** 2
        self.vocabulary = architecture.text.vocab_size

    @property
    def vision_language(self) -> nn.Module:
        """Eagle."""
        return self.native.backbone.eagle_model

    def prefix(self, pictures: Tensor, tokens: Tensor, real: Tensor) -> Prefix:
        """Read pictures [N, C, 3, S, S] in [-1, 1] and tokens [M, L], which are `real` [M, L] or padding.

        Each prompt has a placeholder for every token of its pictures. M is N or a multiple: then further rows are of
        the same pictures in turn, which are encoded once.
        """
        return Prefix(*self.computing.run(GrootModel._read, self, tokens, real, pictures))

    def training_times(self, count: int, device: torch.device) -> Tensor:
        """Draw `count` denoising times of the supervised loss, of which few are above 1."""
        return torch.rand(count, device=device) ** (1.0 / 1.5) / NOISE_SCALE

    def _read(self, tokens: Tensor, real: Tensor, pictures: Tensor) -> tuple[KeysValues, Tensor, Tensor]:
        eagle, head = self.native.backbone.eagle_model, self.native.action_head
        encoded = eagle.mlp1(eagle.vision_model(pixel_values=pictures.flatten(0, 1)).last_hidden_state)
        picture_features = picture_tokens(encoded, len(pictures), len(tokens))
        language = eagle.language_model.model
        words = language.get_input_embeddings()(tokens)
        places = (tokens == self.native.architecture.picture_token).unsqueeze(-1)
        embedded = words.masked_scatter(places, picture_features.to(words.dtype))
        hidden = language(inputs_embeds=embedded, attention_mask=real, use_cache=False).last_hidden_state
        features = head.features(hidden, real)
        return head.model.keys_values(features), features, real

    def _denoise(
        self, keys_values: KeysValues, real: Tensor, state: Tensor, time: Tensor, x: Tensor
    ) -> tuple[Tensor, Tensor]:
        embodiment = self.native.architecture.embodiment
        direction, hidden = self.native.action_head(state, x, time, keys_values, real, embodiment)
        # GR00T predicts action - noise, the velocity is noise - action
        return -direction, hidden


def untrained(size: Size, horizon: int, state: int, action: int) -> GrootModel:
    """Build a model of random weights for chunks of `horizon` actions, with a single embodiment.

    Raises:
        UserError: where transformers is not installed.
    """
    with needs_extra("vla"):
        from transformers import Qwen3Config, SiglipVisionConfig

    sizes = SIZES[size]
    text = Qwen3Config(**sizes.text(VOCABULARY + 1) | {"model_type": "qwen3"})
    head = Head(
        width=sizes.acting[0],
        heads=sizes.heads,
        layers=2 * sizes.layers,
        hidden=sizes.acting[0],
        context=sizes.reading[0],
        context_heads=sizes.heads,
        context_layers=1,
        state=max(PADDED, state),
        action=max(PADDED, action),
        embodiments=1,
        future=FUTURE,
        chunk_size=horizon,
        longest=horizon,
        buckets=BUCKETS,
    )
    return GrootModel(Network(Architecture(text, SiglipVisionConfig(**sizes.vision()), VOCABULARY, head)))
