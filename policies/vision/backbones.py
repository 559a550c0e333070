"""Networks from one camera's pictures to features: a small convolutional one, and vision transformers.

Letters: N pictures, F features, P patches.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from embodied.configuration import Configuration, NonNegativeInt, PositiveInt, Range
from embodied.errors import UserError
from embodied.extras import needs_extra


class Backbone(Enum):
    """`vision.backbone=` of a policy: a small CNN, or a vision transformer of `transformers`."""

    CNN = "cnn"
    SIGLIP = "siglip"
    DINOV2 = "dinov2"


@dataclass
class VisionConfig(Configuration):
    """How a policy sees: `backbone` of `width` channels gives `features` numbers a camera, given the instruction.

    A transformer starts from published `weights`, a folder or a name on the hub, and is trained on unless `frozen`;
    without weights a small one of `width` starts from random ones. For a supervised loss, pictures are shifted by up to
    `shift` pixels, and their brightness, contrast and saturation vary by up to a share `colour`.
    """

    backbone: Backbone = Backbone.CNN
    weights: str | None = None
    frozen: bool = False
    width: PositiveInt = 16
    features: PositiveInt = 128
    shift: NonNegativeInt = 0
    colour: Annotated[float, Range(at_least=0, below=1)] = 0.0

    def __post_init__(self) -> None:
        """Raise UserError for numbers out of range, or options that the backbone does not have."""
        super().__post_init__()
        if self.backbone is Backbone.CNN and self.weights:
            raise UserError("policy.vision.weights are of a transformer; use vision.backbone=siglip or dinov2")
        if self.frozen and not self.weights:
            raise UserError("policy.vision.frozen=true needs policy.vision.weights")


def backbone(config: VisionConfig, height: int, width: int, given: int) -> nn.Module:
    """A network (pictures [N, 3, height, width] in [0, 1], what is asked for [N, given]) -> [N, config.features]."""
    if config.backbone is Backbone.CNN:
        return SpatialCNN(height, width, given, config.width, config.features)
    return VisionTransformer(config, max(height, width), given)


class SpatialCNN(nn.Module):
    """Convolutions, scaled and shifted by what is asked for (FiLM, arXiv 1709.07871), then where each channel responds.

    The place of a channel is its expected coordinates under a softmax over the picture (spatial softmax, arXiv
    1504.00702), which resolves fractions of a pixel. A coarse map beside it keeps what has no single place.
    """

    def __init__(self, height: int, width: int, given: int, channels: int, features: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, channels, 5, stride=2, padding=2)
        self.second = nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1)
        self.third = nn.Conv2d(2 * channels, 2 * channels, 3, padding=1)
        self.films = nn.ModuleList(_film(given, 2 * channels) for _ in range(2))
        self.coarse = nn.Sequential(
            nn.Conv2d(2 * channels, 8, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, channels)
        )
        self.out = nn.Sequential(nn.Linear(5 * channels, features), nn.ReLU())
        places = [torch.linspace(-1.0, 1.0, -(-side // 4)) for side in (height, width)]
        self.register_buffer("grid", torch.stack(torch.meshgrid(*places, indexing="ij"), -1).flatten(0, 1))
        self.log_sharpness = nn.Parameter(torch.zeros(()))
        self.to(memory_format=torch.channels_last)  # as pictures are

    def forward(self, pictures: Tensor, given: Tensor) -> Tensor:
        """Features [N, F]."""
        seen = torch.relu(self.first(pictures))
        for convolution, film in zip((self.second, self.third), self.films, strict=True):
            scale, shift = film(given)[..., None, None].chunk(2, 1)
            seen = torch.relu(convolution(seen) * (1.0 + scale) + shift)
        where = (seen.flatten(2) * self.log_sharpness.exp()).softmax(-1) @ self.grid
        return self.out(torch.cat((where.flatten(1), self.coarse(seen)), -1))


class VisionTransformer(nn.Module):
    """Patches of a picture by SigLIP or DINOv2; what is asked for attends over them.

    Pictures are resized to squares of the transformer's size and standardised by its own mean and deviation.

    Raises:
        UserError: where transformers is not installed, or the weights are missing or of another kind.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, config: VisionConfig, size: int, given: int) -> None:
        super().__init__()
        self.frozen = config.frozen
        self.model, mean, std = _transformer(config, size)
        self.size = self.model.config.image_size if config.weights else size
        inner = self.model.config.hidden_size
        self.query, self.key = nn.Linear(given, inner), nn.Linear(inner, inner)
        self.out = nn.Sequential(nn.Linear(2 * inner, config.features), nn.ReLU())
        self.register_buffer("mean", torch.tensor(mean).view(3, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(3, 1, 1))
        if self.frozen:
            self.model.requires_grad_(False)

    def forward(self, pictures: Tensor, given: Tensor) -> Tensor:
        """Features [N, F]: the patches that answer what is asked for, and the mean of all."""
        if pictures.shape[-2:] != (self.size, self.size):
            pictures = nn.functional.interpolate(pictures, (self.size, self.size), mode="bilinear", antialias=True)
        patches = self.model(pixel_values=(pictures - self.mean) / self.std).last_hidden_state  # [N, P, inner]
        score = (self.key(patches) @ self.query(given).unsqueeze(-1)).squeeze(-1) / patches.shape[-1] ** 0.5
        answer = (score.softmax(-1).unsqueeze(1) @ patches).squeeze(1)
        return self.out(torch.cat((answer, patches.mean(1)), -1))


class _Film(nn.Linear):
    """No change at first."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


def _film(given: int, channels: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(given, 64), nn.ReLU(), _Film(64, 2 * channels))


def _transformer(config: VisionConfig, size: int) -> tuple[nn.Module, list[float], list[float]]:
    """The transformer, and the mean and deviation of pictures that it expects."""
    with needs_extra("vla"):
        from transformers import Dinov2Config, Dinov2Model, SiglipVisionConfig, SiglipVisionModel
        from transformers.image_processing_base import ImageProcessingMixin
    kinds: dict[Backbone, tuple[Any, Any, int]] = {
        Backbone.SIGLIP: (SiglipVisionModel, SiglipVisionConfig, 8),
        Backbone.DINOV2: (Dinov2Model, Dinov2Config, 8),
    }
    model, settings, patch = kinds[config.backbone]
    if not config.weights:
        heads = max(1, config.width // 32)
        made = settings(
            hidden_size=config.width,
            num_hidden_layers=4,
            num_attention_heads=heads,
            patch_size=patch,
            intermediate_size=4 * config.width,
            image_size=-(-size // patch) * patch,
        )
        return model(made), [0.5] * 3, [0.5] * 3
    try:
        if torch.get_default_device().type == "meta":  # shapes alone, see embodied/training/plan.py
            return model(settings.from_pretrained(config.weights)), [0.5] * 3, [0.5] * 3
        found, unused = model.from_pretrained(config.weights, output_loading_info=True)
        said, _ = ImageProcessingMixin.get_image_processor_dict(config.weights)
        mean, std = said["image_mean"], said["image_std"]
    except (OSError, ValueError, KeyError) as error:
        what = f"a {config.backbone.value} model with its preprocessor_config.json"
        raise UserError(f"policy.vision.weights={config.weights}: expected {what} ({error})") from error
    if unused["missing_keys"]:
        raise UserError(
            f"policy.vision.weights={config.weights} lacks {len(unused['missing_keys'])} tensors of a "
            f"{config.backbone.value} model, such as {min(unused['missing_keys'])}"
        )
    return found, mean, std
