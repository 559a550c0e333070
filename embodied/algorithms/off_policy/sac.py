"""Soft actor-critic (arXiv 1801.01290, 1812.05905): off-policy, with the most random policy that still earns.

With demonstrations in every batch, an ensemble of critics and several updates per decision it is RLPD (arXiv
2302.02948), `algorithm=rlpd`. A person's actions on a robot then count as demonstrations, too, as in HIL-SERL (arXiv
2410.21845). Where it goes on with the critics of an offline learner, without its data, it is WSRL (arXiv 2412.07762),
`algorithm=wsrl`.

Differs from the papers:
    - many environments: an iteration stores `rollout_length` chunks of each, then takes `updates` steps per decision;
    - a chunk is one action: its discounted reward, discount^k for what follows after k executed actions, and a target
    entropy of K * A elements;
    - the target entropy is that of a normal distribution of deviation `target_std`, as in FlashSAC (arXiv 2604.04539):
    0.089 is -1 per element (SAC), 0.147 is -1/2 (RLPD);
    - decisions of the warm-up are the policy's own, which tanh of a unit normal distribution spreads almost uniformly;
    - the actor may imitate demonstrations beside, L + c mean |Q| L_BC, as in TD3+BC (arXiv 2106.06860);
    - targets may be `lookahead`-step returns without off-policy correction and without entropy between, as in TD3 here;
    - critics have encoders of their own, without target networks, and also read privileged observations.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Protocol

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from embodied.algorithms.critics import CriticConfig
from embodied.algorithms.finite import check_finite, gradient_norm
from embodied.algorithms.micro_batch import saved_bytes
from embodied.algorithms.off_policy.action_values import ActionValues
from embodied.algorithms.off_policy.replay import MixedReplay, demonstrations_or_none_yet
from embodied.algorithms.parts import Composite
from embodied.algorithms.passes import Passes
from embodied.algorithms.schedule import linear_decay
from embodied.configuration import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Range
from embodied.data.episodes import Episodes
from embodied.environment import Environment
from embodied.errors import UserError
from embodied.policy import Reparameterised, TrainablePolicy
from embodied.rollout.rollout import Collector, Rollout
from embodied.world import ALONE, World


@dataclass
class SACConfig(CriticConfig):
    """Hyper-parameters of SAC; options of the critics are those of CriticConfig.

    After `warmup` decisions the critics take `updates` gradient steps per decision, which may be less than 1, the
    actor and the temperature one at every `policy_delay`-th after the first `critic_warmup`: new critics lead a
    trained policy astray. A `demonstration_share` of each batch is drawn from demonstrations, to which a person's
    actions on a robot belong, too, with `keep_interventions`. The actor also imitates them, with the weight
    `bc_coefficient` in units of the mean value. It maximises the smallest value of all critics, or their mean
    (`actor_mean`); without `entropy_in_target` targets are returns of rewards alone. `target_std` is the wished
    deviation of an action element in half ranges. In a run of few gradient steps the temperature follows it in time
    with a higher `temperature_learning_rate` (None: `learning_rate`). All learning rates decay linearly to their
    `final_lr_share` over the run. With `continue_values` the critics are at first those that the stage offline has
    trained.
    """

    rollout_length: PositiveInt = 16
    updates: PositiveFloat = 1.0
    policy_delay: PositiveInt = 1
    lookahead: PositiveInt = 1
    minibatch: PositiveInt = 256
    demonstration_share: Fraction = 0.0
    keep_interventions: bool = True
    bc_coefficient: NonNegativeFloat = 0.0
    capacity: PositiveInt = 500_000
    warmup: NonNegativeInt = 5_000
    critic_warmup: NonNegativeInt = 0
    learning_rate: NonNegativeFloat = 3e-4
    value_learning_rate: NonNegativeFloat = 3e-4
    final_lr_share: Fraction = 1.0
    discount: Fraction = 0.99
    averaging: Annotated[float, Range(above=0, at_most=1)] = 0.005
    initial_temperature: PositiveFloat = 1.0
    temperature_learning_rate: NonNegativeFloat | None = None
    target_std: PositiveFloat = 0.089
    entropy_in_target: bool = True
    actor_mean: bool = False
    continue_values: bool = False

    without_demonstrations: ClassVar[str] = "algorithm.demonstration_share=0"
    """Option to learn without demonstrations, for errors."""

    def __post_init__(self) -> None:
        """Raise UserError for numbers that are out of range, and imitation without demonstrations."""
        super().__post_init__()
        if self.bc_coefficient and not self.demonstration_share:
            raise UserError("algorithm.bc_coefficient imitates demonstrations; use algorithm.demonstration_share=0.5")

    @property
    def reads_demonstrations(self) -> bool:
        """Whether demonstrations are read."""
        return self.demonstration_share > 0

    @property
    def max_staleness(self) -> int:
        """Updates that a rollout's policy may be behind: any, because SAC learns off-policy."""
        return sys.maxsize

    def build(
        self,
        policy: TrainablePolicy,
        demonstrations: Episodes | None,
        env: Environment,
        generator: torch.Generator,
    ) -> SAC:
        """Build the learner of `policy`; `generator` draws minibatches and the noise of actions.

        Raises:
            UserError: for a policy without reparameterised samples, actions without limits, and demonstrations that are
                missing, lack rewards or observations, or all failed and are to be imitated.
        """
        if not isinstance(policy, Reparameterised):
            raise UserError("expected a policy with reparameterised samples for algorithm=sac; use policy=squashed")
        if self.reads_demonstrations:
            kept = self.keep_interventions
            demonstrations = demonstrations_or_none_yet(demonstrations, policy, env, keep_interventions=kept)
            if demonstrations is not None and self.bc_coefficient:
                demonstrations.check_imitable()
        return SAC(policy, self, generator, demonstrations, policy)


@dataclass
class RLPDConfig(SACConfig):
    """SACConfig with RLPD's defaults: ten critics with layer norm, twenty updates, half of each batch demonstrated.

    Targets have no entropy, as in the paper's tasks of sparse rewards: where a success ends the episode, the entropy of
    the decisions that it saves would be worth more than its reward.
    """

    updates: PositiveFloat = 20.0
    policy_delay: PositiveInt = 20
    demonstration_share: Fraction = 0.5
    target_std: PositiveFloat = 0.147
    entropy_in_target: bool = False
    actor_mean: bool = True
    ensemble: PositiveInt = 10
    subset: PositiveInt | None = 2
    layer_norm: bool = True


@dataclass
class WSRLConfig(SACConfig):
    """SACConfig with WSRL's defaults: critics of the stage offline, four updates, no entropy in targets.

    The paper has ten critics in both stages; here two, the default of offline learners.
    """

    updates: PositiveFloat = 4.0
    policy_delay: PositiveInt = 4
    target_std: PositiveFloat = 0.242  # a target entropy of 0
    initial_temperature: PositiveFloat = 0.01
    entropy_in_target: bool = False
    layer_norm: bool = True
    continue_values: bool = True


class Actor(Protocol):
    """Part of a policy that SAC trains, or the whole of it; see `Reparameterised`."""

    @property
    def noise_shape(self) -> tuple[int, ...]:
        """Shape of the noise of one observation."""
        ...

    def sample(self, observation: TensorDict, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Actions that the critics read, from `noise`, and their log_prob [N, P], differentiable."""
        ...

    def actor_parameters(self) -> list[nn.Parameter]:
        """Parameters that are trained."""
        ...


class SAC(Composite):
    """Learner with critics `q`, and an `actor` that maximises their value and its entropy at a learned temperature.

    Observations are stored as `encode` returns them.
    """

    starts = None
    collector: Callable[..., Collector] = Collector

    def __init__(
        self,
        policy: TrainablePolicy,
        config: SACConfig,
        generator: torch.Generator,
        demonstrations: Episodes | None,
        actor: Actor,
        q: ActionValues | None = None,
        encode: Callable[[TensorDict], TensorDict] | None = None,
    ) -> None:
        self.policy = policy
        self.config = config
        self.generator = generator
        self.actor = actor
        if config.bc_coefficient and actor is not policy:
            raise UserError("algorithm.bc_coefficient imitates with the whole policy, which is frozen here; use 0")
        self.q = q or ActionValues(policy, config, config.value_learning_rate)
        self.actor_parameters = actor.actor_parameters()
        self.log_temperature = torch.tensor(math.log(config.initial_temperature), device=policy.device).requires_grad_()
        parameters: list[Any] = [*self.actor_parameters, self.log_temperature]
        if (rate := config.temperature_learning_rate) is not None:
            parameters = [{"params": self.actor_parameters}, {"params": [self.log_temperature], "lr": rate}]
        self.actor_optimiser = torch.optim.Adam(parameters, config.learning_rate, fused=True)
        # H0 = K A log(2 pi e sigma^2) / 2
        elements = self.q.executed * self.q.elements
        self.target_entropy = elements * 0.5 * math.log(2.0 * math.pi * math.e * config.target_std**2)
        self.replay = MixedReplay(
            policy,
            config.capacity,
            config.demonstration_share,
            demonstrations,
            config.without_demonstrations,
            keep_interventions=config.keep_interventions,
            encode=encode,
        )
        self.gradient_steps = 0

    def continue_values(self, values: Mapping[str, Any] | None) -> None:
        """Begin with the critics `values` of an offline learner, if the configuration asks for it.

        Raises:
            UserError: if there are none, or they have other layers.
        """
        if not self.config.continue_values:
            return
        if values is None:
            raise UserError(
                "algorithm.continue_values=true goes on with scalar critics of the stage offline; use"
                " stages=[offline,rl] offline=calql"
            )
        self.q.continue_from(values)

    @property
    def temperature(self) -> Tensor:
        """Weight alpha of the entropy, one scalar."""
        return self.log_temperature.detach().exp()

    def update(self, rollout: Rollout, progress: float, world: World = ALONE) -> dict[str, float]:
        """Store one rollout, then take gradient steps; returns mean metrics and numbers of stored decisions."""
        before = self.replay.written
        self.replay.add(rollout)
        if self.replay.written < self.config.warmup:
            return {}
        self._decay_learning_rates(progress)
        # differences of rounded totals: fractions of a step add up over iterations
        steps = int(self.replay.written * self.config.updates) - int(before * self.config.updates)
        metrics: dict[str, list[Tensor]] = defaultdict(list)
        for _ in range(steps):
            for name, value in self._step().items():
                metrics[name].append(value)
        means = {name: float(torch.stack(values).mean()) for name, values in metrics.items()}
        counts = {"replay": float(len(self.replay))}
        if interventions := len(self.replay.interventions):
            counts["interventions"] = float(interventions)
        return means | {"temperature": float(self.temperature)} | counts

    def _decay_learning_rates(self, progress: float) -> None:
        config = self.config
        temperature = config.temperature_learning_rate
        rates = [config.learning_rate] if temperature is None else [config.learning_rate, temperature]
        linear_decay(self.actor_optimiser, progress, config.final_lr_share, *rates)
        linear_decay(self.q.optimiser, progress, config.final_lr_share, config.value_learning_rate)

    def _step(self) -> dict[str, Tensor]:
        """Take one step of the critics, and one of actor and temperature where they are due; returns metrics.

        Raises:
            DivergedError: before a step whose loss or gradient is not finite.
        """
        batch = self._batch()
        self.gradient_steps += 1
        metrics = self._update_critics(batch)
        actor_steps = self.gradient_steps - self.config.critic_warmup
        if actor_steps > 0 and actor_steps % self.config.policy_delay == 0:
            metrics |= self._update_actor(batch["observation"])
        self.q.follow(self.config.averaging)
        return metrics

    def _update_critics(self, batch: TensorDict) -> dict[str, Tensor]:
        return self.q.step(batch, self._target(batch), self.gradient_steps)

    def _batch(self) -> TensorDict:
        """Transitions: R = sum of discounted rewards over `lookahead` decisions, carry = gamma^k or 0, and s'."""
        rows = self.replay.draw(self.config.minibatch, self.generator)
        return self.replay.transitions(rows, self.config.lookahead, self.config.discount)

    def _sample(self, observation: TensorDict, count: int = 1) -> tuple[Tensor, Tensor]:
        """Scaled executed actions [B * count, K, A] of the actor and their log-probability [B * count], differentiable.

        There are `count` successive samples of each observation [B], for an actor that is the whole policy.
        """
        actions, log_prob = self.actor.sample(observation, self._noise(len(observation) * count))
        return self.q.scaled(actions), log_prob.sum(-1)

    def _noise(self, count: int) -> Tensor:
        """Standard normal noise of `count` samples of the actor."""
        return torch.randn((count, *self.actor.noise_shape), generator=self.generator).to(self.policy.device)

    @torch.no_grad()
    def _target(self, batch: TensorDict) -> Tensor:
        """Targets y = R + carry * (min_i Q_i'(s', a') - alpha log pi(a'|s')), a' ~ pi(s'), see `ActionValues.target`.

        The scaled actions a' are added to the `batch` as "following".
        """
        actions, log_prob = self._sample(batch["next_observation"])
        # critics that normalise batches read (s, a) and (s', a') together, in training as in targets
        batch["following"] = actions
        bonus = -self.temperature * log_prob if self.config.entropy_in_target else None
        return self.q.target(batch, actions, self.generator, bonus)

    def _update_actor(self, observation: TensorDict) -> dict[str, Tensor]:
        actions, log_prob = self._sample(observation)
        values = self.q.values(observation, actions, frozen=True)
        value = values.mean(0) if self.config.actor_mean else values.amin(0)
        # L = mean (alpha log pi(a|s) - Q(s, a)), a ~ pi(s)
        loss = (self.temperature * log_prob - value).mean()
        imitation = self._imitation()
        metrics = {} if imitation is None else {"bc_loss": imitation.detach()}
        if imitation is not None:
            # L + c mean |Q| L_BC: the weight does not depend on the rewards' units
            loss = loss + self.config.bc_coefficient * value.detach().abs().mean() * imitation
        self.actor_optimiser.zero_grad()
        loss.backward(inputs=self.actor_parameters)
        gradient = gradient_norm(self.actor_parameters)
        check_finite({"policy_loss": loss.detach(), "gradient of the actor": gradient}, self.gradient_steps)
        # dL/d log alpha of L = -log alpha mean (log pi(a|s) + H0)
        entropy = -log_prob.detach().mean()
        self.log_temperature.grad = entropy - self.target_entropy
        self.actor_optimiser.step()
        return {"policy_loss": loss.detach(), "value": value.detach().mean(), "entropy": entropy} | metrics

    def _imitation(self) -> Tensor | None:
        """Supervised loss of the policy on as many demonstrated chunks as a minibatch has; None if there are none.

        Critics learn from failed demonstrations, too, which the policy does not imitate.
        """
        if not self.config.bc_coefficient:
            return None
        rows = self.replay.draw_imitable(self.config.minibatch, self.generator, self.replay.interventions)
        if not len(rows[0]) + len(rows[1]):
            return None
        batch = self.replay.imitated_chunks(rows, self.policy.contract.horizon)
        return self.policy.loss(batch["observation"], batch["actions"], batch["valid"])

    def largest_pass(self, passes: Passes) -> int | None:
        """Bytes that the critics' minibatch stores, or the policy's with the critics if that is more."""
        observation = passes.observation(self.config.minibatch)
        critics = self.q.stored_bytes(passes, self.config.minibatch)
        imitated = passes.loss(self.config.minibatch) if self.config.bc_coefficient else 0
        return max(critics, imitated, saved_bytes(lambda: self.q.values(observation, self._sample(observation)[0])))

    def state_dict(self) -> dict[str, Any]:
        """Critics, temperature, optimisers, replay and generator; demonstrations are read from their file."""
        return {
            **self.q.state_dict(),
            **{name: getattr(self, name).state_dict() for name in _PARTS},
            "log_temperature": self.log_temperature.detach(),
            "gradient_steps": self.gradient_steps,
            "generator": self.generator.get_state(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.q.load_state_dict(state)
        for name in _PARTS:
            getattr(self, name).load_state_dict(state[name])
        self.log_temperature.copy_(state["log_temperature"])
        self.gradient_steps = state["gradient_steps"]
        self.generator.set_state(state["generator"])


_PARTS = ("actor_optimiser", "replay")
