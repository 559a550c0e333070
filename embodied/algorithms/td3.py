"""Twin delayed deep deterministic policy gradient (arXiv 1802.09477): off-policy, without analytic gradients.

Differs from the paper:
    - many environments: an iteration stores `rollout_length` chunks of each, then takes `gradient_steps` steps;
    - exploration noise is the policy's own sampling, whose standard deviation is not trained;
    - targets are `lookahead`-step returns without off-policy correction, as in D4PG (arXiv 1804.08617): with control at
    100 Hz a single action has almost no effect;
    - a chunk is one action: its discounted reward, and discount^k for what follows after k executed actions;
    - the critics are smooth (tanh) and have a higher learning rate than the actor; both rates decay;
    - the critics also read privileged observations (arXiv 1710.06542), the actor does not.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from embodied import seeding
from embodied.algorithms.finite import check_finite, gradient_norm
from embodied.algorithms.parts import Composite
from embodied.algorithms.schedule import linear_decay
from embodied.configuration import INF, Configuration, Fraction, NonNegativeFloat, NonNegativeInt, PositiveInt, Range
from embodied.data.episodes import Episodes
from embodied.data.store import EpisodeStore
from embodied.environment import Environment
from embodied.errors import UserError
from embodied.policy import DeterministicPolicy, TrainablePolicy
from embodied.rollout.rollout import Collector, Rollout
from embodied.world import ALONE, World


@dataclass
class TD3Config(Configuration):
    """Hyper-parameters of TD3; noise is in half ranges of the actions, gradient steps begin after `warmup` rows.

    Learning rates decay linearly to their `final_lr_share`.
    """

    rollout_length: PositiveInt = 16
    gradient_steps: PositiveInt = 100
    lookahead: PositiveInt = 8
    minibatch: PositiveInt = 256
    capacity: PositiveInt = 500_000
    warmup: NonNegativeInt = 10_000
    learning_rate: NonNegativeFloat = 3e-4
    value_learning_rate: NonNegativeFloat = 1e-3
    final_lr_share: Fraction = 0.1
    discount: Fraction = 0.99
    averaging: Annotated[float, Range(above=0, at_most=1)] = 0.005
    target_noise: NonNegativeFloat = 0.2
    noise_clip: Annotated[float, Range(at_least=0, at_most=INF)] = 0.5
    policy_delay: PositiveInt = 2
    hidden: list[PositiveInt] = field(default_factory=lambda: [64, 64])

    @property
    def reads_demonstrations(self) -> bool:
        """Whether demonstrations are read: never."""
        return False

    @property
    def max_staleness(self) -> int:
        """Updates that a rollout's policy may be behind: any, because TD3 learns off-policy."""
        return sys.maxsize

    def build(
        self,
        policy: TrainablePolicy,
        demonstrations: Episodes | None,
        env: Environment,
        generator: torch.Generator,
    ) -> TD3:
        """Build the learner of `policy`; `generator` draws minibatches, the demonstrations are not used.

        Raises:
            UserError: for a policy without deterministic actions, or actions without limits.
        """
        if not isinstance(policy, DeterministicPolicy):
            raise UserError("expected a policy with deterministic actions for algorithm=td3; use policy=mlp")
        if not env.contract.action.low:
            raise UserError("expected action limits for algorithm=td3; set low and high in the action spec")
        return TD3(policy, self, generator)


class TD3(Composite):
    """Learner with two critics, whose minimum is the target, and a policy that maximises the first."""

    starts = None
    collector = Collector

    def __init__(self, policy: DeterministicPolicy, config: TD3Config, generator: torch.Generator) -> None:
        self.policy, self.config, self.generator = policy, config, generator
        low, high = torch.tensor(policy.contract.action.low), torch.tensor(policy.contract.action.high)
        self.centre, self.half_range = ((high + low) / 2).to(policy.device), ((high - low) / 2).to(policy.device)
        inputs = policy.feature_size + policy.contract.executed * len(low)
        self.critics = Critics([inputs, *config.hidden, 1]).to(policy.device)
        self.target_critics = copy.deepcopy(self.critics)
        with seeding.undisturbed():
            self.target_policy = policy.fresh()
        self.target_policy.load_state_dict(policy.state_dict())
        self.critic_optimiser = torch.optim.Adam(self.critics.parameters(), config.value_learning_rate, fused=True)
        self.actor_optimiser = torch.optim.Adam(policy.mean_parameters(), config.learning_rate, fused=True)
        self.replay = EpisodeStore(config.capacity)
        self.gradient_steps = 0

    def update(self, rollout: Rollout, progress: float, world: World = ALONE) -> dict[str, float]:
        """Store one rollout, then take gradient steps; returns the critics' mean loss and the rows stored."""
        self.replay.add(rollout)
        if self.replay.written < self.config.warmup:
            return {}
        linear_decay(self.actor_optimiser, progress, self.config.final_lr_share, self.config.learning_rate)
        linear_decay(self.critic_optimiser, progress, self.config.final_lr_share, self.config.value_learning_rate)
        losses = [self._step() for _ in range(self.config.gradient_steps)]
        return {"value_loss": float(torch.stack(losses).mean()), "replay": float(len(self.replay))}

    def _step(self) -> Tensor:
        """Take one step of the critics, and of the actor at every `policy_delay`-th; returns the critics' loss.

        Raises:
            DivergedError: before a step whose loss or gradient is not finite.
        """
        rows = self.replay.draw(self.config.minibatch, self.generator)
        # R = sum of discounted rewards over `lookahead` decisions, carry = gamma^k or 0, next observation s'
        batch = self.replay.transitions(rows, self.config.lookahead, self.config.discount).to(self.policy.device)
        target = self._target(batch)
        values = self._values(self.critics, batch["observation"], self._scaled(batch["actions"]))
        # L = sum_i mean (Q_i(s, a) - y)^2, values are [2, B]
        loss = (values - target).square().mean(-1).sum()
        self.critic_optimiser.zero_grad()
        loss.backward()
        gradient = gradient_norm(self.critics.parameters())
        check_finite({"value_loss": loss.detach(), "gradient of the critic": gradient}, self.gradient_steps + 1)
        self.critic_optimiser.step()
        self.gradient_steps += 1
        if self.gradient_steps % self.config.policy_delay == 0:
            self._update_actor(batch["observation"])
        return loss.detach()

    @torch.no_grad()
    def _target(self, batch: TensorDict) -> Tensor:
        """Targets y = R + carry * min_i Q_i'(s', pi'(s') + clipped noise), [B]."""
        actions = self._scaled(self._executed(self.target_policy, batch["next_observation"]))
        noise = torch.randn(actions.shape, generator=self.generator).to(actions.device) * self.config.target_noise
        # target policy smoothing: clip(pi'(s') + clip(noise, -c, c), -1, 1)
        smoothed = (actions + noise.clamp(-self.config.noise_clip, self.config.noise_clip)).clamp(-1.0, 1.0)
        values = self._values(self.target_critics, batch["next_observation"], smoothed)
        return batch["reward"] + batch["carry"] * values.amin(0)

    def _update_actor(self, observation: TensorDict) -> None:
        actions = self._scaled(self._executed(self.policy, observation))
        # L = -mean Q_1(s, pi(s)); delayed, with the targets, to every policy_delay-th step
        loss = -self._values(self.critics, observation, actions)[0].mean()
        self.actor_optimiser.zero_grad()
        loss.backward()
        gradient = gradient_norm(self.policy.mean_parameters())
        check_finite({"policy_loss": loss.detach(), "gradient of the actor": gradient}, self.gradient_steps)
        self.actor_optimiser.step()
        with torch.no_grad():
            _approach(self.target_critics.parameters(), self.critics.parameters(), self.config.averaging)
            targets = self.target_policy.mean_parameters()
            _approach(targets, self.policy.mean_parameters(), self.config.averaging)

    def _executed(self, policy: DeterministicPolicy, observation: TensorDict) -> Tensor:
        return policy.actions(observation)[:, : policy.contract.executed]

    def _scaled(self, actions: Tensor) -> Tensor:
        # to [-1, 1], as the critics read actions
        return (actions - self.centre) / self.half_range

    def _values(self, critics: Critics, observation: TensorDict, actions: Tensor) -> Tensor:
        return critics(torch.cat((self.policy.features(observation), actions.flatten(1)), -1))

    def state_dict(self) -> dict[str, Any]:
        """Critics, targets, optimisers, replay and generator."""
        return {
            **{name: getattr(self, name).state_dict() for name in _PARTS},
            "gradient_steps": self.gradient_steps,
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        for name in _PARTS:
            getattr(self, name).load_state_dict(state[name])
        self.gradient_steps = state["gradient_steps"]
        self.generator.set_state(state["generator"])


class Critics(nn.Module):
    """Two networks with layers of `sizes` and tanh between them, computed together: [B, I] to values [2, B]."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        bounds = [1.0 / math.sqrt(inputs) for inputs in sizes[:-1]]  # torch's default for linear layers
        shapes = list(zip(bounds, pairwise(sizes), strict=True))
        self.weights = nn.ParameterList(torch.empty(2, *shape).uniform_(-bound, bound) for bound, shape in shapes)
        self.biases = nn.ParameterList(torch.empty(2, 1, shape[1]).uniform_(-bound, bound) for bound, shape in shapes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Values [2, B] of both critics."""
        *hidden, last = zip(self.weights, self.biases, strict=True)
        x = inputs.expand(2, *inputs.shape)
        for weight, bias in hidden:
            x = torch.baddbmm(bias, x, weight).tanh()
        return torch.baddbmm(last[1], x, last[0]).squeeze(-1)


_PARTS = ("critics", "target_critics", "target_policy", "critic_optimiser", "actor_optimiser", "replay")


def _approach(targets: Iterable[Tensor], sources: Iterable[Tensor], share: float) -> None:
    for target, source in zip(targets, sources, strict=True):
        # theta' <- (1 - share) theta' + share theta
        target.lerp_(source, share)
