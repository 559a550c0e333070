"""Networks from a noisy action chunk, a time and features of the observation to a chunk: MLP, UNet1D and DiT.

The UNet is that of diffusion policy (arXiv 2303.04137), with the names of its parameters; the DiT has adaLN-Zero blocks
(arXiv 2212.09748) over the actions of the chunk. Letters: N samples, H actions, A action dimension, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from itertools import pairwise

import torch
from torch import Tensor, nn

from embodied.errors import UserError

KERNEL = 5
GROUPS = 8
"""Width of the UNet's convolutions, and number of groups of its group normalisation."""
HEAD_WIDTH = 32


class NetworkKind(Enum):
    """Value of the option `network` of a policy that generates chunks."""

    MLP = "mlp"
    UNET = "unet"
    DIT = "dit"


def chunk_network(
    kind: NetworkKind,
    horizon: int,
    actions: int,
    features: int,
    hidden: int,
    depth: int,
    *,
    ticks: int = 1000,
    small: bool = False,
) -> nn.Module:
    """Build a network (x [N, H, A], time [N] in [0, 1], features [N, F]) -> [N, H, A], near 0 at first if `small`.

    `hidden` is the width of its layers (of the UNet: of the first of `depth` levels, doubled at each further one),
    `depth` the number of residual blocks or levels. UNet and DiT count time in `ticks`.

    Raises:
        UserError: for widths that do not divide into groups or heads.
    """
    if kind is NetworkKind.MLP:
        network: nn.Module = ChunkMLP(horizon * actions, features, hidden, depth)
        last = network.out
    elif kind is NetworkKind.UNET:
        network = ChunkUNet(actions, features, [hidden * 2**level for level in range(depth)], ticks)
        last = network.final_conv[1]
    else:
        network = ChunkDiT(horizon, actions, features, hidden, depth, ticks)
        last = network.out
    if small:
        nn.init.orthogonal_(last.weight, 0.01)
        nn.init.zeros_(last.bias)
    return network


def sinusoids(time: Tensor, width: int) -> Tensor:
    """Sines and cosines of `time` [N], in ticks, at `width` / 2 frequencies, [N, width]."""
    half = width // 2
    # w_i = 10000^(-i / (half - 1))
    frequencies = torch.exp(torch.arange(half, device=time.device) * (-torch.tensor(10000.0).log() / (half - 1)))
    angle = time.unsqueeze(-1) * frequencies
    return torch.cat((angle.sin(), angle.cos()), -1)


class ChunkMLP(nn.Module):
    """Residual MLP on the whole chunk."""

    def __init__(self, size: int, features: int, hidden: int, depth: int) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.pi * 2.0 ** torch.arange(4))
        self.inputs = nn.Linear(size + features + 8, hidden)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, hidden))
            for _ in range(depth)
        )
        self.out = nn.Linear(hidden, size)

    def forward(self, x: Tensor, time: Tensor, features: Tensor) -> Tensor:
        """Predicted chunk [N, H, A]."""
        angle = time.unsqueeze(-1) * self.frequencies
        hidden = self.inputs(torch.cat((x.flatten(1), angle.sin(), angle.cos(), features), dim=-1))
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.out(torch.relu(hidden)).view_as(x)


class ChunkUNet(nn.Module):
    """UNet of convolutions along the chunk, whose channels are scaled and shifted by time and features (FiLM).

    `widths` are the channels of the levels. A chunk is padded with its last action to whole steps of the coarsest.
    """

    def __init__(self, actions: int, features: int, widths: Sequence[int], ticks: int, time_width: int = 128) -> None:
        super().__init__()
        if unfit := [width for width in widths if width % GROUPS]:
            raise UserError(f"expected policy.hidden in multiples of {GROUPS} with network=unet, got {unfit[0]}")
        self.ticks = ticks
        self.time_width = time_width
        self.step = 2 ** (len(widths) - 1)
        self.diffusion_step_encoder = nn.Sequential(
            nn.Identity(), nn.Linear(time_width, 4 * time_width), nn.Mish(), nn.Linear(4 * time_width, time_width)
        )
        conditions = time_width + features
        pairs = list(pairwise([actions, *widths]))
        self.down_modules = nn.ModuleList(
            nn.ModuleList(
                [
                    _Residual(before, after, conditions),
                    _Residual(after, after, conditions),
                    nn.Identity() if level == len(pairs) else _Resample(nn.Conv1d(after, after, 3, 2, 1)),
                ]
            )
            for level, (before, after) in enumerate(pairs, 1)
        )
        self.mid_modules = nn.ModuleList(_Residual(widths[-1], widths[-1], conditions) for _ in range(2))
        self.up_modules = nn.ModuleList(
            nn.ModuleList(
                [
                    _Residual(2 * after, before, conditions),
                    _Residual(before, before, conditions),
                    _Resample(nn.ConvTranspose1d(before, before, 4, 2, 1)),
                ]
            )
            for before, after in reversed(pairs[1:])
        )
        self.final_conv = nn.Sequential(_Convolution(widths[0], widths[0]), nn.Conv1d(widths[0], actions, 1))

    def forward(self, x: Tensor, time: Tensor, features: Tensor) -> Tensor:
        """Predicted chunk [N, H, A]."""
        horizon = x.shape[1]
        padding = x[:, -1:].expand(-1, -horizon % self.step, -1)
        # [N, A, H'] for convolutions along the chunk
        channels = torch.cat((x, padding), 1).transpose(1, 2)
        condition = torch.cat(
            (self.diffusion_step_encoder(sinusoids(self.ticks * time, self.time_width)), features), -1
        )
        skipped = []
        for first, second, down in self.down_modules:
            channels = second(first(channels, condition), condition)
            # skip connections of each resolution
            skipped.append(channels)
            channels = down(channels)
        for block in self.mid_modules:
            channels = block(channels, condition)
        for first, second, up in self.up_modules:
            # [skip, channels] -> half the width, then twice the resolution
            channels = up(second(first(torch.cat((channels, skipped.pop()), 1), condition), condition))
        return self.final_conv(channels).transpose(1, 2)[:, :horizon]


class ChunkDiT(nn.Module):
    """Transformer over the actions of a chunk, modulated by time and features."""

    def __init__(self, horizon: int, actions: int, features: int, hidden: int, depth: int, ticks: int) -> None:
        super().__init__()
        self.ticks = ticks
        if hidden % HEAD_WIDTH:
            raise UserError(f"expected policy.hidden in multiples of {HEAD_WIDTH} with network=dit, got {hidden}")
        self.inputs = nn.Linear(actions, hidden)
        self.places = nn.Parameter(0.02 * torch.randn(horizon, hidden))
        self.time = nn.Sequential(nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, hidden))
        self.features = nn.Linear(features, hidden)
        self.blocks = nn.ModuleList(_Block(hidden) for _ in range(depth))
        self.norm = nn.LayerNorm(hidden, elementwise_affine=False)
        self.modulation = _modulation(hidden, 2)
        self.out = nn.Linear(hidden, actions)

    def forward(self, x: Tensor, time: Tensor, features: Tensor) -> Tensor:
        """Predicted chunk [N, H, A]."""
        condition = self.time(sinusoids(self.ticks * time, self.places.shape[-1])) + self.features(features)
        tokens = self.inputs(x) + self.places
        for block in self.blocks:
            tokens = block(tokens, condition)
        # adaLN: norm(x) (1 + scale) + shift
        shift, scale = self.modulation(condition).unsqueeze(1).chunk(2, -1)
        return self.out(self.norm(tokens) * (1.0 + scale) + shift)


class _Block(nn.Module):
    """Attention and an MLP, each behind a gate that is zero at first (adaLN-Zero)."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(hidden, elementwise_affine=False) for _ in range(2))
        self.attention = nn.MultiheadAttention(hidden, hidden // HEAD_WIDTH, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))
        self.modulation = _modulation(hidden, 6)

    def forward(self, tokens: Tensor, condition: Tensor) -> Tensor:
        # x <- x + gate * attention(norm(x) (1 + scale) + shift), then the same with the MLP
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = self.modulation(condition).unsqueeze(1).chunk(6, -1)
        modulated = self.norms[0](tokens) * (1.0 + scale) + shift
        tokens = tokens + gate * self.attention(modulated, modulated, modulated, need_weights=False)[0]
        return tokens + gate_mlp * self.mlp(self.norms[1](tokens) * (1.0 + scale_mlp) + shift_mlp)


class _Residual(nn.Module):
    """Two convolutions; after the first, channels are scaled and shifted by `condition`."""

    def __init__(self, before: int, after: int, condition: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_Convolution(before, after), _Convolution(after, after)])
        self.cond_encoder = nn.Sequential(nn.Mish(), nn.Linear(condition, 2 * after))
        self.residual_conv = nn.Identity() if before == after else nn.Conv1d(before, after, 1)

    def forward(self, channels: Tensor, condition: Tensor) -> Tensor:
        # FiLM: scale h + shift, then the residual connection
        scale, shift = self.cond_encoder(condition).unsqueeze(-1).chunk(2, 1)
        out = self.blocks[1](scale * self.blocks[0](channels) + shift)
        return out + self.residual_conv(channels)


class _Resample(nn.Module):
    """Convolution that halves or doubles the resolution."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, channels: Tensor) -> Tensor:
        return self.conv(channels)


class _Convolution(nn.Module):
    """Normalised convolution along the chunk."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.block = nn.Sequential(
            nn.Conv1d(before, after, KERNEL, padding=KERNEL // 2), nn.GroupNorm(GROUPS, after), nn.Mish()
        )

    def forward(self, channels: Tensor) -> Tensor:
        return self.block(channels)


def _modulation(hidden: int, parts: int) -> nn.Sequential:
    last = nn.Linear(hidden, parts * hidden)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(nn.SiLU(), last)
