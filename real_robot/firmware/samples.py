"""Inputs on which an export is compared with its policy, and the policy's actions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from embodied.deployment.network import Network, Normalise, Reciprocal, rollout_outputs
from embodied.policy import Policy
from embodied.saving.tree import load_tree, save_tree

FILE = "samples.safetensors"
EPISODES, STEPS = 20, 50
"""1,000 inputs, in sequences for policies with memory."""
SPREAD, OUTLIER, OUTLIERS = 1.5, 10.0, 0.02
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
        """Read what `save` wrote.

        Raises:
            UserError: if the file is missing or damaged.
        """
        return Samples(**load_tree(directory / FILE))

    def error(self, outputs: Tensor, half_range: Tensor) -> float:
        """Largest difference of `outputs` [S, T, A] from the policy's, in half action ranges."""
        difference = ((outputs - self.outputs).abs() / half_range).max()
        return float("inf") if difference.isnan() else float(difference)


def draw(policy: Policy, network: Network, seed: int = 0) -> Samples:
    """Random inputs around the normaliser's statistics, inside the contract's limits, with the actions of `policy`."""
    normaliser = next(layer for layer in network.layers if isinstance(layer, Normalise))
    generator = torch.Generator().manual_seed(seed)
    shape = (EPISODES, STEPS, network.inputs)
    far = torch.rand(shape, generator=generator) < OUTLIERS
    noise = torch.randn(shape, generator=generator) * torch.where(far, OUTLIER, SPREAD)
    low, high = (_limits(network, side) for side in ("low", "high"))
    inputs, first = normaliser.mean + normaliser.std * noise, network.layers[0]
    if isinstance(first, Reciprocal):
        inputs = first.distances(inputs)
    inputs = inputs.clamp(low, high)
    return Samples(inputs, rollout_outputs(policy, network, inputs))


def _limits(network: Network, side: str) -> Tensor:
    parts = []
    for spec in network.contract.observation.values():
        given = getattr(spec, side) or (torch.inf if side == "high" else -torch.inf,) * spec.shape[-1]
        parts.append(torch.tensor(given).expand(spec.shape).reshape(-1))
    return torch.cat(parts)
