"""Networks of ACT (arXiv 2304.13705), with LeRobot's names of parameters, so that its weights load by name.

A transformer reads a latent variable, the robot's state and the patches of all cameras, and predicts a chunk of actions
from learned queries, as DETR (arXiv 2005.12872) predicts boxes. In training the latent variable is drawn from an
encoder that reads the demonstrated chunk: together they are a conditional variational auto-encoder.
Letters: N samples, H actions, A action dimension, S elements of the state, E of the environment's state, Z of the
latent variable, D width, L tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated

import torch
from torch import Tensor, nn

from embodied.configuration import Configuration, PositiveInt, Range
from embodied.errors import UserError
from policies.lerobot.checkpoint import Layout
from policies.vision.resnet import FrozenBatchNorm, ResNet


class VisionBackbone(Enum):
    """Network that reads pictures, by torchvision's names."""

    RESNET18 = "resnet18"
    RESNET34 = "resnet34"


@dataclass
class ACTSizes(Configuration):
    """Sizes of the networks, by LeRobot's names. With `pre_norm` layers normalise inputs, otherwise outputs."""

    vision_backbone: VisionBackbone = VisionBackbone.RESNET18
    dim_model: PositiveInt = 512
    n_heads: PositiveInt = 8
    dim_feedforward: PositiveInt = 3200
    n_encoder_layers: PositiveInt = 4
    n_decoder_layers: PositiveInt = 1
    n_vae_encoder_layers: PositiveInt = 4
    latent_dim: PositiveInt = 32
    use_vae: bool = True
    pre_norm: bool = False
    dropout: Annotated[float, Range(at_least=0, below=1)] = 0.1

    def __post_init__(self) -> None:
        """Raise UserError for numbers that are out of range or do not go together."""
        super().__post_init__()
        if self.dim_model % self.n_heads or self.dim_model % 4:
            raise UserError(
                f"expected policy.dim_model={self.dim_model} in multiples of policy.n_heads={self.n_heads} and of 4"
            )


class ACTNetwork(nn.Module):
    """Transformer from observations and a latent variable to a chunk, and the encoder of the latent variable."""

    vae_encoder_pos_enc: Tensor

    def __init__(self, layout: Layout, sizes: ACTSizes) -> None:
        super().__init__()
        self.sizes = sizes
        width = sizes.dim_model
        if sizes.use_vae:
            # inputs: a summary token, the state and the actions
            self.vae_encoder = _Encoder(sizes, sizes.n_vae_encoder_layers)
            self.vae_encoder_cls_embed = nn.Embedding(1, width)
            if layout.state:
                self.vae_encoder_robot_state_input_proj = nn.Linear(layout.state, width)
            self.vae_encoder_action_input_proj = nn.Linear(layout.action, width)
            self.vae_encoder_latent_output_proj = nn.Linear(width, 2 * sizes.latent_dim)
            places = torch.arange(1 + bool(layout.state) + layout.chunk)
            self.register_buffer("vae_encoder_pos_enc", interleaved(places.float(), width).unsqueeze(0))
        if layout.cameras:
            self.backbone = ResNet(sizes.vision_backbone.value, FrozenBatchNorm)
            self.encoder_img_feat_input_proj = nn.Conv2d(self.backbone.out_channels, width, 1)
        self.encoder = _Encoder(sizes, sizes.n_encoder_layers)
        self.decoder = _Decoder(sizes)
        if layout.state:
            self.encoder_robot_state_input_proj = nn.Linear(layout.state, width)
        if layout.environment:
            self.encoder_env_state_input_proj = nn.Linear(layout.environment, width)
        self.encoder_latent_input_proj = nn.Linear(sizes.latent_dim, width)
        single_tokens = 1 + bool(layout.state) + bool(layout.environment)
        self.encoder_1d_feature_pos_embed = nn.Embedding(single_tokens, width)
        self.decoder_pos_embed = nn.Embedding(layout.chunk, width)
        self.action_head = nn.Linear(width, layout.action)
        for parameter in (*self.encoder.parameters(), *self.decoder.parameters()):
            if parameter.ndim > 1:
                nn.init.xavier_uniform_(parameter)

    def posterior(self, state: Tensor, actions: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and logarithm of the variance [N, Z] of the latent variable, from a chunk [N, H, A] where `valid`."""
        summary = self.vae_encoder_cls_embed.weight.expand(len(actions), 1, -1)
        tokens = [summary, self.vae_encoder_action_input_proj(actions)]
        if state.shape[-1]:
            tokens.insert(1, self.vae_encoder_robot_state_input_proj(state).unsqueeze(1))
        # padded actions are masked
        masked = nn.functional.pad(~valid, (len(tokens) - 1, 0), value=False)
        encoded = self.vae_encoder(torch.cat(tokens, 1), self.vae_encoder_pos_enc, masked)
        return self.vae_encoder_latent_output_proj(encoded[:, 0]).chunk(2, -1)

    def encoded(
        self, latent: Tensor, state: Tensor, environment: Tensor, pictures: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Encoded tokens [N, L, D] and their positions [1, L, D].

        Inputs are normalised: latent [N, Z], state [N, S], environment [N, E], pictures [N, 3, height, width].
        """
        tokens = [self.encoder_latent_input_proj(latent).unsqueeze(1)]
        if state.shape[-1]:
            tokens.append(self.encoder_robot_state_input_proj(state).unsqueeze(1))
        if environment.shape[-1]:
            tokens.append(self.encoder_env_state_input_proj(environment).unsqueeze(1))
        places = [self.encoder_1d_feature_pos_embed.weight]
        for picture in pictures:
            features = self.encoder_img_feat_input_proj(self.backbone(picture))
            tokens.append(features.flatten(2).transpose(1, 2))
            height, width = features.shape[-2:]
            places.append(grid_places(height, width, features.shape[1]).to(features))
        position = torch.cat(places).unsqueeze(0)
        return self.encoder(torch.cat(tokens, 1), position), position

    def chunk(self, encoded: Tensor, position: Tensor) -> Tensor:
        """Normalised chunk [N, H, A] from the encoded tokens and their positions."""
        queries = self.decoder_pos_embed.weight.unsqueeze(0)
        start = torch.zeros_like(queries).expand(len(encoded), -1, -1)
        return self.action_head(self.decoder(start, encoded, queries, position))


class _Layer(nn.Module):
    """Layer of a transformer: its feed-forward network, and residual connections with a norm before or after."""

    def __init__(self, sizes: ACTSizes) -> None:
        super().__init__()
        width = sizes.dim_model
        self.pre_norm = sizes.pre_norm
        self.self_attn = nn.MultiheadAttention(width, sizes.n_heads, sizes.dropout, batch_first=True)
        self.linear1 = nn.Linear(width, sizes.dim_feedforward)
        self.linear2 = nn.Linear(sizes.dim_feedforward, width)
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.dropout = nn.Dropout(sizes.dropout)

    def residual(self, norm: nn.Module, x: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
        """X + f(norm(x)), or norm(x + f(x)), for the `branch` f."""
        if self.pre_norm:
            return x + self.dropout(branch(norm(x)))
        return norm(x + self.dropout(branch(x)))

    def feed_forward(self, x: Tensor) -> Tensor:
        return self.linear2(self.dropout(torch.relu(self.linear1(x))))


class _EncoderLayer(_Layer):
    """Self-attention and a feed-forward network; positions are added to queries and keys alone."""

    def forward(self, x: Tensor, position: Tensor, masked: Tensor | None) -> Tensor:
        def attend(y: Tensor) -> Tensor:
            placed = y + position
            return self.self_attn(placed, placed, y, key_padding_mask=masked, need_weights=False)[0]

        return self.residual(self.norm2, self.residual(self.norm1, x, attend), self.feed_forward)


class _DecoderLayer(_Layer):
    """Self-attention of the queries, attention to encoded tokens, and a feed-forward network."""

    def __init__(self, sizes: ACTSizes) -> None:
        super().__init__(sizes)
        self.multihead_attn = nn.MultiheadAttention(sizes.dim_model, sizes.n_heads, sizes.dropout, batch_first=True)
        self.norm3 = nn.LayerNorm(sizes.dim_model)

    def forward(self, x: Tensor, encoded: Tensor, queries: Tensor, position: Tensor) -> Tensor:
        def attend(y: Tensor) -> Tensor:
            placed = y + queries
            return self.self_attn(placed, placed, y, need_weights=False)[0]

        def look(y: Tensor) -> Tensor:
            return self.multihead_attn(y + queries, encoded + position, encoded, need_weights=False)[0]

        x = self.residual(self.norm1, x, attend)
        x = self.residual(self.norm2, x, look)
        return self.residual(self.norm3, x, self.feed_forward)


class _Encoder(nn.Module):
    """Stack of encoder layers."""

    def __init__(self, sizes: ACTSizes, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_EncoderLayer(sizes) for _ in range(depth))
        self.norm = nn.LayerNorm(sizes.dim_model) if sizes.pre_norm else nn.Identity()

    def forward(self, x: Tensor, position: Tensor, masked: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, position, masked)
        return self.norm(x)


class _Decoder(nn.Module):
    """Stack of decoder layers."""

    def __init__(self, sizes: ACTSizes) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_DecoderLayer(sizes) for _ in range(sizes.n_decoder_layers))
        self.norm = nn.LayerNorm(sizes.dim_model)

    def forward(self, x: Tensor, encoded: Tensor, queries: Tensor, position: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, encoded, queries, position)
        return self.norm(x)


def grid_places(height: int, width: int, size: int) -> Tensor:
    """Places of the patches of a feature map, row by row, [height * width, size]: half for the row, half the column."""
    # rows and columns count from 1 and end at 2 pi
    rows, columns = (2 * math.pi * torch.arange(1, count + 1) / (count + 1e-6) for count in (height, width))
    y = interleaved(rows, size // 2).unsqueeze(1).expand(-1, width, -1)
    x = interleaved(columns, size // 2).unsqueeze(0).expand(height, -1, -1)
    return torch.cat((y, x), -1).flatten(0, 1)


def interleaved(places: Tensor, size: int) -> Tensor:
    """Sines (even) and cosines (odd elements) of `places` [L] at falling frequencies, [L, size]."""
    # w_j = 10000^(-2 floor(j / 2) / size)
    frequencies = 10000.0 ** (-2.0 * (torch.arange(size) // 2) / size)
    angles = places.unsqueeze(-1) * frequencies
    return torch.where(torch.arange(size) % 2 == 0, angles.sin(), angles.cos())
