"""Inputs on which an export is compared with its policy, and the policy's actions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from embodied.export.chunk_network import ChunkNetwork
from embodied.export.network import Network, Normalise, Reciprocal, rollout_outputs
from embodied.policy import Policy
from embodied.saving.tree import load_tree, save_tree

FILE = "samples.safetensors"
EPISODES = 20
STEPS = 50
"""Number and length of input sequences for policies with memory: 1,000 inputs."""
CHUNKS = 64
ROWS = 5
TRACED_ROWS = 4
"""Number of inputs of a network of chunks, and rows along axes of variable length: of inputs, and of tracing examples.
"""
TIE = 1e-4
"""Advantages whose difference, relative to the largest, is not above this count as equal up to rounding."""
SPREAD = 1.5
OUTLIER = 10.0
OUTLIERS = 0.02
"""Standard deviation of inputs, in units of the normaliser's; size and share of outliers, which saturate the network.
"""


@dataclass(frozen=True)
class Samples:
    """Observations [S, T, I] and the policy's own deterministic actions [S, T, A], both in physical units."""

    inputs: Tensor
    outputs: Tensor

    def save(self, directory: Path) -> None:
        """Write the samples into `directory`."""
        save_tree(directory / FILE, {"inputs": self.inputs, "outputs": self.outputs})

    @staticmethod
    def load(directory: Path) -> Samples:
        """Read a file of `save`.

        Raises:
            UserError: if the file is missing or damaged.
        """
        return Samples(**load_tree(directory / FILE))

    def error(self, outputs: Tensor, half_range: Tensor) -> float:
        """Largest difference of `outputs` [S, T, A] from the policy's, in half action ranges."""
        difference = ((outputs - self.outputs).abs() / half_range).max()
        return float("inf") if difference.isnan() else float(difference)


@dataclass(frozen=True)
class ChunkSamples:
    """Inputs [S, ...] of a network of chunks by name, and the policy's own deterministic actions [S, K, A].

    Further the actions of all candidates [S, C, K, A], in robot units, their advantage [S, C], half action ranges [A],
    and inputs to trace the network with.
    """

    inputs: dict[str, Tensor]
    outputs: Tensor
    candidates: Tensor
    advantage: Tensor
    half_range: Tensor
    example: tuple[Tensor, ...]

    def save(self, directory: Path) -> None:
        """Write inputs and outputs into `directory`."""
        save_tree(directory / FILE, {"inputs": self.inputs, "outputs": self.outputs})

    def error(self, outputs: Tensor) -> float:
        """Largest difference of `outputs` [S, K, A] from the best candidate or an equal one, in half action ranges."""
        # candidates with equal advantages up to rounding may be swapped: compare with the nearest of the best ones
        best = self.advantage.amax(1, keepdim=True)
        good = self.advantage >= best - TIE * self.advantage.abs().amax(1, keepdim=True)
        difference = ((outputs.unsqueeze(1) - self.candidates).abs() / self.half_range).flatten(2).amax(2)
        error = difference.masked_fill(~good, torch.inf).amin(1).max()
        return float("inf") if error.isnan() else float(error)


@torch.no_grad()
def draw_chunks(policy: Policy, network: ChunkNetwork) -> ChunkSamples:
    """Random inputs around the normaliser's statistics, with the actions of `policy`."""
    observation = network.example(CHUNKS, ROWS, seed=0)
    inputs = network.inputs
    named_inputs = inputs.with_noise(observation)
    outputs = policy.act(observation, deterministic=True).actions[:, : network.contract.executed]
    example = tuple(inputs.with_noise(network.example(2, TRACED_ROWS, seed=1)).values())
    return ChunkSamples(
        named_inputs, outputs, *network.candidates(*named_inputs.values()), network.limits.half_range, example
    )


def draw(policy: Policy, network: Network, seed: int = 0) -> Samples:
    """Random inputs around the normaliser's statistics, inside the contract's limits, with the actions of `policy`."""
    normaliser = next(layer for layer in network.layers if isinstance(layer, Normalise))
    generator = torch.Generator().manual_seed(seed)
    shape = (EPISODES, STEPS, network.inputs)
    outliers = torch.rand(shape, generator=generator) < OUTLIERS
    noise = torch.randn(shape, generator=generator) * torch.where(outliers, OUTLIER, SPREAD)
    low, high = (_limits(network, side) for side in ("low", "high"))
    inputs = normaliser.mean + normaliser.std * noise
    first = network.layers[0]
    if isinstance(first, Reciprocal):
        inputs = first.distances(inputs)
    inputs = inputs.clamp(low, high)
    return Samples(inputs, rollout_outputs(policy, network, inputs))


def _limits(network: Network, side: str) -> Tensor:
    parts = []
    for spec in network.contract.observation.values():
        bounds = getattr(spec, side) or (torch.inf if side == "high" else -torch.inf,) * spec.shape[-1]
        parts.append(torch.tensor(bounds).expand(spec.shape).reshape(-1))
    return torch.cat(parts)
