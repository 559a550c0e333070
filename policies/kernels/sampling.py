"""Sampling and scoring of denoising paths over any velocity field.

Flow-SDE and Flow-Noise follow pi_RL (arXiv 2510.25889). ReinFlow (arXiv 2505.22094) also learns the noise, of at most
three deviations:

    x_{i+1} ~ N(x_i - delta v(x_i, t_i, o), s(t_i, o)^2),  log p(path) = sum_i log N(x_{i+1}; mean_i, s_i) + constant

Its authors train with the mean over steps and elements instead of the sum (`policy.aggregate=mean`), and therefore
with `algorithm.clip=0.01`. Differs from ReinFlow: only the executed action is clamped to its limits, since clamped
means have no gradient, and the mean over steps leaves the initial noise out. The authors' narrowing of s late in
training is `policy.noise_decay`, see `NarrowingNoise`.

Letters: B samples, S denoising steps, H chunk length, A action dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from embodied.contract import Contract
from embodied.errors import UserError
from embodied.execution.chunking import Running
from policies.kernels.flow import (
    TimeGrid,
    flow_noise_std,
    flow_sde_step,
    gaussian_entropy,
    gaussian_log_prob,
    guided_velocity,
    ode_step,
)

WIDEST = 3.0
"""ReinFlow's largest noise, in deviations."""
Field = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Function of noisy chunks [B, H, A] and grid steps [B] -> velocity [B, H, A], and features for learned noise."""


class Sampler(Enum):
    """Denoising kernel for exploration; deterministic acting always uses the ODE."""

    ODE = "ode"
    FLOW_SDE = "flow_sde"
    FLOW_NOISE = "flow_noise"
    REINFLOW = "reinflow"

    @property
    def everywhere(self) -> bool:
        """Whether every step is noisy, with a learned deviation."""
        return self in (Sampler.FLOW_NOISE, Sampler.REINFLOW)


@dataclass(frozen=True)
class FlowSampling:
    """One time grid and kernel for both sampling and scoring.

    `spread(hidden, index)` returns the learned noise before squashing, [B, H, A]. `part` reduces the log-probabilities
    [B, H, A] of a step to terms of K actions, [B, K, 1]; the sum of terms over the path is divided by `divisor` where
    every step is noisy. The first `prefix` actions are given, and stay as they are.
    """

    grid: TimeGrid
    sampler: Sampler
    noise_level: float
    std_min: float
    std_max: float
    spread: Callable[[Tensor, Tensor], Tensor]
    part: Callable[[Tensor], Tensor]
    divisor: int = 1
    prefix: int = 0

    def denoise(
        self, x: Tensor, field: Field, deterministic: bool, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Denoise the noise `x` to a path [B, S+1, H, A].

        Also returns the index of its noisy step [B] (-1: none) and terms of log_prob [B, K, 1].
        """
        # not len(x), which would be a constant in exported graphs
        count = x.shape[0]
        steps = self.grid.steps
        explore = not deterministic and self.sampler is not Sampler.ODE
        noisy = torch.full((count,), -1, device=x.device)
        if explore:
            noisy = torch.randint(steps, (count,), device=x.device, generator=generator)
        path = [x]
        log_prob = self.part(torch.zeros_like(x))
        for step in range(steps):
            index = torch.full((count,), step, device=x.device)
            velocity, hidden = field(x, index)
            following = ode_step(x, velocity, self.grid)
            if explore:
                mean, std = self._kernel(x, velocity, index, hidden)
                # x_{i+1} = mean + std * eps in noisy steps, x - delta v in the others
                sampled = mean + std * self._noise(x, generator)
                is_noisy = self._chosen(noisy, index)
                log_prob = log_prob + is_noisy.view(-1, 1, 1) * self.part(gaussian_log_prob(sampled, mean, std))
                following = torch.where(is_noisy.view(-1, 1, 1), sampled, following)
            if self.prefix:
                following = torch.cat((x[:, : self.prefix], following[:, self.prefix :]), 1)
            x = following
            path.append(x)
        return torch.stack(path, 1), noisy, self._of_path(log_prob)

    def inpaint(self, x: Tensor, field: Field, target: Tensor, mask: Tensor, strongest: float) -> Tensor:
        """Chunks [B, H, A] from noise `x`, guided to `target` [B, H, A] by `guided_velocity` (arXiv 2506.07339)."""
        for step in range(self.grid.steps):
            index = torch.full((len(x),), step, device=x.device)
            time = float(self.grid.times(index)[0])
            velocity = guided_velocity(lambda x, index=index: field(x, index)[0], x, time, target, mask, strongest)
            x = ode_step(x, velocity, self.grid)
        return x

    def continued(
        self, x: Tensor, velocity: Callable[[Tensor, Tensor], Tensor], prefix: Tensor, keeps: Tensor
    ) -> Tensor:
        """Chunks [B, H, A] from noise `x`, with those of `prefix` [B, H, A] where `keeps` [B, H] (arXiv 2512.05964).

        `velocity` is a function of chunks [B, H, A] and times [B, H], which are 0 in the prefix.
        """
        for step in range(self.grid.steps):
            x = torch.where(keeps.unsqueeze(-1), prefix, x)
            times = self.grid.times(torch.full(keeps.shape, step, device=x.device))
            x = ode_step(x, velocity(x, torch.where(keeps, 0.0, times)), self.grid)
        return torch.where(keeps.unsqueeze(-1), prefix, x)

    def score(self, path: Tensor, noisy: Tensor, field: Field) -> tuple[Tensor, Tensor]:
        """Terms [B, K, 1] of log-probability and entropy: one call of `field` for Flow-SDE, S for learned noise.

        Raises:
            UserError: for the ODE, which has no likelihood.
        """
        if self.sampler is Sampler.ODE:
            raise UserError("sampler=ode has no likelihood; use flow_sde, flow_noise or reinflow")
        rows = torch.arange(len(path), device=path.device)
        all_noisy = self.sampler.everywhere
        indices = (
            [torch.full_like(noisy, step) for step in range(self.grid.steps)] if all_noisy else [noisy.clamp_min(0)]
        )
        log_prob = entropy = self.part(torch.zeros_like(path[:, 0]))
        for index in indices:
            x = path[rows, index]
            following = path[rows, index + 1]
            velocity, hidden = field(x, index)
            mean, std = self._kernel(x, velocity, index, hidden)
            # log p = sum over noisy steps of log N(x_{i+1}; mean_i, std_i)
            log_prob = log_prob + self.part(gaussian_log_prob(following, mean, std))
            entropy = entropy + self.part(gaussian_entropy(std).expand_as(x))
        return self._of_path(log_prob), self._of_path(entropy)

    def _kernel(self, x: Tensor, velocity: Tensor, index: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        if self.sampler is Sampler.FLOW_SDE:
            return flow_sde_step(x, velocity, index, self.grid, self.noise_level)
        raw = self.spread(hidden, index).float()  # float32, also of a network that computes in bfloat16
        return ode_step(x, velocity, self.grid), flow_noise_std(raw, self.std_min, self.std_max)

    def _noise(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        noise = torch.randn(x.shape, device=x.device, generator=generator)
        return noise.clamp(-WIDEST, WIDEST) if self.sampler is Sampler.REINFLOW else noise

    def _of_path(self, total: Tensor) -> Tensor:
        return total / self.divisor if self.sampler.everywhere else total

    def _chosen(self, noisy: Tensor, index: Tensor) -> Tensor:
        return torch.ones_like(index, dtype=torch.bool) if self.sampler.everywhere else noisy == index


def undefined_log_prob(count: int, contract: Contract, device: torch.device) -> Tensor:
    """Terms [count, K, 1] of a log-probability that is not known: NaN."""
    return torch.full((count, contract.executed, 1), torch.nan, device=device)


def check_delay(trained_delay: int, contract: Contract, others: Mapping[str, bool]) -> None:
    """Raise UserError unless the trained delay is shorter than a chunk.

    Under the delay of a run also if it is set, or one of the `others`, whether options by name are set.
    """
    options = [name for name, is_set in {"trained_delay": trained_delay > 0, **others}.items() if is_set]
    if contract.delay and options:
        raise UserError(
            f"with delay={contract.delay} every chunk continues the one before; leave out policy.{options[0]}"
        )
    if trained_delay >= contract.horizon:
        raise UserError(f"expected policy.trained_delay below task.horizon={contract.horizon}, got {trained_delay}")


def trained_for(running: Running, trained_delay: int) -> bool:
    """Whether training conditioned on actions, and on at least as many as are frozen."""
    return bool(trained_delay) and int(running.frozen.max()) <= trained_delay
