"""Twin delayed deep deterministic policy gradient (arXiv 1802.09477): off-policy, without analytic gradients.

With `head=c51`, `exploration_low` and `exploration_high`, fast `averaging` and large minibatches of a thousand
environments it has the ingredients of FastTD3 (arXiv 2505.22642).

Differs from the paper:
    - many environments: an iteration stores `rollout_length` chunks of each, then takes `gradient_steps` steps;
    - exploration noise is the policy's own sampling, whose standard deviation is not trained; or its deviations are
    spread evenly over the environments, where FastTD3 draws one for each episode;
    - targets are `lookahead`-step returns without off-policy correction, as in D4PG (arXiv 1804.08617): with control at
    100 Hz a single action has almost no effect;
    - a chunk is one action: its discounted reward, and discount^k for what follows after k executed actions;
    - the critics are smooth (tanh) and have a higher learning rate than the actor; both rates decay;
    - the critics also read privileged observations (arXiv 1710.06542), the actor does not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied import seeding
from embodied.algorithms.critics import Activation, CriticConfig, approach
from embodied.algorithms.finite import check_finite, gradient_norm
from embodied.algorithms.micro_batch import saved_bytes
from embodied.algorithms.off_policy.action_values import ActionValues
from embodied.algorithms.parts import Composite
from embodied.algorithms.passes import Passes
from embodied.algorithms.schedule import linear_decay
from embodied.configuration import INF, Fraction, NonNegativeFloat, NonNegativeInt, PositiveInt, Range
from embodied.data.episodes import Episodes
from embodied.data.store import EpisodeStore
from embodied.environment import Environment
from embodied.errors import UserError
from embodied.policy import Decision, DeterministicPolicy, Policy, TrainablePolicy, copy_statistics
from embodied.rollout.rollout import Collector, Rollout
from embodied.rollout.starts import Starts
from embodied.world import ALONE, World


@dataclass
class TD3Config(CriticConfig):
    """Hyper-parameters of TD3; noise is in half ranges of the actions, gradient steps begin after `warmup` rows.

    Learning rates decay linearly to their `final_lr_share`. Options of the critics are those of CriticConfig. The noise
    of the first environment has the deviation `exploration_low`, that of the last one `exploration_high` (None: the
    policy's own noise everywhere).
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
    exploration_low: NonNegativeFloat | None = None
    exploration_high: NonNegativeFloat | None = None
    hidden: list[PositiveInt] = field(default_factory=lambda: [64, 64])
    activation: Activation = Activation.TANH

    def __post_init__(self) -> None:
        """Raise UserError for numbers that are out of range or do not go together."""
        super().__post_init__()
        low = self.exploration_low
        high = self.exploration_high
        if (low is None) != (high is None) or (low is not None and high is not None and low > high):
            raise UserError(f"expected exploration_low <= exploration_high, or none of them, got {low} and {high}")

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
    """Learner with critics, whose minimum is the target, and a policy that maximises the first."""

    starts = None

    def __init__(self, policy: DeterministicPolicy, config: TD3Config, generator: torch.Generator) -> None:
        self.policy = policy
        self.config = config
        self.generator = generator
        self.q = ActionValues(policy, config, config.value_learning_rate, trains_features=False)
        with seeding.undisturbed():
            self.target_policy = policy.with_new_weights()
        self.target_policy.load_state_dict(policy.state_dict())
        self.actor_optimiser = torch.optim.Adam(policy.mean_parameters(), config.learning_rate, fused=True)
        self.replay = EpisodeStore(config.capacity)
        self.gradient_steps = 0

    @property
    def collector(self) -> Callable[..., Collector]:
        """Factory of the collector, with the policy's noise or with that of the configuration."""
        low = self.config.exploration_low
        high = self.config.exploration_high
        return Collector if low is None or high is None else partial(SpreadNoise, low=low, high=high)

    def update(self, rollout: Rollout, progress: float, world: World = ALONE) -> dict[str, float]:
        """Store one rollout, then take gradient steps; returns the critics' mean metrics and the rows stored."""
        self.replay.add(rollout)
        if self.replay.written < self.config.warmup:
            return {}
        copy_statistics(self.target_policy, self.policy)  # running ones have changed since the last update
        linear_decay(self.actor_optimiser, progress, self.config.final_lr_share, self.config.learning_rate)
        linear_decay(self.q.optimiser, progress, self.config.final_lr_share, self.config.value_learning_rate)
        steps = [self._step() for _ in range(self.config.gradient_steps)]
        metrics = {name: float(torch.stack([step[name] for step in steps]).mean()) for name in steps[0]}
        return metrics | {"replay": float(len(self.replay))}

    def _step(self) -> dict[str, Tensor]:
        """Take one step of the critics, and of the actor at every `policy_delay`-th; returns the critics' metrics.

        Raises:
            DivergedError: before a step whose loss or gradient is not finite.
        """
        rows = self.replay.draw(self.config.minibatch, self.generator)
        # R = sum of discounted rewards over `lookahead` decisions, carry = gamma^k or 0, next observation s'
        batch = self.replay.transitions(rows, self.config.lookahead, self.config.discount).to(self.policy.device)
        self.gradient_steps += 1
        # L = sum_i mean (Q_i(s, a) - y)^2
        metrics = self.q.step(batch, self._target(batch), self.gradient_steps)
        if self.gradient_steps % self.config.policy_delay == 0:
            self._update_actor(batch["observation"])
        return metrics

    @torch.no_grad()
    def _target(self, batch: TensorDict) -> Tensor:
        """Targets y = R + carry * min_i Q_i'(s', pi'(s') + clipped noise), [B]."""
        actions = self.q.scaled(self.target_policy.actions(batch["next_observation"]))
        noise = torch.randn(actions.shape, generator=self.generator).to(actions.device) * self.config.target_noise
        # target policy smoothing: clip(pi'(s') + clip(noise, -c, c), -1, 1)
        smoothed = (actions + noise.clamp(-self.config.noise_clip, self.config.noise_clip)).clamp(-1.0, 1.0)
        return self.q.target(batch, smoothed, self.generator)

    def _update_actor(self, observation: TensorDict) -> None:
        actions = self.q.scaled(self.policy.actions(observation))
        # L = -mean Q_1(s, pi(s)); delayed, with the targets, to every policy_delay-th step
        loss = -self.q.values(observation, actions, frozen=True)[0].mean()
        self.actor_optimiser.zero_grad()
        loss.backward()
        gradient = gradient_norm(self.policy.mean_parameters())
        check_finite({"policy_loss": loss.detach(), "gradient of the actor": gradient}, self.gradient_steps)
        self.actor_optimiser.step()
        self.q.follow(self.config.averaging)
        approach(self.target_policy.mean_parameters(), self.policy.mean_parameters(), self.config.averaging)

    def largest_pass(self, passes: Passes) -> int | None:
        """Bytes that the critics' minibatch stores, or the policy's if that is more."""
        observation = passes.observation(self.config.minibatch)
        critics = self.q.stored_bytes(passes, self.config.minibatch)
        return max(critics, saved_bytes(lambda: self.policy.actions(observation)))

    def state_dict(self) -> dict[str, Any]:
        """Critics, targets, optimisers, replay and generator."""
        return {
            **self.q.state_dict(),
            **{name: getattr(self, name).state_dict() for name in _PARTS},
            "gradient_steps": self.gradient_steps,
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.q.load_state_dict(state)
        for name in _PARTS:
            getattr(self, name).load_state_dict(state[name])
        self.gradient_steps = state["gradient_steps"]
        self.generator.set_state(state["generator"])


class SpreadNoise(Collector):
    """Collector that adds normal noise to the policy's mean actions, of another deviation in each environment.

    Deviations rise evenly from `low` to `high`, in half ranges of the actions; a single environment has `high`.
    """

    def __init__(
        self,
        env: Environment,
        policy: Policy,
        generator: torch.Generator,
        starts: Starts | None = None,
        *,
        low: float,
        high: float,
    ) -> None:
        super().__init__(env, policy, generator, starts)
        action = policy.contract.action
        self.low = torch.tensor(action.low, device=generator.device)
        self.high = torch.tensor(action.high, device=generator.device)
        # linspace of one element is its first argument
        self.deviations = torch.linspace(high, low, env.num_envs, device=generator.device).flip(0).view(-1, 1, 1)

    def _decide(self, observation: TensorDict) -> Decision:
        decision = self.policy.act(observation, deterministic=True)
        noise = torch.randn(decision.actions.shape, generator=self.generator, device=self.generator.device)
        # a = clip(pi(s) + sigma_n z)
        actions = decision.actions + self.deviations * (self.high - self.low) / 2 * noise
        return replace(decision, actions=actions.clamp(self.low, self.high))


_PARTS = ("target_policy", "actor_optimiser", "replay")
