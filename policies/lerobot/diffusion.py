"""LeRobot's diffusion policy: its encoder of pictures and states, and the names of its tensors.

Differs from LeRobot: batch normalisation of a backbone without group normalisation stays frozen in training.
Letters: N samples, O consecutive observations, C cameras, P keypoints, S elements of the robot's state, E of the
environment's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from tensordict import TensorDict
from torch import Generator, Tensor, nn

from embodied.contract import Contract, TensorSpec
from embodied.errors import UserError
from policies.encoders.base import Encoder
from policies.generation.diffusion_checkpoint import Published
from policies.lerobot.checkpoint import ACTION, ENVIRONMENT, STATE, Checkpoint, check_sizes, fill, matched_cameras, read
from policies.vision.resnet import DEPTHS, FrozenBatchNorm, ResNet

REQUIRED = {
    "kernel_size": 5,
    "n_groups": 8,
    "use_film_scale_modulation": True,
    "beta_start": 0.0001,
    "beta_end": 0.02,
    "clip_sample_range": 1.0,
}
"""Fields of config.json with their only supported value."""
UNET = "unet."
EYES = "rgb_encoder."
"""Beginnings of the names of the network's tensors and of those that read pictures."""
STAGES = {"conv1": "0", "bn1": "1", "layer1": "4", "layer2": "5", "layer3": "6", "layer4": "7"}
"""Numbers of a ResNet's parts in LeRobot's sequence of them."""
SMALLEST_STD = 1e-6
"""Smallest divisor of an element of the action, which is constant in the data."""


@dataclass(frozen=True)
class LeRobotDiffusion(Published):
    """Diffusion policy of LeRobot, with its whole `checkpoint`; `network` are the tensors of the UNet by our names."""

    checkpoint: Checkpoint

    @property
    def observations(self) -> int:
        """Number of consecutive observations that it reads."""
        return self.settings["n_obs_steps"]

    @property
    def past(self) -> int:
        """Number of actions at the beginning of a chunk that lie before the last observation."""
        return self.observations - 1

    @property
    def widths(self) -> list[int]:
        """Channels of the UNet's levels."""
        return self.settings["down_dims"]

    @property
    def time_width(self) -> int:
        """Number of elements of the encoded time."""
        return self.settings["diffusion_step_embed_dim"]

    def encoder(self, contract: Contract) -> LeRobotEncoder:
        """Encoder of the observations of `contract`, with new weights.

        Raises:
            UserError: where they do not fit.
        """
        return LeRobotEncoder(contract, self.checkpoint)

    def load_into(self, network: nn.Module, encoder: nn.Module) -> None:
        """Load the weights into the UNet `network` and the LeRobotEncoder `encoder`.

        Raises:
            UserError: for the first tensor that is missing, misshapen, not finite or unknown.
        """
        assert isinstance(encoder, LeRobotEncoder)
        option = f"policy.weights={self.source}"
        tensors = {name: value for name, value in self.checkpoint.tensors.items() if "num_batches" not in name}
        eyes = {name: tensors.pop(name) for name in [*tensors] if name.startswith(EYES)}
        fill(network, tensors, option, network_name)
        fill(encoder.eyes or nn.Identity(), eyes, option, encoder_name)


def published(weights: str) -> LeRobotDiffusion:
    """Read a folder `pretrained_model` or a name on the hub.

    Raises:
        UserError: on one line, for other files, and for options that are not supported.
    """
    checkpoint = read(weights, "diffusion", "horizon")
    config = checkpoint.config
    for name, expected in REQUIRED.items():
        if (value := config.get(name, expected)) != expected:
            raise UserError(f"policy.weights={weights} has {name}={value}, and only {expected} is supported")
    for name in ("n_obs_steps", "down_dims", "diffusion_step_embed_dim", "spatial_softmax_num_keypoints"):
        if name not in config:
            raise UserError(f"policy.weights={weights}: config.json lacks {name}")
    if (kind := config.get("vision_backbone")) not in DEPTHS and checkpoint.layout.cameras:
        raise UserError(f"policy.weights={weights} has vision_backbone={kind}; expected one of {', '.join(DEPTHS)}")
    offset, divisor = checkpoint.normalisers.get(ACTION, (torch.zeros(0), torch.ones(0)))
    divisor = divisor.clamp_min(SMALLEST_STD)
    # scale x + offset is the normalised value
    action = 1.0 / divisor, -offset / divisor
    return LeRobotDiffusion(weights, {}, (torch.zeros(0), torch.zeros(0)), action, config, checkpoint)


def network_name(name: str) -> str:
    """LeRobot's name of a tensor of our UNet."""
    name = re.sub(r"blocks\.(\d)\.block", lambda number: f"conv{int(number[1]) + 1}.block", name)
    return UNET + name.replace(".2.conv.", ".2.")


def encoder_name(name: str) -> str:
    """LeRobot's name of a tensor of the networks that read pictures."""
    parts = name.split(".")
    if "backbone" in parts:
        place = parts.index("backbone") + 1
        parts[place] = STAGES[parts[place]]
    return EYES + ".".join(parts)


class Keypoints(nn.Module):
    """Pictures to coordinates of P keypoints: a ResNet and a spatial softmax (arXiv 1509.06113), then a dense layer."""

    def __init__(self, config: dict[str, Any], height: int, width: int) -> None:
        super().__init__()
        norm = _group_norm if config.get("use_group_norm", True) else FrozenBatchNorm
        self.resized: list[int] | None = config.get("resize_shape")
        self.cropped: list[int] | None = config.get("crop_shape")
        self.random = config.get("crop_is_random", True)
        self.draws = False  # crops at random places; else in the middle
        self.backbone = ResNet(config["vision_backbone"], norm)
        count = config["spatial_softmax_num_keypoints"]
        rows, columns = (-(-side // 32) for side in self.cropped or self.resized or (height, width))
        self.pool = _SpatialSoftmax(self.backbone.out_channels, count, rows, columns)
        self.out = nn.Linear(2 * count, 2 * count)
        self.features = 2 * count

    def forward(self, pictures: Tensor) -> Tensor:
        """Features [N, 2 P] of normalised pictures [N, 3, height, width]."""
        if self.resized:
            pictures = nn.functional.interpolate(pictures, tuple(self.resized), mode="bilinear", antialias=True)
        if self.cropped:
            spare = [have - want for have, want in zip(pictures.shape[-2:], self.cropped, strict=True)]
            drawn = self.training and self.random and self.draws
            top, left = (int(torch.randint(extra + 1, ())) if drawn else round(extra / 2) for extra in spare)
            pictures = pictures[..., top : top + self.cropped[0], left : left + self.cropped[1]]
        return torch.relu(self.out(self.pool(self.backbone(pictures)).flatten(1)))


class _SpatialSoftmax(nn.Module):
    """Expected coordinates (x, y) of each of P channels under a softmax over the feature map."""

    pos_grid: Tensor

    def __init__(self, channels: int, count: int, rows: int, columns: int) -> None:
        super().__init__()
        self.nets = nn.Conv2d(channels, count, 1)
        y, x = torch.meshgrid(torch.linspace(-1.0, 1.0, rows), torch.linspace(-1.0, 1.0, columns), indexing="ij")
        self.register_buffer("pos_grid", torch.stack((x, y), -1).flatten(0, 1))

    def forward(self, features: Tensor) -> Tensor:
        return self.nets(features).flatten(2).softmax(-1) @ self.pos_grid


class LeRobotEncoder(Encoder):
    """Encoder of O consecutive observations, oldest first, as LeRobot's diffusion policy reads them.

    States are float32 [O, size] and pictures uint8 [O, height, width, 3] of a contract, of a single observation without
    the first axis. The first S elements of the state are the robot's, the others the environment's. Normalisation is
    that of the checkpoint.

    Raises:
        UserError: where the contract does not fit.
    """

    offset: Tensor
    scale: Tensor
    picture_offset: Tensor
    picture_scale: Tensor

    def __init__(self, contract: Contract, checkpoint: Checkpoint) -> None:
        super().__init__()
        config, layout = checkpoint.config, checkpoint.layout
        self.count = int(config["n_obs_steps"])
        self.robot = layout.state
        specs = {key: spec for key, spec in contract.observation.items() if not spec.privileged}
        self.states = [key for key, spec in specs.items() if spec.dtype == "float32" and self._stacked(spec, 1)]
        own = [
            key
            for key, spec in specs.items()
            if spec.dtype == "uint8" and self._stacked(spec, 3) and spec.shape[-1] == 3
        ]
        if not self.states:
            axis = f" with a first axis of {self.count}, oldest first" if self.count > 1 else ""
            option = f"policy.weights={checkpoint.source}"
            raise UserError(f"{option} reads {self.count} observations at once: expected float32 ones{axis}")
        self.cameras = matched_cameras(checkpoint, contract, own)
        sizes = [math.prod(specs[key].shape) // self.count for key in self.states]
        check_sizes(checkpoint, sum(sizes), contract)
        self.reads = [*self.cameras, *self.states]
        self.seeds = self.states
        shapes = list(layout.cameras.values())
        if self.cameras and config.get("use_separate_rgb_encoder_per_camera"):
            self.eyes: nn.Module | None = nn.ModuleList(Keypoints(config, *shape) for shape in shapes)
        else:
            self.eyes = Keypoints(config, *shapes[0]) if self.cameras else None
        keypoints = 2 * config["spatial_softmax_num_keypoints"] * len(self.cameras)
        self.out_features = self.count * (sum(sizes) + keypoints)
        self.register_buffer("fitted", torch.ones((), dtype=torch.bool))
        normalisers = checkpoint.normalisers
        states = [normalisers[name] for name in (STATE, ENVIRONMENT) if name in normalisers]
        empty = torch.zeros(sum(sizes)), torch.ones(sum(sizes))
        offset, scale = (torch.cat(values) for values in zip(*states, strict=True)) if states else empty
        self.register_buffer("offset", offset)
        self.register_buffer("scale", scale)
        pictures = [normalisers.get(name, (torch.zeros(3), torch.ones(3))) for name in layout.cameras]
        for name, values in zip(("picture_offset", "picture_scale"), zip(*pictures, strict=True), strict=False):
            self.register_buffer(name, torch.stack(values))

    def fit(self, observation: TensorDict) -> None:
        """No-op: the statistics are the checkpoint's."""

    def forward(self, observation: TensorDict) -> Tensor:
        """Features [N, O (S + 2 P C + E)]: those of the first observation, then of the second, ..."""
        count = len(observation)
        states = torch.cat([observation[key].reshape(count, self.count, -1) for key in self.states], -1)
        states = (states - self.offset) / self.scale
        parts = [states[..., : self.robot]]
        for index, key in enumerate(self.cameras):
            eye = self.eyes[index] if isinstance(self.eyes, nn.ModuleList) else self.eyes
            assert eye is not None
            # uint8 [N, O, height, width, 3] -> [N * O, 3, height, width]
            picture = observation[key].reshape(-1, *observation[key].shape[-3:]).movedim(-1, 1).to(states.dtype) / 255.0
            offset, scale = (values[index].view(3, 1, 1) for values in (self.picture_offset, self.picture_scale))
            parts.append(eye((picture - offset) / scale).unflatten(0, (count, self.count)))
        parts.append(states[..., self.robot :])
        return torch.cat(parts, -1).flatten(1)

    @contextmanager
    def random_crops(self) -> Iterator[None]:
        """Context of a supervised loss in training, in which pictures are cropped at random places."""
        eyes = [module for module in self.modules() if isinstance(module, Keypoints)]
        try:
            for eye in eyes:
                eye.draws = True
            yield
        finally:
            for eye in eyes:
                eye.draws = False

    def begin_like(self, other: Self) -> None:
        """Copy the weights and statistics of `other`."""
        self.load_state_dict(other.state_dict())

    def example(self, contract: Contract, count: int, rows: int, generator: Generator) -> TensorDict:
        """Random observations [count], with random pixels."""
        observation = {}
        start = 0
        for key in self.states:
            shape = contract.observation[key].shape
            size = math.prod(shape) // self.count
            noise = torch.randn(count, self.count, size, generator=generator)
            part = slice(start, start + size)
            observation[key] = (self.offset[part] + self.scale[part] * noise).reshape(count, *shape)
            start += size
        for key in self.cameras:
            shape = (count, *contract.observation[key].shape)
            observation[key] = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
        return TensorDict(observation, [count])

    def _stacked(self, spec: TensorSpec, axes: int) -> bool:
        """Whether a tensor consists of O observations of `axes` axes; one observation has no axis of its own."""
        if -1 in spec.shape:
            return False
        return (
            len(spec.shape) == axes if self.count == 1 else len(spec.shape) == axes + 1 and spec.shape[0] == self.count
        )


def _group_norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(channels // 16, channels)
