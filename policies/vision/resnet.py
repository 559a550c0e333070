"""ResNet-18 and ResNet-34 (arXiv 1512.03385) up to their last feature map, with torchvision's names of parameters.

Letters: N pictures, C channels.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from policies.lerobot.checkpoint import fill
from policies.vla.checkpoints.weights import reading

DEPTHS = {"resnet18": (2, 2, 2, 2), "resnet34": (3, 4, 6, 3)}
"""Number of blocks of each of the four stages."""
WIDTHS = 64, 128, 256, 512
"""Channels of the stages, each at half of the resolution of the one before."""
MEAN = 0.485, 0.456, 0.406
STD = 0.229, 0.224, 0.225
"""Mean and deviation of the red, green and blue of ImageNet's pictures in [0, 1]."""
UNUSED = ("fc.", "num_batches_tracked")
"""Parts of the names of torchvision's tensors that feature maps do not need."""

Norm = Callable[[int], nn.Module]
"""Builder of a normalisation of C channels."""


class FrozenBatchNorm(nn.Module):
    """Batch normalisation whose statistics and affine map never change: buffers, at first the identity."""

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor
    eps = 1e-5

    def __init__(self, channels: int) -> None:
        super().__init__()
        for name, value in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0)):
            self.register_buffer(name, torch.full((channels,), value))

    def forward(self, x: Tensor) -> Tensor:
        """Normalised channels [N, C, height, width]."""
        # y = weight (x - mean) / sqrt(var + eps) + bias
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        shift = self.bias - self.running_mean * scale
        return x * scale.view(-1, 1, 1) + shift.view(-1, 1, 1)


class ResNet(nn.Module):
    """ResNet of basic blocks without its pooling and classifier; `norm` builds the normalisations."""

    out_channels = WIDTHS[-1]

    def __init__(self, kind: str, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, WIDTHS[0], 7, stride=2, padding=3, bias=False)
        self.bn1 = norm(WIDTHS[0])
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        stages = []
        before = WIDTHS[0]
        for width, depth in zip(WIDTHS, DEPTHS[kind], strict=True):
            first = _Block(before, width, 1 if width == WIDTHS[0] else 2, norm)
            stages.append(nn.Sequential(first, *(_Block(width, width, 1, norm) for _ in range(depth - 1))))
            before = width
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, pictures: Tensor) -> Tensor:
        """Feature map [N, 512, height / 32, width / 32], rounded up, of normalised pictures [N, 3, height, width]."""
        x = self.maxpool(torch.relu(self.bn1(self.conv1(pictures))))
        return self.layer4(self.layer3(self.layer2(self.layer1(x))))

    def adopt(self, file: str) -> None:
        """Load torchvision's tensors from a `file` (.safetensors, or .pth without code).

        Raises:
            UserError: on one line, if it cannot be read, or has other tensors.
        """
        option = f"policy.backbone_weights={file}"
        with reading(f"{option}: expected a file with torchvision's tensors of a ResNet"):
            tensors = _tensors(Path(file))
        fill(self, {name: value for name, value in tensors.items() if not any(part in name for part in UNUSED)}, option)


class _Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, before: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, padding=1, bias=False)
        self.bn1 = norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = norm(width)
        # the width changes with the resolution
        resized = nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), norm(width)) if stride != 1 else None
        self.downsample = resized

    def forward(self, x: Tensor) -> Tensor:
        # y = relu(F(x) + shortcut(x))
        y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(y + (x if self.downsample is None else self.downsample(x)))


def _tensors(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        return load_file(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError("it contains other objects than tensors, and nothing is run from files") from error
