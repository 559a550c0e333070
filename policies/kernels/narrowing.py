"""Exploration noise of flow policies, of which the learned one may narrow late in training (arXiv 2505.22094)."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Protocol

import torch
from torch import Tensor

from embodied.errors import UserError
from embodied.policy import TrainablePolicy
from policies.kernels.flow import TimeGrid
from policies.kernels.sampling import FlowSampling, Sampler

HELD = 0.35
"""Share of the training in which the noise keeps its range."""


class NoiseRange(Protocol):
    """Options of the learned deviation."""

    std_min: float
    std_max: float


class NarrowingNoise(TrainablePolicy):
    """Policy that learns the deviation of its noise, between two bounds of which the upper one may fall.

    The range narrows by the share w of noise_decay, to std_max - w (std_max - std_min) at the end.
    """

    grid: TimeGrid
    past: int
    """Number of actions that are given before those that are sampled."""
    narrowing: Tensor | None
    """Share by which the range has narrowed, which is saved with the weights; None: it does not narrow."""

    @property
    def sampling(self) -> FlowSampling:
        """Sampler of paths, which also scores them."""
        config = self.config
        return FlowSampling(
            self.grid,
            config.sampler,
            config.noise_level,
            config.std_min,
            self.largest_std(config),
            self._spread,
            self._part,
            config.aggregate.divisor(self.grid.steps),
            self.past,
        )

    @abstractmethod
    def _spread(self, hidden: Tensor, index: Tensor) -> Tensor:
        """See `FlowSampling.spread`."""

    @abstractmethod
    def _part(self, elementwise: Tensor) -> Tensor:
        """See `FlowSampling.part`."""

    def add_noise_decay(self, share: float, sampler: Sampler) -> None:
        """Let the range narrow by `share` until the end of the training.

        Raises:
            UserError: for a `sampler` whose noise is not learned.
        """
        if share and not sampler.everywhere:
            raise UserError("policy.noise_decay narrows learned noise: use policy.sampler=reinflow or flow_noise")
        self.noise_decay = share
        self.register_buffer("narrowing", torch.zeros(()) if share else None)
        if share:
            self.register_load_state_dict_pre_hook(_with_own_narrowing)

    def anneal(self, progress: float) -> None:
        """See `TrainablePolicy.anneal`: the range is held, then narrows along half a period of a cosine."""
        if self.narrowing is not None:
            # w (1 - cos(pi (progress - HELD) / (1 - HELD))) / 2
            share = max(0.0, progress - HELD) / (1.0 - HELD)
            self.narrowing.fill_(self.noise_decay * (1.0 - math.cos(math.pi * share)) / 2.0)

    def largest_std(self, config: NoiseRange) -> float:
        """Present upper bound of the deviation, in units of the normalised action."""
        if self.narrowing is None:
            return config.std_max
        return config.std_max - float(self.narrowing) * (config.std_max - config.std_min)


def _with_own_narrowing(policy: NarrowingNoise, state: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Add the range of `policy` to weights of a policy whose range is constant, before they are loaded."""
    assert policy.narrowing is not None
    state.setdefault(f"{prefix}narrowing", policy.narrowing)
