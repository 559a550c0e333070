"""Sampling kernels of flow-matching policies as pure functions over one time grid.

Convention (openpi): time 1 is noise, time 0 is the action; x_t = t * noise + (1 - t) * action and the network predicts
the velocity u = noise - action. Letters: N samples, H chunk length, A action dimension, S denoising steps.

Sources: Flow-SDE and Flow-Noise from pi_RL (arXiv 2510.25889), the SDE drift from Flow-GRPO (arXiv 2505.05470),
guidance from real-time chunking (arXiv 2506.07339), conditioning on actions from its training-time form (arXiv
2512.05964).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TimeGrid:
    """Times t_0 = 1 > t_1 > ... > t_S = 0 in equal steps of `delta`, used for both sampling and scoring."""

    steps: int

    @property
    def delta(self) -> float:
        """Length of one denoising step."""
        return 1.0 / self.steps

    def times(self, index: Tensor) -> Tensor:
        """Time t_index for integer tensor `index`, same shape."""
        return 1.0 - index.float() * self.delta


def ode_step(x: Tensor, velocity: Tensor, grid: TimeGrid) -> Tensor:
    """Deterministic Euler step x - delta * v."""
    return x - grid.delta * velocity


def gaussian_velocity(x: Tensor, t: Tensor, std: float) -> Tensor:
    """Velocity at `x` and time `t` whose flow ends in actions N(0, std^2).

    E[noise - action | x] = (t - (1 - t) std^2) / (t^2 + (1 - t)^2 std^2) x
    """
    variance = (1.0 - t) * std**2
    return (t - variance) / (t.square() + (1.0 - t) * variance) * x


def flow_sde_step(
    x: Tensor, velocity: Tensor, index: Tensor, grid: TimeGrid, noise_level: float
) -> tuple[Tensor, Tensor]:
    """Mean [N, H, A] and standard deviation [N, 1, 1] of the stochastic step with the ODE's marginals.

    sigma = a * sqrt(t / (1 - t)), where t = 1 uses 1 - t_1 in the denominator;
    mean = x - delta * v - sigma^2 * delta / (2 t) * (x + (1 - t) * v); std = sqrt(delta) * sigma.
    """
    t = grid.times(index)
    denominator = torch.where(index == 0, torch.full_like(t, grid.delta), 1.0 - t)
    sigma = (noise_level * torch.sqrt(t / denominator)).view(-1, 1, 1)
    t = t.view(-1, 1, 1)
    noise_estimate = x + (1.0 - t) * velocity
    mean = x - grid.delta * velocity - sigma.square() * grid.delta / (2.0 * t) * noise_estimate
    return mean, math.sqrt(grid.delta) * sigma


def guided_velocity(
    velocity: Callable[[Tensor], Tensor], x: Tensor, time: float, target: Tensor, mask: Tensor, strongest: float
) -> Tensor:
    """Velocity [N, H, A] at `x` and `time`, with the chunk guided to `target` [N, H, A] by a `mask` [N, H, 1 or A].

    Pseudo-inverse guidance (arXiv 2506.07339, equations 2 to 4, whose t is our 1 - t):
    u - w J^T mask (target - a), a = x - t u, J = da/dx, w = min(strongest, (t^2 + (1 - t)^2) / (t (1 - t))).
    """
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        unguided = velocity(x)
        action = x - time * unguided
        error = (mask * (target - action)).detach()
        (gradient,) = torch.autograd.grad(action, x, error)
    denominator = time * (1.0 - time)
    weight = min(strongest, (time**2 + (1.0 - time) ** 2) / denominator) if denominator > 0.0 else strongest
    return unguided.detach() - weight * gradient


def prefix_times(time: Tensor, horizon: int, prefix: int) -> Tensor:
    """Times of each of `horizon` actions, [N, H]: 0 of the first `prefix`, which are given, else `time` [N].

    Without a prefix `time` itself.
    """
    if not prefix:
        return time
    return torch.where(torch.arange(horizon, device=time.device) < prefix, 0.0, time.unsqueeze(-1))


def prefix_mask(count: int, horizon: int, most: int, device: torch.device) -> Tensor:
    """Mask of the actions that training does not denoise, [N, H] bool: the first d, d uniform from 0 to `most`."""
    if not most:  # leaves the random generator unchanged
        return torch.zeros(count, horizon, dtype=torch.bool, device=device)
    return torch.arange(horizon, device=device) < torch.randint(most + 1, (count, 1), device=device)


def flow_noise_std(raw: Tensor, std_min: float, std_max: float) -> Tensor:
    """Learned standard deviation of the Flow-Noise step: log-variance squashed into [2 log std_min, 2 log std_max]."""
    low = 2.0 * math.log(std_min)
    high = 2.0 * math.log(std_max)
    return torch.exp(0.5 * (low + (high - low) * (torch.tanh(raw) + 1.0) / 2.0))


def gaussian_log_prob(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Elementwise log N(x; mean, std)."""
    return -0.5 * ((x - mean) / std).square() - torch.log(std) - 0.5 * math.log(2.0 * math.pi)


def gaussian_entropy(std: Tensor) -> Tensor:
    """Elementwise entropy of N(., std)."""
    return 0.5 + 0.5 * math.log(2.0 * math.pi) + torch.log(std)
