"""Denoising kernels of diffusion policies as pure functions over one table of noise levels.

Convention: x_k = sqrt(ab_k) action + sqrt(1 - ab_k) noise for steps k = 0 .. T - 1, with the table ab of a scheduler of
diffusers. Sampling takes S <= T of them, evenly spaced; DDPM (arXiv 2006.11239) is DDIM (arXiv 2010.02502) with eta = 1
over all steps. Letters: N samples, H chunk length, A action dimension.
"""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor, nn

from embodied.extras import needs_extra


class Prediction(Enum):
    """Quantity that the network predicts: the noise, the action, or v = sqrt(ab) noise - sqrt(1 - ab) action."""

    EPSILON = "epsilon"
    SAMPLE = "sample"
    V = "v_prediction"


class NoiseTable(nn.Module):
    """Levels of T = `train_steps` noise steps, of which sampling takes `steps`.

    `schedule` is a beta_schedule of diffusers. `times` [S] are the steps in the order of sampling, `before` [S] and
    `after` [S] the share ab of the action's variance before and after each; 1 after the last.
    """

    table: Tensor
    times: Tensor
    before: Tensor
    after: Tensor

    def __init__(self, train_steps: int, steps: int, schedule: str) -> None:
        super().__init__()
        with needs_extra("diffusion"):
            from diffusers import DDIMScheduler

        scheduler = DDIMScheduler(train_steps, beta_schedule=schedule)
        table = scheduler.alphas_cumprod
        times = torch.arange(steps - 1, -1, -1) * (train_steps // steps)
        before = table[times]
        after = torch.cat((before[1:], torch.ones(1)))
        for name, values in (("table", table), ("times", times), ("before", before), ("after", after)):
            self.register_buffer(name, values, persistent=False)


def shaped(levels: Tensor) -> Tensor:
    """Reshape values [N] of samples to [N, 1, 1], to broadcast over chunks [N, H, A]."""
    return levels.view(-1, 1, 1)


def noised(action: Tensor, noise: Tensor, level: Tensor) -> Tensor:
    """Noisy chunk x_k = sqrt(ab) action + sqrt(1 - ab) noise for ab = `level` [N]."""
    level = shaped(level)
    return level.sqrt() * action + (1.0 - level).sqrt() * noise


def target(action: Tensor, noise: Tensor, level: Tensor, prediction: Prediction) -> Tensor:
    """Target of the network's prediction at ab_k = `level` [N]."""
    level = shaped(level)
    if prediction is Prediction.EPSILON:
        return noise
    return action if prediction is Prediction.SAMPLE else level.sqrt() * noise - (1.0 - level).sqrt() * action


def denoised(x: Tensor, predicted: Tensor, level: Tensor, prediction: Prediction) -> Tensor:
    """Action that `predicted` implies at `x`, with ab_k = `level` [N]."""
    level = shaped(level)
    if prediction is Prediction.EPSILON:
        # x = sqrt(ab) action + sqrt(1 - ab) noise, solved for the action
        return (x - (1.0 - level).sqrt() * predicted) / level.sqrt()
    return predicted if prediction is Prediction.SAMPLE else level.sqrt() * x - (1.0 - level).sqrt() * predicted


def ddim_step(x: Tensor, action: Tensor, before: Tensor, after: Tensor, eta: float) -> tuple[Tensor, Tensor]:
    """Mean [N, H, A] and deviation [N, 1, 1] of the step from ab = `before` to `after` [N], for an estimated `action`.

    sigma = eta sqrt((1 - after) / (1 - before) (1 - before / after));
    mean = sqrt(after) action + sqrt(1 - after - sigma^2) noise, with the noise that x and the action imply.
    """
    before = shaped(before)
    after = shaped(after)
    variance = eta**2 * (1.0 - after) / (1.0 - before) * (1.0 - before / after)
    noise = (x - before.sqrt() * action) / (1.0 - before).sqrt()
    return after.sqrt() * action + (1.0 - after - variance).clamp_min(0.0).sqrt() * noise, variance.sqrt()
