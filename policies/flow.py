"""Flow-matching action-chunk policy with stochastic samplers for reinforcement learning.

The samplers follow pi_RL (arXiv 2510.25889) and ReinFlow (arXiv 2505.22094). Differences: the network is small and its
input is chosen by `encoder`, the critics have their own encoders, and the noisy step of Flow-SDE is drawn per
observation. When ranking, chunks that continue running ones are candidates too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from embodied.configuration import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Range
from embodied.contract import ACTION_PREFIX, Contract
from embodied.errors import UserError
from embodied.execution.chunking import Running
from embodied.policy import Decision, Evaluation, Steering, inference, sum_of_executed
from policies.generation.base import GenerativeConfig, GenerativePolicy
from policies.generation.chunk_networks import chunk_network
from policies.kernels.flow import TimeGrid, gaussian_velocity, prefix_mask, prefix_times
from policies.kernels.narrowing import NarrowingNoise
from policies.kernels.sampling import Field, Sampler, check_delay, trained_for, undefined_log_prob
from policies.kernels.shortcut import LENGTHS, length_of, random_steps, two_steps


@dataclass
class FlowConfig(GenerativeConfig):
    """Sizes and noise of a FlowPolicy.

    While exploring, the `sampler` adds noise to one random step (flow_sde) or learned noise to all (flow_noise;
    reinflow, at most 3 deviations). `noise_level` is Flow-SDE's a, `std_min` and `std_max` bound the learned deviation,
    both in units of the normalised action; after a third of the training the upper bound narrows by the share
    `noise_decay` of the range (ReinFlow's is 0.3; 0: never). `guidance` bounds the pull towards a running chunk (beta
    of arXiv 2506.07339, there 5; smaller is better with ranked candidates).

    With a `trained_delay` supervised training conditions on up to that number of first actions of a chunk and predicts
    the rest (arXiv 2512.05964); running chunks with at most that delay are then continued so, instead of guided. In a
    run with delay=D the policy does so with the D actions of its prefix in every chunk, also in reinforcement learning.

    Reinforcement learning without demonstrations needs `initial_std`: the deviation of a new policy's chunks, in units
    of the normalised action. Without it (None) the initial noise of denoising passes through with its full
    deviation, and no learner scores that noise.

    With a `shortcut` above 0 the network also reads the length of its step, and this share of the supervised loss
    trains a long step to equal two short ones (shortcut models, arXiv 2410.12557, where it is 0.25): weights can then
    be used with 1, 2, 4, 8 or 16 `denoising_steps`, whichever they were trained with. Use it with learned noise:
    Flow-SDE's mean assumes the velocity at a point.
    """

    denoising_steps: PositiveInt = 4
    sampler: Sampler = Sampler.FLOW_SDE
    noise_level: PositiveFloat = 0.7
    std_min: PositiveFloat = 0.08
    std_max: PositiveFloat = 0.16
    noise_decay: Fraction = 0.0
    guidance: NonNegativeFloat = 1.0
    trained_delay: NonNegativeInt = 0
    initial_std: PositiveFloat | None = None
    shortcut: Annotated[float, Range(at_least=0, below=1)] = 0.0

    def __post_init__(self) -> None:
        """Raise UserError for numbers out of range, and for options that exclude each other."""
        super().__post_init__()
        if self.std_min > self.std_max:
            raise UserError(f"expected policy.std_min <= std_max, got {self.std_min} and {self.std_max}")
        if self.shortcut:
            length_of(self.denoising_steps)
            if self.trained_delay:
                raise UserError("policy.shortcut and policy.trained_delay give steps different times: choose one")
            if self.initial_std is not None:
                raise UserError("policy.shortcut learns from demonstrations, policy.initial_std without: choose one")

    def build(self, contract: Contract) -> FlowPolicy:
        """Build the policy for `contract`; only the critic reads privileged observations."""
        return FlowPolicy(contract, self)


class FlowPolicy(NarrowingNoise, GenerativePolicy):
    """Policy that predicts chunks of H actions by integrating a learned velocity field over S denoising steps.

    A chunk's log-probability (one part, P = 1) is that of its noisy denoising steps, added or averaged. Under a delay
    the network reads the actions of the prefix before the chunk, without noise; they have no likelihood.
    """

    config: FlowConfig

    def __init__(self, contract: Contract, config: FlowConfig) -> None:
        super().__init__(contract, config, "flow", past=contract.delay, generated=contract.delay + contract.horizon)
        excluded = {"steering": config.steering.kind is not Steering.NONE, "shortcut": config.shortcut > 0}
        check_delay(config.trained_delay, contract, excluded)
        self.grid = TimeGrid(config.denoising_steps)
        self.length = length_of(config.denoising_steps) if config.shortcut else 0
        features = self.encoder.out_features
        self.velocity = _Velocity(contract, features, config)
        size = self.generated * contract.action.shape[-1]
        self.noise = nn.Sequential(nn.Linear(features + 1, 64), nn.Tanh(), nn.Linear(64, size))
        self.add_noise_decay(config.noise_decay, config.sampler)

    @property
    def actor_keys(self) -> Sequence[str]:
        """Names of the observations that chunks are generated from."""
        return list(dict.fromkeys([*super().actor_keys, *([ACTION_PREFIX] if self.past else [])]))

    @property
    def scores(self) -> bool:
        """Whether the sampler adds noise, so that a path has a likelihood."""
        return super().scores and self.config.sampler is not Sampler.ODE

    @inference
    def inpaint(
        self,
        observation: TensorDict,
        running: Running,
        *,
        deterministic: bool = False,
        generator: torch.Generator | None = None,
    ) -> Decision:
        """Act like `act`, with all candidates guided to `running` (arXiv 2506.07339).

        Candidates are ranked by their executed part. If training covered as many frozen actions, the chunk is
        continued from them instead (arXiv 2512.05964).

        Raises:
            UserError: for a policy with a small actor.
        """
        self.check_inpaints()
        observation = self.encoder.read(observation)
        x = self._noise(observation, deterministic, generator)
        count = x.shape[1]
        running_actions, mask, keeps = (
            part.repeat_interleave(count, 0) for part in (running.actions, running.soft_mask(), running.keeps())
        )
        x = x.flatten(0, 1)
        target = (running_actions - self.action_mean) / self.action_std
        features = self.actor_features(observation).repeat_interleave(count, 0)
        if trained_for(running, self.config.trained_delay):
            velocity = lambda x, times: self.guided(lambda each: self.velocity(x, times, each), features)  # noqa: E731
            x = self.sampling.continued(x, velocity, target, keeps)
        else:
            x = self.sampling.inpaint(x, self._field(features), target, mask.unsqueeze(-1), self.config.guidance)
        actions = torch.where(keeps.unsqueeze(-1), running_actions, self.to_robot(x))
        rows = self._best(observation, actions, count)
        no_sample = TensorDict({}, batch_size=list(observation.batch_size))
        return Decision(actions[rows], no_sample, undefined_log_prob(len(rows), self.contract, x.device))

    def candidates(self, observation: TensorDict, noise: Tensor) -> tuple[Tensor, Tensor]:
        """See `GenerativePolicy.candidates`."""
        return super().candidates(observation, self._with_prefix(noise, observation))

    def generate(self, observation: TensorDict, noise: Tensor) -> Tensor:
        """See `SteeredPolicy.generate`."""
        return super().generate(observation, self._with_prefix(noise.unsqueeze(1), observation).squeeze(1))

    def example(self, count: int, rows: int, generator: torch.Generator) -> TensorDict:
        """See `GenerativePolicy.example`; the actions of a prefix lie anywhere within the limits."""
        observation = super().example(count, rows, generator)
        if not self.past:
            return observation
        low, high = self.action_low.cpu(), self.action_high.cpu()
        prefix = low + (high - low) * torch.rand(count, self.past, len(low), generator=generator)
        return observation.set(ACTION_PREFIX, prefix)

    def _noise(self, observation: TensorDict, deterministic: bool, generator: torch.Generator | None) -> Tensor:
        return self._with_prefix(super()._noise(observation, deterministic, generator), observation)

    def _with_prefix(self, noise: Tensor, observation: TensorDict) -> Tensor:
        """Noise [N, C, G, A], in which the first actions are the normalised ones of the prefix, if there is one."""
        if not self.past:
            return noise
        prefix = self.normalised(observation[ACTION_PREFIX]).unsqueeze(1).expand(-1, noise.shape[1], -1, -1)
        return torch.cat((prefix, noise[:, :, self.past :]), 2)

    def _window(self, observation: TensorDict, actions: Tensor) -> Tensor:
        return torch.cat((observation[ACTION_PREFIX], actions), 1) if self.past else actions

    def _generate(
        self, x: Tensor, features: Tensor, deterministic: bool, generator: torch.Generator | None
    ) -> tuple[Tensor, TensorDict, Tensor]:
        """Denoise chunks; the sample is the path [B, S+1, H, A] and the noisy step's index [B]."""
        path, noisy, log_prob = self._denoise(x, features, deterministic, generator)
        return path[:, -1], TensorDict({"path": path, "noisy": noisy}, batch_size=[len(path)]), log_prob

    def _denoise(
        self, x: Tensor, features: Tensor, deterministic: bool, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self.sampling.denoise(x, self._field(features), deterministic, generator)

    def evaluate(self, observation: TensorDict, sample: TensorDict) -> Evaluation:
        """Log-probability of stored denoising paths: one velocity evaluation for Flow-SDE, S for learned noise."""
        observation = self.encoder.read(observation)
        field = self._field(self.actor_features(observation))
        log_prob, entropy = self.sampling.score(sample["path"], sample["noisy"], field)
        log_prob, entropy = (sum_of_executed(terms, sample) for terms in (log_prob, entropy))
        outputs = self.value_outputs(observation)
        return Evaluation(log_prob, entropy, self.value_head.values(outputs), outputs)

    def _field(self, features: Tensor) -> Field:
        def field(x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
            times = prefix_times(self.grid.times(index), self.generated, self.past)
            length = torch.full_like(index, self.length)
            return self.guided(lambda each: self.velocity(x, times, each, length), features), features

        return field

    def _spread(self, features: Tensor, index: Tensor) -> Tensor:
        raw = self.noise(torch.cat((features, self.grid.times(index).unsqueeze(-1)), -1))
        return raw.unflatten(-1, (self.generated, -1))

    def _error(self, target: Tensor, features: Tensor) -> Tensor:
        """|v(x_t, t) - (noise - action)|^2, mean over the action's elements, at random times; a share of shortcuts."""
        noise = torch.randn_like(target)
        time = torch.rand(len(target), device=target.device)
        length = torch.zeros_like(time, dtype=torch.long)
        rows = self._long(time)
        time[rows], length[rows] = random_steps(len(rows), target.device)
        is_prefix = prefix_mask(*target.shape[:2], self.config.trained_delay, target.device)
        is_prefix[:, : self.past] = True
        times = torch.where(is_prefix, 0.0, time.unsqueeze(-1))
        rest = (~is_prefix).float()
        t = times.unsqueeze(-1)
        # x_t = t noise + (1 - t) action, whose velocity dx_t / dt = noise - action
        x = t * noise + (1.0 - t) * target
        velocity_target = noise - target
        if len(rows):
            # shortcut rows: one long step equals two short ones
            velocity_target[rows] = two_steps(self.velocity, x[rows], time[rows], features[rows], length[rows])
        network_time = times if self.velocity.timed else time
        error = (self.velocity(x, network_time, features, length) - velocity_target).square().mean(-1)
        if self.past:  # whose error is left out
            return error
        # the prefix has no error; the mean is over the others
        return error * rest / rest.mean()

    def _long(self, time: Tensor) -> Tensor:
        """Random share `shortcut` of the rows of `time` [B], which learn long steps."""
        if not self.config.shortcut:
            return torch.empty(0, dtype=torch.long, device=time.device)
        return (torch.rand_like(time) < self.config.shortcut).nonzero().squeeze(1)

    def _part(self, elementwise: Tensor) -> Tensor:
        return self._aggregated(elementwise).unsqueeze(-1)


class _Velocity(nn.Module):
    """Velocity network from noisy chunk, time, features and, in a shortcut model, the index of the step's length.

    The time is [N], or [N, H] for each action; the velocity is [N, H, A]. With an `initial_std` the network's output
    is added to the velocity of normally distributed actions of that deviation. With a `trained_delay` it reads each
    action's time next to the action.
    """

    def __init__(self, contract: Contract, features: int, config: FlowConfig) -> None:
        super().__init__()
        self.initial_std = config.initial_std
        self.timed = config.trained_delay > 0 or contract.delay > 0
        self.lengths = len(LENGTHS) if config.shortcut else 0
        self.network = chunk_network(
            config.network,
            contract.delay + contract.horizon,
            contract.action.shape[-1] + self.timed,
            features + self.lengths,
            config.hidden,
            config.depth,
            small=config.initial_std is not None,
        )

    def forward(self, x: Tensor, time: Tensor, features: Tensor, length: Tensor | None = None) -> Tensor:
        if self.lengths:
            assert length is not None
            one_hot = length.unsqueeze(-1) == torch.arange(self.lengths, device=length.device)
            features = torch.cat((features, one_hot.to(features.dtype)), -1)
        times = time if time.ndim == 2 else time.unsqueeze(-1).expand(x.shape[:2])
        inputs = torch.cat((x, times.unsqueeze(-1)), -1) if self.timed else x
        velocity = self.network(inputs, times.amax(-1), features)[..., : x.shape[-1]]
        if self.initial_std is None:
            return velocity
        # a correction to the velocity of N(0, std^2): a new policy's chunks have that deviation
        return velocity + gaussian_velocity(x, times.unsqueeze(-1), self.initial_std)
