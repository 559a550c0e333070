"""Networks from one camera's pictures to features: a small convolutional one, and vision transformers.

Letters: N pictures, F features, P patches.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from embodied.configuration import Configuration, NonNegativeInt, Pixels, PositiveInt, Range
from embodied.errors import UserError
from embodied.extras import needs_extra


class Backbone(Enum):
    """Value of the option `vision.backbone` of a policy: a small CNN, or a vision transformer of `transformers`."""

    CNN = "cnn"
    SIGLIP = "siglip"
    DINOV2 = "dinov2"


@dataclass
class VisionConfig(Configuration):
    """Vision of a policy: `backbone` of `width` channels computes `features` per camera, given the instruction.

    A transformer starts from published `weights`, a folder or a name on the hub, and is trained unless `frozen`: all
    cameras and critics then share one. It sees pictures of `size` pixels a side (None: as in its own training), which
    decides what it costs. Without weights a small one of `width` starts from random ones. For a supervised loss,
    pictures are shifted by up to `shift` pixels, and their brightness, contrast and saturation vary by up to a share
    `colour`.
    """

    backbone: Backbone = Backbone.CNN
    weights: str | None = None
    frozen: bool = False
    size: Pixels | None = None
    width: PositiveInt = 16
    features: PositiveInt = 128
    shift: NonNegativeInt = 0
    colour: Annotated[float, Range(at_least=0, below=1)] = 0.0

    def __post_init__(self) -> None:
        """Raise UserError for numbers out of range, or options that the backbone does not have."""
        super().__post_init__()
        if self.backbone is Backbone.CNN and self.weights:
            raise UserError("policy.vision.weights are of a transformer; use vision.backbone=siglip or dinov2")
        if not self.weights and (self.frozen or self.size):
            option = "frozen=true" if self.frozen else f"size={self.size}"
            raise UserError(f"policy.vision.{option} needs policy.vision.weights")


def backbone(config: VisionConfig, height: int, width: int, instruction_width: int) -> nn.Module:
    """Build a network (pictures [N, 3, height, width] in [0, 1], instruction [N, W]) -> [N, config.features]."""
    if config.backbone is Backbone.CNN:
        return SpatialCNN(height, width, instruction_width, config.width, config.features)
    return VisionTransformer(config, max(height, width), instruction_width)


class SpatialCNN(nn.Module):
    """CNN with channels scaled and shifted by the instruction (FiLM, arXiv 1709.07871), then their positions.

    The position of a channel is its expected coordinates under a softmax over the picture (spatial softmax, arXiv
    1504.00702), which resolves fractions of a pixel. A coarse map retains responses without a single position.
    """

    def __init__(self, height: int, width: int, instruction_width: int, channels: int, features: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, channels, 5, stride=2, padding=2)
        self.second = nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1)
        self.third = nn.Conv2d(2 * channels, 2 * channels, 3, padding=1)
        self.films = nn.ModuleList(_film(instruction_width, 2 * channels) for _ in range(2))
        self.coarse = nn.Sequential(
            nn.Conv2d(2 * channels, 8, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, channels)
        )
        self.out = nn.Sequential(nn.Linear(5 * channels, features), nn.ReLU())
        places = [torch.linspace(-1.0, 1.0, -(-side // 4)) for side in (height, width)]
        self.register_buffer("grid", torch.stack(torch.meshgrid(*places, indexing="ij"), -1).flatten(0, 1))
        self.log_sharpness = nn.Parameter(torch.zeros(()))
        self.to(memory_format=torch.channels_last)  # as pictures are

    def forward(self, pictures: Tensor, instruction: Tensor) -> Tensor:
        """Features [N, F]."""
        channels = torch.relu(self.first(pictures))
        for convolution, film in zip((self.second, self.third), self.films, strict=True):
            scale, shift = film(instruction)[..., None, None].chunk(2, 1)
            channels = torch.relu(convolution(channels) * (1.0 + scale) + shift)
        # sum_ij softmax(sharpness h)_ij (y_i, x_j), [N, 2 channels, 2]
        positions = (channels.flatten(2) * self.log_sharpness.exp()).softmax(-1) @ self.grid
        return self.out(torch.cat((positions.flatten(1), self.coarse(channels)), -1))


class Transformer(nn.Module):
    """Vision transformer (SigLIP or DINOv2) from pictures to patches.

    Pictures are resized to squares, of `size` pixels without weights, and standardised by the transformer's own mean
    and deviation.

    Raises:
        UserError: where transformers is not installed, or the weights are missing or of another kind.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, config: VisionConfig, size: int) -> None:
        super().__init__()
        self.frozen = config.frozen
        self.model, mean, std = _transformer(config, size)
        self.size = (config.size or self.model.config.image_size) if config.weights else size
        if config.size and config.size % self.model.config.patch_size:
            raise UserError(
                f"policy.vision.size={config.size}: expected a multiple of {self.model.config.patch_size} pixels, "
                "the side of a patch of these weights"
            )
        self.inner = self.model.config.hidden_size
        self.resized = {"interpolate_pos_encoding": True} if config.size and config.backbone is Backbone.SIGLIP else {}
        self.register_buffer("mean", torch.tensor(mean).view(3, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(3, 1, 1))
        if self.frozen:
            self.model.requires_grad_(False)

    def patches(self, pictures: Tensor) -> Tensor:
        """Patches [N, P, inner] of pictures [N, 3, height, width] in [0, 1]."""
        if pictures.shape[-2:] != (self.size, self.size):
            pictures = nn.functional.interpolate(pictures, (self.size, self.size), mode="bilinear", antialias=True)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            return self.model(pixel_values=(pictures - self.mean) / self.std, **self.resized).last_hidden_state


class PatchAttention(nn.Module):
    """Features [N, F] of patches [N, P, inner]: the instruction's [N, W] attention over them, and their mean."""

    def __init__(self, inner: int, instruction_width: int, features: int) -> None:
        super().__init__()
        _add_attention(self, inner, instruction_width, features)

    def forward(self, patches: Tensor, instruction: Tensor) -> Tensor:
        """Features [N, F]."""
        return _attended(self, patches, instruction)


class VisionTransformer(Transformer):
    """Vision transformer of one camera over whose patches the instruction attends."""

    def __init__(self, config: VisionConfig, size: int, instruction_width: int) -> None:
        super().__init__(config, size)
        _add_attention(self, self.inner, instruction_width, config.features)

    def forward(self, pictures: Tensor, instruction: Tensor) -> Tensor:
        """Features [N, F]."""
        return _attended(self, self.patches(pictures), instruction)


def _add_attention(module: nn.Module, inner: int, instruction_width: int, features: int) -> None:
    """Give `module` the layers of `_attended`."""
    module.query = nn.Linear(instruction_width, inner)
    module.key = nn.Linear(inner, inner)
    module.out = nn.Sequential(nn.Linear(2 * inner, features), nn.ReLU())


def _attended(module: Any, patches: Tensor, instruction: Tensor) -> Tensor:  # noqa: ANN401 - with the layers above
    # softmax(q k / sqrt(d)) patches
    score = (module.key(patches) @ module.query(instruction).unsqueeze(-1)).squeeze(-1) / patches.shape[-1] ** 0.5
    answer = (score.softmax(-1).unsqueeze(1) @ patches).squeeze(1)
    return module.out(torch.cat((answer, patches.mean(1)), -1))


class _Film(nn.Linear):
    """Linear layer that is zero at first, so that FiLM changes nothing."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


def _film(instruction_width: int, channels: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(instruction_width, 64), nn.ReLU(), _Film(64, 2 * channels))


def _transformer(config: VisionConfig, size: int) -> tuple[nn.Module, list[float], list[float]]:
    """Build the transformer; also returns the mean and deviation of its training pictures."""
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
        size_settings = settings(
            hidden_size=config.width,
            num_hidden_layers=4,
            num_attention_heads=heads,
            patch_size=patch,
            intermediate_size=4 * config.width,
            image_size=-(-size // patch) * patch,
        )
        return model(size_settings), [0.5] * 3, [0.5] * 3
    try:
        if torch.get_default_device().type == "meta":  # shapes alone, see embodied/training/plan.py
            return model(settings.from_pretrained(config.weights)), [0.5] * 3, [0.5] * 3
        loaded, unused = model.from_pretrained(config.weights, output_loading_info=True)
        preprocessor, _ = ImageProcessingMixin.get_image_processor_dict(config.weights)
        mean = preprocessor["image_mean"]
        std = preprocessor["image_std"]
    except (OSError, ValueError, KeyError) as error:
        expected = f"a {config.backbone.value} model with its preprocessor_config.json"
        raise UserError(f"policy.vision.weights={config.weights}: expected {expected} ({error})") from error
    if unused["missing_keys"]:
        raise UserError(
            f"policy.vision.weights={config.weights} lacks {len(unused['missing_keys'])} tensors of a "
            f"{config.backbone.value} model, such as {min(unused['missing_keys'])}"
        )
    return loaded, mean, std
