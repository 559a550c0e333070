"""Sampling and scoring of denoising paths over any velocity field, with the samplers of pi_RL (arXiv 2510.25889).

Letters: B samples, S denoising steps, H chunk length, A action dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from embodied.errors import UserError
from policies.kernels.flow import (
    TimeGrid,
    flow_noise_std,
    flow_sde_step,
    gaussian_entropy,
    gaussian_log_prob,
    guided_velocity,
    ode_step,
)

Field = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Noisy chunks x [B, H, A] and steps of the grid [B] -> velocity [B, H, A], and hidden features for learned noise."""


class Sampler(Enum):
    """Denoising kernel for exploration; deterministic acting always uses the ODE."""

    ODE = "ode"
    FLOW_SDE = "flow_sde"
    FLOW_NOISE = "flow_noise"


@dataclass(frozen=True)
class FlowSampling:
    """One time grid and kernel for both sampling and scoring.

    `spread(hidden, index)` gives the learned noise of Flow-Noise before squashing, [B, H, A]. `part` sums the
    log-probabilities [B, H, A] of a step to those of its part, [B, 1].
    """

    grid: TimeGrid
    sampler: Sampler
    noise_level: float
    std_min: float
    std_max: float
    spread: Callable[[Tensor, Tensor], Tensor]
    part: Callable[[Tensor], Tensor]

    def denoise(
        self, x: Tensor, field: Field, deterministic: bool, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Path [B, S+1, H, A] from noise `x` [B, H, A], index of its noisy step [B] (-1: none), log_prob [B, 1]."""
        count, steps = len(x), self.grid.steps
        explore = not deterministic and self.sampler is not Sampler.ODE
        noisy = torch.full((count,), -1, device=x.device)
        if explore:
            noisy = torch.randint(steps, (count,), device=x.device, generator=generator)
        path, log_prob = [x], torch.zeros(count, 1, device=x.device)
        for step in range(steps):
            index = torch.full((count,), step, device=x.device)
            velocity, hidden = field(x, index)
            following = ode_step(x, velocity, self.grid)
            if explore:
                mean, std = self._kernel(x, velocity, index, hidden)
                sampled = mean + std * torch.randn(x.shape, device=x.device, generator=generator)
                chosen = self._chosen(noisy, index)
                log_prob = log_prob + chosen[:, None] * self.part(gaussian_log_prob(sampled, mean, std))
                following = torch.where(chosen.view(-1, 1, 1), sampled, following)
            x = following
            path.append(x)
        return torch.stack(path, 1), noisy, log_prob

    def inpaint(self, x: Tensor, field: Field, target: Tensor, mask: Tensor, strongest: float) -> Tensor:
        """Chunks [B, H, A] from noise `x`, guided to `target` [B, H, A] as `guided_velocity` is (arXiv 2506.07339)."""
        for step in range(self.grid.steps):
            index = torch.full((len(x),), step, device=x.device)
            time = float(self.grid.times(index)[0])
            velocity = guided_velocity(lambda x, index=index: field(x, index)[0], x, time, target, mask, strongest)
            x = ode_step(x, velocity, self.grid)
        return x

    def score(self, path: Tensor, noisy: Tensor, field: Field) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy [B, 1] of paths: one call of `field` for Flow-SDE, S for Flow-Noise.

        Raises:
            UserError: for the ODE, which has no likelihood.
        """
        if self.sampler is Sampler.ODE:
            raise UserError("sampler=ode has no likelihood; use flow_sde or flow_noise")
        rows = torch.arange(len(path), device=path.device)
        everywhere = self.sampler is Sampler.FLOW_NOISE
        indices = (
            [torch.full_like(noisy, step) for step in range(self.grid.steps)] if everywhere else [noisy.clamp_min(0)]
        )
        log_prob = entropy = torch.zeros(len(path), 1, device=path.device)
        for index in indices:
            x, following = path[rows, index], path[rows, index + 1]
            velocity, hidden = field(x, index)
            mean, std = self._kernel(x, velocity, index, hidden)
            log_prob = log_prob + self.part(gaussian_log_prob(following, mean, std))
            entropy = entropy + self.part(gaussian_entropy(std).expand_as(x))
        return log_prob, entropy

    def _kernel(self, x: Tensor, velocity: Tensor, index: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        if self.sampler is Sampler.FLOW_SDE:
            return flow_sde_step(x, velocity, index, self.grid, self.noise_level)
        raw = self.spread(hidden, index)
        return ode_step(x, velocity, self.grid), flow_noise_std(raw, self.std_min, self.std_max)

    def _chosen(self, noisy: Tensor, index: Tensor) -> Tensor:
        return torch.ones_like(index, dtype=torch.bool) if self.sampler is Sampler.FLOW_NOISE else noisy == index
