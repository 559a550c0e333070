"""Flow-matching action-chunk policy with stochastic samplers for reinforcement learning.

The two samplers follow pi_RL (arXiv 2510.25889). Differences: the network is small and its input is chosen by
`encoder`, the critics have their own encoders, and the noisy step of Flow-SDE is drawn per observation.

After `start_ranking` the policy draws several candidates for each chunk and executes the one of highest learned
advantage (IDQL, arXiv 2304.10573; for chunks Q-chunking, arXiv 2507.07969). Chunks that continue running ones are
candidates too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Self

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from embodied.command_line.config import at_least
from embodied.contract import Contract
from embodied.deployment.chunking import Running
from embodied.errors import UserError
from embodied.policy import Decision, Evaluation, acting, explored_value, take_statistics
from policies.augmentation import CARTESIAN, Augmentation, AugmentationKind, CartesianScene
from policies.encoders import Encoder, EncoderKind
from policies.flat import FlatEncoder
from policies.flow_kernels import (
    TimeGrid,
    fixed_noise,
    flow_noise_std,
    flow_sde_step,
    gaussian_entropy,
    gaussian_log_prob,
    gaussian_velocity,
    guided_velocity,
    ode_step,
)
from policies.libero_encoder import ObjectEncoder, missing

SMALLEST_STD = 0.2
"""Smallest deviation for normalising actions, in half ranges, so that unseen actions stay possible."""


class Sampler(Enum):
    """Denoising kernel for exploration; deterministic acting always uses the ODE."""

    ODE = "ode"
    FLOW_SDE = "flow_sde"
    FLOW_NOISE = "flow_noise"


@dataclass
class FlowConfig:
    """Sizes and noise of a FlowPolicy.

    `encoder` reads object tokens, or all float32 fixed-size observations, of which distances may be `reciprocal` (as
    for policy=mlp). `noise_level` is Flow-SDE's a, `std_min` and `std_max` bound Flow-Noise's learned deviation, both
    in units of the normalised action. With `augmentation` of Cartesian scenes, the supervised loss and the advantage's
    loss see scenes mirrored and rotated by up to `turn_rad` (0: unchanged), without a share `hidden_distractors` of
    unmentioned objects and a share `hidden_words` of words that name no object. When ranking, the best of `candidates`
    chunks by advantage is executed, of `explored_candidates` while exploring. `guidance` bounds the pull towards a
    running chunk (arXiv 2506.07339's beta, 5 there; smaller is better with ranked candidates).

    Reinforcement learning without demonstrations needs `initial_std`: the deviation of a new policy's chunks, in units
    of the normalised action. Without it (None) the noise that chunks are denoised from passes through as wide as it
    was, and no learner ever scores that noise.
    """

    encoder: EncoderKind = EncoderKind.AUTO
    augmentation: AugmentationKind = AugmentationKind.AUTO
    reciprocal: list[str] = field(default_factory=list)
    width: int = 64
    hidden: int = 256
    denoising_steps: int = 4
    sampler: Sampler = Sampler.FLOW_SDE
    noise_level: float = 0.7
    std_min: float = 0.08
    std_max: float = 0.16
    turn_rad: float = 0.8
    hidden_distractors: float = 0.5
    hidden_words: float = 0.3
    candidates: int = 32
    explored_candidates: int = 8
    guidance: float = 1.0
    initial_std: float | None = None

    def __post_init__(self) -> None:
        """Raise UserError for impossible sizes."""
        at_least(self, 1, "width", "hidden", "denoising_steps", "candidates", "explored_candidates")
        if self.initial_std is not None and self.initial_std <= 0.0:
            raise UserError(f"expected policy.initial_std above 0, got {self.initial_std}")

    def build(self, contract: Contract) -> FlowPolicy:
        """Make the policy for `contract`; only the critic reads privileged observations."""
        return FlowPolicy(contract, self)


class FlowPolicy(nn.Module):
    """Predicts chunks of H actions by integrating a learned velocity field over S denoising steps.

    A chunk's log-probability (one part, P = 1) is the sum over the K executed actions of the noisy denoising steps. The
    advantage that ranks candidates reads no more than the actor.

    Raises:
        UserError: if the action has no limits, or the contract lacks observations of encoder or augmentation.
    """

    def __init__(self, contract: Contract, config: FlowConfig) -> None:
        super().__init__()
        if not contract.action.low:
            raise UserError("policy=flow needs action limits; set low and high in the action spec")
        self.contract, self.config = contract, config
        self.grid = TimeGrid(config.denoising_steps)
        self.augment = _augmentation(contract, config)
        self.encoder = _encoder(contract, config)
        self.value_encoder = _encoder(contract, config, privileged=True)
        self.advantage_encoder = _encoder(contract, config)
        size = contract.horizon * contract.action.shape[-1]
        features = self.encoder.out_features
        self.velocity = _Velocity(size, features, config.hidden, config.initial_std)
        self.noise = nn.Sequential(nn.Linear(features + 1, 64), nn.Tanh(), nn.Linear(64, size))
        self.critic = _head(self.value_encoder.out_features, config.hidden)
        self.advantage_head = _head(features + contract.executed * contract.action.shape[-1], config.hidden)
        self.register_buffer("ranks", torch.zeros((), dtype=torch.bool))
        self.register_buffer("action_mean", torch.zeros(contract.action.shape[-1]))
        self.register_buffer("action_std", torch.ones(contract.action.shape[-1]))
        self.register_buffer("action_low", torch.tensor(contract.action.low))
        self.register_buffer("action_high", torch.tensor(contract.action.high))

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.action_mean.device

    @property
    def scores(self) -> bool:
        """Whether the sampler adds noise, so that a path has a likelihood."""
        return self.config.sampler is not Sampler.ODE

    def critic_parameters(self) -> list[nn.Parameter]:
        """Parameters that only `value` uses."""
        return [*self.critic.parameters(), *self.value_encoder.parameters()]

    def advantage_parameters(self) -> list[nn.Parameter]:
        """Parameters that only `advantage` uses."""
        return [*self.advantage_head.parameters(), *self.advantage_encoder.parameters()]

    def actor_parameters(self) -> list[nn.Parameter]:
        """Parameters of the velocity field and its encoder, and of the learned noise."""
        critics = {*self.critic_parameters(), *self.advantage_parameters()}
        return [parameter for parameter in self.parameters() if parameter not in critics]

    def start_critic(self) -> None:
        """Initialise the critics' encoders from the actor's."""
        self.value_encoder.begin_like(self.encoder)
        self.advantage_encoder.begin_like(self.encoder)

    def start_ranking(self) -> None:
        """From now on execute the candidate of highest advantage."""
        self.ranks.fill_(True)

    @torch.no_grad()
    def fit(self, observation: TensorDict, actions: Tensor) -> None:
        """Compute normalisation statistics from observations [N] and actions [..., A]."""
        observation = self.encoder.read(observation)
        for encoder in (self.encoder, self.value_encoder, self.advantage_encoder):
            encoder.fit(observation)
        flat = actions.reshape(-1, actions.shape[-1])
        self.action_mean.copy_(flat.mean(0))
        self.action_std.copy_(flat.std(0).maximum(SMALLEST_STD * (self.action_high - self.action_low) / 2))

    def fresh(self) -> Self:
        """A policy of the same kind with new weights, from torch's global generator; it ranks if this one does."""
        policy = type(self)(self.contract, self.config).to(self.device).train(self.training)
        take_statistics(policy, self)
        return policy

    @acting
    def act(
        self, observation: TensorDict, *, deterministic: bool = False, generator: torch.Generator | None = None
    ) -> Decision:
        """Sample chunks; `sample` holds the denoising path [N, S+1, H, A] and the noisy step's index [N].

        When ranking, `log_prob` is the executed candidate's own, not that of the choice.
        """
        observation = self.encoder.read(observation)
        noise = self._noise(observation, deterministic, generator)
        count = noise.shape[1]
        features = self.encoder(observation).repeat_interleave(count, 0)
        path, noisy, log_prob = self._denoise(noise.flatten(0, 1), features, deterministic, generator)
        actions = self.to_robot(path[:, -1])
        rows = self._best(observation, actions, count)
        sample = TensorDict({"path": path[rows], "noisy": noisy[rows]}, batch_size=list(observation.batch_size))
        value = explored_value(self, observation, deterministic)
        return Decision(actions[rows], sample, log_prob[rows], value)

    @acting
    def inpaint(
        self,
        observation: TensorDict,
        running: Running,
        *,
        deterministic: bool = False,
        generator: torch.Generator | None = None,
    ) -> Decision:
        """Like `act`, with all candidates guided to `running` (arXiv 2506.07339) and ranked by their executed part."""
        observation = self.encoder.read(observation)
        x = self._noise(observation, deterministic, generator)
        count = x.shape[1]
        known, mask, keeps = (
            part.repeat_interleave(count, 0) for part in (running.actions, running.soft_mask(), running.keeps())
        )
        x, target = x.flatten(0, 1), (known - self.action_mean) / self.action_std
        features = self.encoder(observation).repeat_interleave(count, 0)
        for step in range(self.grid.steps):
            time = self.grid.times(torch.full((len(x),), step, device=x.device))
            velocity = guided_velocity(
                lambda x, time=time: self.velocity(x, time, features),
                x, float(time[0]), target, mask, self.config.guidance,
            )  # fmt: skip
            x = ode_step(x, velocity, self.grid)
        actions = torch.where(keeps.unsqueeze(-1), known, self.to_robot(x))
        rows = self._best(observation, actions, count)
        nothing = TensorDict({}, batch_size=list(observation.batch_size))
        return Decision(actions[rows], nothing, torch.full((len(rows), 1), torch.nan, device=x.device))

    def _noise(self, observation: TensorDict, deterministic: bool, generator: torch.Generator | None) -> Tensor:
        """Initial noise of C candidates, [N, C, H, A]."""
        count = 1
        if self.ranks:
            count = self.config.candidates if deterministic else self.config.explored_candidates
        shape = (count, self.contract.horizon, self.contract.action.shape[-1])
        if deterministic:
            return fixed_noise(self.encoder.identity(observation), shape).to(self.device)
        return torch.randn(observation.batch_size[0], *shape, device=self.device, generator=generator)

    def _best(self, observation: TensorDict, actions: Tensor, count: int) -> Tensor:
        """Rows [N] of `actions` [N * C, H, A] with the highest advantage among their C = `count` candidates."""
        rows = torch.arange(0, len(actions), count, device=actions.device)
        if count > 1:
            rows = rows + self.advantage(observation, actions.unflatten(0, (-1, count))).argmax(1)
        return rows

    def advantage(self, observation: TensorDict, actions: Tensor) -> Tensor:
        """Advantage of each of C candidates [N, C, H, A] over the policy's average, in units of the return, [N, C]."""
        executed = ((actions - self.action_mean) / self.action_std)[:, :, : self.contract.executed]
        features = self.advantage_encoder(observation).unsqueeze(1).expand(-1, actions.shape[1], -1)
        return self.advantage_head(torch.cat((features, executed.flatten(2)), -1)).squeeze(-1)

    def advantage_loss(self, observation: TensorDict, actions: Tensor, target: Tensor) -> Tensor:
        """Mean squared error of the advantage of executed `actions` [N, H, A] against `target` [N], one scalar."""
        observation, actions = self._augmented(observation, actions)
        return (self.advantage(observation, actions.unsqueeze(1)).squeeze(1) - target).square().mean()

    def _denoise(
        self, x: Tensor, features: Tensor, deterministic: bool, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Path [B, S+1, H, A] from noise `x` [B, H, A], index of its noisy step [B] (-1: none), log_prob [B, 1]."""
        count, steps = len(x), self.grid.steps
        explore = not deterministic and self.scores
        noisy = torch.full((count,), -1, device=x.device)
        if explore:
            noisy = torch.randint(steps, (count,), device=x.device, generator=generator)
        path, log_prob = [x], torch.zeros(count, 1, device=x.device)
        for step in range(steps):
            index = torch.full((count,), step, device=x.device)
            velocity = self.velocity(x, self.grid.times(index), features)
            following = ode_step(x, velocity, self.grid)
            if explore:
                mean, std = self._kernel(x, velocity, index, features)
                sampled = mean + std * torch.randn(x.shape, device=x.device, generator=generator)
                chosen = self._noisy(noisy, index)
                log_prob = log_prob + chosen[:, None] * self._sum(gaussian_log_prob(sampled, mean, std))
                following = torch.where(chosen.view(-1, 1, 1), sampled, following)
            x = following
            path.append(x)
        return torch.stack(path, 1), noisy, log_prob

    def evaluate(self, observation: TensorDict, sample: TensorDict) -> Evaluation:
        """Log-probability of stored denoising paths: one velocity evaluation for Flow-SDE, S for Flow-Noise."""
        if not self.scores:
            raise UserError("sampler=ode has no likelihood; use flow_sde or flow_noise")
        observation = self.encoder.read(observation)
        features, path = self.encoder(observation), sample["path"]
        rows = torch.arange(len(path), device=path.device)
        everywhere = self.config.sampler is Sampler.FLOW_NOISE
        indices = (
            [torch.full_like(sample["noisy"], step) for step in range(self.grid.steps)]
            if everywhere
            else [sample["noisy"].clamp_min(0)]
        )
        log_prob = entropy = torch.zeros(len(path), 1, device=path.device)
        for index in indices:
            x, following = path[rows, index], path[rows, index + 1]
            velocity = self.velocity(x, self.grid.times(index), features)
            mean, std = self._kernel(x, velocity, index, features)
            log_prob = log_prob + self._sum(gaussian_log_prob(following, mean, std))
            entropy = entropy + self._sum(gaussian_entropy(std).expand_as(x))
        return Evaluation(log_prob, entropy, self.value(observation))

    def value(self, observation: TensorDict) -> Tensor:
        """Expected discounted return, [N]."""
        return self.critic(self.value_encoder(observation)).squeeze(-1)

    def loss(self, observation: TensorDict, actions: Tensor, valid: Tensor) -> Tensor:
        """Flow-matching loss: mean over actions, weighted by `valid`, of |v(x_t, t) - (noise - action)|^2."""
        observation, actions = self._augmented(observation, actions)
        target = (actions - self.action_mean) / self.action_std
        noise = torch.randn_like(target)
        time = torch.rand(len(target), device=target.device)
        t = time.view(-1, 1, 1)
        velocity = self.velocity(t * noise + (1.0 - t) * target, time, self.encoder(observation))
        error = (velocity - (noise - target)).square().mean(-1)
        return (error * valid).sum() / valid.sum().clamp_min(1)

    def _augmented(self, observation: TensorDict, actions: Tensor) -> tuple[TensorDict, Tensor]:
        observation = self.encoder.read(observation)
        return self.augment(observation, actions) if self.augment else (observation, actions)

    def to_robot(self, x: Tensor) -> Tensor:
        """Normalised actions in robot units, clamped to the contract's limits."""
        return (x * self.action_std + self.action_mean).clamp(self.action_low, self.action_high)

    def _kernel(self, x: Tensor, velocity: Tensor, index: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        if self.config.sampler is Sampler.FLOW_SDE:
            return flow_sde_step(x, velocity, index, self.grid, self.config.noise_level)
        raw = self.noise(torch.cat((features, self.grid.times(index).unsqueeze(-1)), -1)).view_as(x)
        return ode_step(x, velocity, self.grid), flow_noise_std(raw, self.config.std_min, self.config.std_max)

    def _noisy(self, noisy: Tensor, index: Tensor) -> Tensor:
        return torch.ones_like(index, dtype=torch.bool) if self.config.sampler is Sampler.FLOW_NOISE else noisy == index

    def _sum(self, elementwise: Tensor) -> Tensor:
        return elementwise[:, : self.contract.executed].sum((1, 2)).unsqueeze(-1)


def _head(inputs: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.LayerNorm(hidden), nn.ReLU(),
        nn.Linear(hidden, hidden), nn.LayerNorm(hidden), nn.ReLU(), nn.Linear(hidden, 1),
    )  # fmt: skip


def _encoder(contract: Contract, config: FlowConfig, *, privileged: bool = False) -> Encoder:
    kind = config.encoder
    if kind is EncoderKind.AUTO:
        kind = EncoderKind.FLAT if missing(contract) else EncoderKind.OBJECTS
    if kind is EncoderKind.FLAT:
        return FlatEncoder(contract, config.width, config.reciprocal, privileged=privileged)
    if absent := missing(contract):
        raise UserError(f"policy.encoder=objects reads {', '.join(absent)}, which this task lacks; use encoder=flat")
    if config.reciprocal:
        raise UserError(f"expected policy.reciprocal=[] with encoder=objects, got {config.reciprocal}")
    return ObjectEncoder(config.width)


def _augmentation(contract: Contract, config: FlowConfig) -> Augmentation | None:
    kind, turns = config.augmentation, contract.action.names[:6] == CARTESIAN
    if kind is AugmentationKind.AUTO:
        scene = turns and not missing(contract)
        kind = AugmentationKind.CARTESIAN_SCENE if scene else AugmentationKind.NONE
    if kind is AugmentationKind.NONE:
        return None
    if absent := missing(contract):
        raise UserError(f"policy.augmentation=cartesian_scene needs {', '.join(absent)}; use augmentation=none")
    if config.turn_rad and not turns:
        raise UserError(f"expected actions {CARTESIAN} to turn scenes, got {contract.action.names}; set turn_rad=0")
    return CartesianScene(config.turn_rad, config.hidden_distractors, config.hidden_words)


class _Velocity(nn.Module):
    """Residual MLP: noisy chunk, time and encoding -> velocity [N, H, A].

    With an `initial_std` it is what is added to the velocity of normally distributed actions of that deviation.
    """

    def __init__(self, size: int, features: int, hidden: int, initial_std: float | None) -> None:
        super().__init__()
        self.initial_std = initial_std
        self.register_buffer("frequencies", torch.pi * 2.0 ** torch.arange(4))
        self.inputs = nn.Linear(size + features + 8, hidden)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, hidden))]
        )
        self.out = nn.Linear(hidden, size)
        if initial_std is not None:
            nn.init.orthogonal_(self.out.weight, 0.01)
            nn.init.zeros_(self.out.bias)

    def forward(self, x: Tensor, time: Tensor, features: Tensor) -> Tensor:
        angle = time.unsqueeze(-1) * self.frequencies
        hidden = self.inputs(torch.cat((x.flatten(1), angle.sin(), angle.cos(), features), dim=-1))
        for block in self.blocks:
            hidden = hidden + block(hidden)
        velocity = self.out(torch.relu(hidden)).view_as(x)
        if self.initial_std is None:
            return velocity
        return velocity + gaussian_velocity(x, time.view(-1, 1, 1), self.initial_std)
