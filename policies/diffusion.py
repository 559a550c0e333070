"""Diffusion action-chunk policy (arXiv 2303.04137) with a denoising process that reinforcement learning can score.

Its log-probability has a part for each of the last `tuned_steps` denoising steps, as in DPPO (arXiv 2409.00588): with
algorithm=ppo, `clip_first` and `part_discount` that is DPPO. Differences: the earlier steps are those of the same
network and not of a frozen copy, and their noise is not scored; the networks are those of `policies.chunk_networks`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.command_line.config import at_least
from embodied.contract import Contract
from embodied.errors import UserError
from embodied.policy import Evaluation
from policies.chunk_networks import chunk_network
from policies.generative import GenerativeConfig, GenerativePolicy
from policies.kernels.diffusion import NoiseTable, Prediction, ddim_step, denoised, noised, target
from policies.kernels.flow import gaussian_entropy, gaussian_log_prob


@dataclass
class DiffusionConfig(GenerativeConfig):
    """Sizes and noise of a DiffusionPolicy.

    Training draws one of `train_steps` noise levels of diffusers' `schedule`; sampling takes `denoising_steps` of them
    (all: DDPM with eta 1; fewer: DDIM). While exploring, the noise of a step has `eta` times DDPM's deviation, but at
    least `smallest_std` in the last `tuned_steps`, whose probabilities reinforcement learning scores; acting
    deterministically has none. The network predicts what `prediction` says.
    """

    train_steps: int = 100
    denoising_steps: int = 10
    tuned_steps: int = 5
    schedule: str = "squaredcos_cap_v2"
    prediction: Prediction = Prediction.EPSILON
    eta: float = 1.0
    smallest_std: float = 0.1

    def __post_init__(self) -> None:
        """Raise UserError for impossible sizes."""
        super().__post_init__()
        at_least(self, 1, "train_steps", "denoising_steps", "tuned_steps")
        if self.denoising_steps > self.train_steps or self.tuned_steps > self.denoising_steps:
            raise UserError(
                "expected policy.tuned_steps <= denoising_steps <= train_steps, got "
                f"{self.tuned_steps}, {self.denoising_steps} and {self.train_steps}"
            )
        if self.smallest_std <= 0.0:
            raise UserError(f"expected policy.smallest_std above 0, got {self.smallest_std}")

    def build(self, contract: Contract) -> DiffusionPolicy:
        """Make the policy for `contract`; only the critic reads privileged observations."""
        return DiffusionPolicy(contract, self)


class DiffusionPolicy(GenerativePolicy):
    """Predicts chunks of H actions by denoising them in S steps; P = `tuned_steps` parts of a log-probability."""

    config: DiffusionConfig
    scores = True

    def __init__(self, contract: Contract, config: DiffusionConfig) -> None:
        super().__init__(contract, config, "diffusion")
        self.noise_table = NoiseTable(config.train_steps, config.denoising_steps, config.schedule)
        self.network = chunk_network(
            config.network, contract.horizon, contract.action.shape[-1], self.encoder.out_features, config.hidden,
            config.depth, ticks=config.train_steps,
        )  # fmt: skip

    def _generate(
        self, x: Tensor, features: Tensor, deterministic: bool, generator: torch.Generator | None
    ) -> tuple[Tensor, TensorDict, Tensor]:
        """The path [B, P+1, H, A] through the last P steps is the sample."""
        first = self.config.denoising_steps - self.config.tuned_steps
        path, parts = [x], [torch.zeros(len(x), device=x.device)] * self.config.tuned_steps
        for step in range(self.config.denoising_steps):
            index = torch.full((len(x),), step, device=x.device)
            mean, std = self._kernel(path[-1], index, features, deterministic)
            noise = torch.randn(x.shape, device=x.device, generator=generator) if not deterministic else 0.0
            path.append(mean + std * noise)
            if step >= first and not deterministic:
                parts[step - first] = self._aggregated(gaussian_log_prob(path[-1], mean, std))
        sample = TensorDict({"path": torch.stack(path[first:], 1)}, batch_size=[len(x)])
        return path[-1], sample, torch.stack(parts, 1)

    def evaluate(self, observation: TensorDict, sample: TensorDict) -> Evaluation:
        """Log-probabilities of the stored steps, all of which the network sees in one batch."""
        observation = self.encoder.read(observation)
        count, steps = len(sample), self.config.tuned_steps
        features = self.encoder(observation).repeat_interleave(steps, 0)
        x, following = (sample["path"][:, part].flatten(0, 1) for part in (slice(None, -1), slice(1, None)))
        first = self.config.denoising_steps - steps
        index = torch.arange(first, first + steps, device=x.device).repeat(count)
        mean, std = self._kernel(x, index, features, deterministic=False)
        log_prob = self._aggregated(gaussian_log_prob(following, mean, std))
        entropy = self._aggregated(gaussian_entropy(std).expand_as(x))
        return Evaluation(log_prob.view(count, steps), entropy.view(count, steps), self.value(observation))

    def _error(self, target_chunk: Tensor, features: Tensor) -> Tensor:
        """Squared error of the prediction, mean over the action's elements, at random noise levels."""
        times = torch.randint(self.config.train_steps, (len(target_chunk),), device=target_chunk.device)
        noise, level = torch.randn_like(target_chunk), self.noise_table.table[times]
        predicted = self._predict(noised(target_chunk, noise, level), times, features)
        return (predicted - target(target_chunk, noise, level, self.config.prediction)).square().mean(-1)

    def _predict(self, x: Tensor, times: Tensor, features: Tensor) -> Tensor:
        return self.network(x, times / self.config.train_steps, features)

    def _kernel(self, x: Tensor, index: Tensor, features: Tensor, deterministic: bool) -> tuple[Tensor, Tensor]:
        """Mean [B, H, A] and deviation [B, 1, 1] of the denoising steps `index` [B] from `x`."""
        table = self.noise_table
        before, after = table.before[index], table.after[index]
        predicted = self._predict(x, table.times[index], features)
        low, high = ((limit - self.action_mean) / self.action_std for limit in (self.action_low, self.action_high))
        action = denoised(x, predicted, before, self.config.prediction).clamp(low, high)
        mean, std = ddim_step(x, action, before, after, 0.0 if deterministic else self.config.eta)
        if deterministic:
            return mean, std
        tuned = (index >= self.config.denoising_steps - self.config.tuned_steps).view(-1, 1, 1)
        return mean, torch.where(tuned, std.clamp_min(self.config.smallest_std), std)
