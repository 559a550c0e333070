"""Diffusion action-chunk policy (arXiv 2303.04137) with a denoising process that reinforcement learning can score.

Its log-probability has a part for each of the last `tuned_steps` denoising steps, as in DPPO (arXiv 2409.00588): with
algorithm=ppo, `clip_first` and `part_discount` that is DPPO. Differences: the earlier steps are those of the same
network and not of a frozen copy, and their noise is not scored. The networks are in
`policies.generation.chunk_networks`.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.configuration import Fraction, PositiveFloat, PositiveInt
from embodied.contract import Contract
from embodied.errors import UserError
from embodied.policy import Evaluation, copy_statistics, sum_of_executed
from policies.encoders.base import EncoderKind
from policies.flat import PlainEncoder
from policies.generation import diffusion_checkpoint
from policies.generation.base import GenerativeConfig, GenerativePolicy
from policies.generation.chunk_networks import ChunkUNet, NetworkKind, chunk_network
from policies.generation.diffusion_checkpoint import Published
from policies.kernels.diffusion import NoiseTable, Prediction, ddim_step, denoised, noised, target
from policies.kernels.flow import gaussian_entropy, gaussian_log_prob
from policies.lerobot import diffusion as lerobot_diffusion
from policies.lerobot.diffusion import LeRobotDiffusion, LeRobotEncoder
from policies.vla.checkpoints.weights import planned

SETTINGS = {"train_steps": "num_train_timesteps", "schedule": "beta_schedule", "prediction": "prediction_type"}
"""Names of options in diffusion_policy and LeRobot."""
FILES = ".ckpt", ".safetensors"
"""Ends of the names of diffusion_policy's files; folders and names on the hub are LeRobot's."""


@dataclass
class DiffusionConfig(GenerativeConfig):
    """Sizes and noise of a DiffusionPolicy.

    Training draws one of `train_steps` noise levels of diffusers' `schedule`; sampling takes `denoising_steps` of them
    (all: DDPM with eta 1; fewer: DDIM). While exploring, the noise of a step has `eta` times DDPM's deviation, but at
    least `smallest_std` in the last `tuned_steps`, whose probabilities reinforcement learning scores; deterministic
    acting has none. The network predicts the quantity `prediction`. `weights` is a checkpoint of
    diffusion_policy for states (a file), or of LeRobot's diffusion policy (a folder `pretrained_model`, or a name on
    the hub), with statistics: its sizes replace those of encoder and network.
    """

    train_steps: PositiveInt = 100
    denoising_steps: PositiveInt = 10
    tuned_steps: PositiveInt = 5
    schedule: str = "squaredcos_cap_v2"
    prediction: Prediction = Prediction.EPSILON
    eta: Fraction = 1.0
    smallest_std: PositiveFloat = 0.1
    weights: str | None = None

    def __post_init__(self) -> None:
        """Raise UserError for numbers that are out of range or do not go together."""
        super().__post_init__()
        if self.denoising_steps > self.train_steps or self.tuned_steps > self.denoising_steps:
            raise UserError(
                "expected policy.tuned_steps <= denoising_steps <= train_steps, got "
                f"{self.tuned_steps}, {self.denoising_steps} and {self.train_steps}"
            )

    def build(self, contract: Contract) -> DiffusionPolicy:
        """Build the policy for `contract`; only the critic reads privileged observations."""
        if self.weights is None:
            return DiffusionPolicy(contract, self)
        from_file = self.weights.endswith(FILES) or Path(self.weights).is_file()
        published = diffusion_checkpoint.read(self.weights) if from_file else lerobot_diffusion.published(self.weights)
        trained_with = {name: published.settings.get(setting) for name, setting in SETTINGS.items()}
        configured = {"train_steps": self.train_steps, "schedule": self.schedule, "prediction": self.prediction.value}
        if options := [
            f"policy.{name}={value}" for name, value in trained_with.items() if value not in (None, configured[name])
        ]:
            raise UserError(f"policy.weights={self.weights} has learned with other noise: set {' '.join(options)}")
        config = replace(self, encoder=EncoderKind.PLAIN, network=NetworkKind.UNET)
        policy = DiffusionPolicy(contract, config, published)
        if not planned():
            policy.adopt()
        return policy


class DiffusionPolicy(GenerativePolicy):
    """Policy that predicts chunks of H actions by denoising them in S steps.

    A log-probability has P = `tuned_steps` parts. With the checkpoint `pretrained`, it has its sizes, statistics and,
    after `adopt`, its weights. Chunks then have `generated` actions, of which the first `past` lie before the present.

    Raises:
        UserError: where they do not fit the contract.
    """

    config: DiffusionConfig
    kind = "diffusion"

    def __init__(self, contract: Contract, config: DiffusionConfig, pretrained: Published | None = None) -> None:
        past = 0 if pretrained is None else pretrained.past
        length = None if pretrained is None else pretrained.length
        own = pretrained.encoder(contract) if isinstance(pretrained, LeRobotDiffusion) else None
        super().__init__(contract, config, "diffusion", past, length or past + contract.horizon, own)
        self.noise_table = NoiseTable(config.train_steps, config.denoising_steps, config.schedule)
        self.weights_of = config.weights
        self.pretrained, actions, features = pretrained, contract.action.shape[-1], self.encoder.out_features
        if pretrained is None:
            self.network = chunk_network(
                config.network,
                contract.horizon,
                actions,
                features,
                config.hidden,
                config.depth,
                ticks=config.train_steps,
            )
            return
        _check(pretrained, contract, None if own else features)
        self.network = ChunkUNet(actions, features, pretrained.widths, config.train_steps, pretrained.time_width)

    def adopt(self) -> None:
        """Load the weights and statistics of the checkpoint.

        Raises:
            UserError: for weights of another network.
        """
        assert self.pretrained is not None
        if isinstance(self.pretrained, LeRobotDiffusion):
            self.pretrained.load_into(self.network, self.encoder)
            return self._adopt_statistics()
        try:
            self.network.load_state_dict(self.pretrained.network)
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"policy.weights={self.pretrained.source} is of another network ({reason}...)") from error
        return self._adopt_statistics()

    @torch.no_grad()
    def _adopt_statistics(self) -> None:
        assert self.pretrained is not None
        # y = scale x + offset, so that mean = -offset / scale and deviation = 1 / scale
        (scale, offset), (action_scale, action_offset) = self.pretrained.state, self.pretrained.action
        if isinstance(self.encoder, PlainEncoder):
            count = self.pretrained.observations
            self.encoder.mean[: self.pretrained.features].copy_((-offset / scale).repeat(count))
            self.encoder.std[: self.pretrained.features].copy_((1.0 / scale).repeat(count))
            self.encoder.fitted.fill_(True)
        self.action_mean.copy_(-action_offset / action_scale)
        self.action_std.copy_(1.0 / action_scale)

    def fit(self, observation: TensorDict, actions: Tensor) -> None:
        """See `GenerativePolicy.fit`; statistics of a checkpoint stay, and only critics use the new ones."""
        super().fit(observation, actions)
        if self.pretrained is not None:
            self._adopt_statistics()

    def with_new_weights(self) -> Self:
        """See `GenerativePolicy.with_new_weights`; the policy has the sizes of the checkpoint, if there is one."""
        policy = type(self)(self.contract, self.config, self.pretrained).to(self.device).train(self.training)
        copy_statistics(policy, self)
        return policy

    def _generate(
        self, x: Tensor, features: Tensor, deterministic: bool, generator: torch.Generator | None
    ) -> tuple[Tensor, TensorDict, Tensor]:
        """Denoise chunks; the sample is the path [B, P+1, H, A] through the last P steps."""
        first = self.config.denoising_steps - self.config.tuned_steps
        path = [x]
        parts = [self._aggregated(torch.zeros_like(x))] * self.config.tuned_steps
        for step in range(self.config.denoising_steps):
            index = torch.full(x.shape[:1], step, device=x.device)
            mean, std = self._kernel(path[-1], index, features, deterministic)
            noise = torch.randn(x.shape, device=x.device, generator=generator) if not deterministic else 0.0
            # x_{s+1} = mean(x_s) + std_s * noise
            path.append(mean + std * noise)
            if step >= first and not deterministic:
                parts[step - first] = self._aggregated(gaussian_log_prob(path[-1], mean, std))
        sample = TensorDict({"path": torch.stack(path[first:], 1)}, batch_size=[len(x)])
        return path[-1], sample, torch.stack(parts, -1)

    def evaluate(self, observation: TensorDict, sample: TensorDict) -> Evaluation:
        """Log-probabilities of the stored steps, which the network evaluates in one batch."""
        observation = self.encoder.read(observation)
        count = len(sample)
        steps = self.config.tuned_steps
        features = self.actor_features(observation).repeat_interleave(steps, 0)
        # pairs (x_s, x_{s+1}) of all steps, [B * P, H, A]
        x, following = (sample["path"][:, part].flatten(0, 1) for part in (slice(None, -1), slice(1, None)))
        first = self.config.denoising_steps - steps
        index = torch.arange(first, first + steps, device=x.device).repeat(count)
        mean, std = self._kernel(x, index, features, deterministic=False)
        log_prob = self._aggregated(gaussian_log_prob(following, mean, std))
        entropy = self._aggregated(gaussian_entropy(std).expand_as(x))
        log_prob, entropy = (
            sum_of_executed(terms.view(count, steps, -1).transpose(1, 2), sample) for terms in (log_prob, entropy)
        )
        outputs = self.value_outputs(observation)
        return Evaluation(log_prob, entropy, self.value_head.values(outputs), outputs)

    def loss(self, observation: TensorDict, actions: Tensor, valid: Tensor) -> Tensor:
        """See `GenerativePolicy.loss`; LeRobot's policies crop pictures at random places."""
        crops = self.encoder.random_crops() if isinstance(self.encoder, LeRobotEncoder) else nullcontext()
        with crops:
            return super().loss(observation, actions, valid)

    def _error(self, target_chunk: Tensor, features: Tensor) -> Tensor:
        """Squared error |network(x_t, t) - target|^2, mean over the action's elements, at random noise levels.

        Actions of a chunk before and after those of the target repeat its first and last, and have no error.
        """
        horizon = target_chunk.shape[1]
        index = torch.arange(-self.past, self.generated - self.past, device=target_chunk.device)
        # generated chunks may begin before the present and be longer than the target
        target_chunk = target_chunk[:, index.clamp(0, horizon - 1)]
        times = torch.randint(self.config.train_steps, (len(target_chunk),), device=target_chunk.device)
        noise = torch.randn_like(target_chunk)
        level = self.noise_table.table[times]
        predicted = self._predict(noised(target_chunk, noise, level), times, features)
        error = (predicted - target(target_chunk, noise, level, self.config.prediction)).square().mean(-1)
        return error[:, self.past : self.past + horizon]

    def _predict(self, x: Tensor, times: Tensor, features: Tensor) -> Tensor:
        return self.network(x, times / self.config.train_steps, features)

    def _kernel(self, x: Tensor, index: Tensor, features: Tensor, deterministic: bool) -> tuple[Tensor, Tensor]:
        """Mean [B, H, A] and deviation [B, 1, 1] of the denoising steps `index` [B] from `x`."""
        table = self.noise_table
        before = table.before[index]
        after = table.after[index]
        predicted = self.guided(lambda each: self._predict(x, table.times[index], each), features)
        low, high = ((limit - self.action_mean) / self.action_std for limit in (self.action_low, self.action_high))
        if self.pretrained is not None and self.pretrained.settings.get("clip_sample", True):
            low = low.clamp_min(-1.0)
            high = high.clamp_max(1.0)
        # x_0 from the prediction, clamped, then the DDIM step from it
        action = denoised(x, predicted, before, self.config.prediction).clamp(low, high)
        mean, std = ddim_step(x, action, before, after, 0.0 if deterministic else self.config.eta)
        if deterministic:
            return mean, std
        tuned = (index >= self.config.denoising_steps - self.config.tuned_steps).view(-1, 1, 1)
        # a lower bound of the deviation, so that ratios of scored steps stay finite
        return mean, torch.where(tuned, std.clamp_min(self.config.smallest_std), std)


def _check(pretrained: Published, contract: Contract, features: int | None) -> None:
    """Raise UserError unless `pretrained` reads `features` inputs, and predicts the actions of `contract`.

    With `features` of None the inputs have been checked.
    """
    name = f"policy.weights={pretrained.source}"
    actions = contract.action.shape[-1]
    state = len(pretrained.state[0])
    count = pretrained.observations
    if features is not None and (features != count * state or pretrained.features != count * state):
        reads = f"{count} observations, oldest first, of {state} elements"
        raise UserError(f"{name} reads {reads}: {pretrained.features} in all; the task has {features}")
    if features is not None and len(pretrained.action[0]) != actions:
        raise UserError(f"{name} has actions of {len(pretrained.action[0])} elements, the task of {actions}")
    if pretrained.length is not None and pretrained.length < pretrained.past + contract.horizon:
        ahead = f"predicts {pretrained.length - pretrained.past} actions ahead"
        raise UserError(f"{name} {ahead}, the task asks for {contract.horizon}: set a smaller task.horizon or executed")
