"""ARSQ (arXiv 2502.00288): soft Q-learning of actions that are chosen bin by bin, each given the choices before it.

The advantage of a choice is adv = tau log pi, so that tau logsumexp(adv / tau) = 0 over its bins, and
Q(s, a) = V(s) + sum of adv over the choices of a: the policy is its own action value. Demonstrations are a share of
every batch, whose choices are also imitated by a margin, as in CQN (arXiv 2407.07787), from which the bins are
(`policies/coarse_to_fine.py`). With `policy.autoregressive=false` the dimensions of an action do not depend on one
another, as in CQN.

Differs from the papers:
    - many environments: an iteration stores `rollout_length` chunks of each, then takes `gradient_steps` steps;
    - a chunk is one action: its discounted reward, and discount^k for what follows after k executed actions; choices of
    actions that an episode's end left out do not count;
    - V is the critic of the policy, which also reads privileged observations; it is scalar, CQN has distributions;
    - without `entropy_in_target`, the default, values are those of rewards alone: the entropy of dozens of choices in
    every decision would soon be worth more than a success;
    - failed demonstrations teach values, and are not imitated.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied import seeding
from embodied.algorithms.critics import approach
from embodied.algorithms.finite import check_finite, gradient_norm
from embodied.algorithms.micro_batch import saved_bytes
from embodied.algorithms.off_policy.replay import MixedReplay
from embodied.algorithms.parts import Composite
from embodied.algorithms.passes import Passes
from embodied.configuration import (
    Configuration,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Range,
)
from embodied.data.episodes import FAILED, Episodes
from embodied.environment import Environment
from embodied.errors import UserError
from embodied.policy import DiscretePolicy, TrainablePolicy
from embodied.rollout.rollout import Collector, Rollout
from embodied.world import ALONE, World


@dataclass
class ARSQConfig(Configuration):
    """Hyper-parameters of ARSQ; gradient steps begin after `warmup` decisions, the first `critic_warmup` for V alone.

    A `demonstration_share` of each batch is drawn from demonstrations with known rewards. `imitation` is the weight of
    the loss by which a demonstrated choice gets an advantage that is larger than that of others by a `margin`, in units
    of rewards, as is the `temperature` tau.
    """

    rollout_length: PositiveInt = 16
    gradient_steps: PositiveInt = 100
    lookahead: PositiveInt = 1
    minibatch: PositiveInt = 256
    demonstration_share: Fraction = 0.5
    capacity: PositiveInt = 500_000
    warmup: NonNegativeInt = 5_000
    critic_warmup: NonNegativeInt = 0
    learning_rate: NonNegativeFloat = 3e-4
    value_learning_rate: NonNegativeFloat = 3e-4
    discount: Fraction = 0.99
    averaging: Annotated[float, Range(above=0, at_most=1)] = 0.02
    temperature: PositiveFloat = 0.01
    entropy_in_target: bool = False
    imitation: NonNegativeFloat = 1.0
    margin: NonNegativeFloat = 0.01

    @property
    def reads_demonstrations(self) -> bool:
        """Whether demonstrations are read."""
        return self.demonstration_share > 0

    @property
    def max_staleness(self) -> int:
        """Updates that a rollout's policy may be behind: any, because ARSQ learns off-policy."""
        return sys.maxsize

    def build(
        self,
        policy: TrainablePolicy,
        demonstrations: Episodes | None,
        env: Environment,
        generator: torch.Generator,
    ) -> ARSQ:
        """Build the learner of `policy`; `generator` draws minibatches and actions of targets.

        Raises:
            UserError: for a policy without choices or with categorical values, and demonstrations that are missing or
                lack rewards or observations.
        """
        if not isinstance(policy, DiscretePolicy):
            raise UserError("expected a policy of successive choices for algorithm=arsq; use policy=coarse_to_fine")
        if policy.value_head.categorical:
            raise UserError("algorithm=arsq adds advantages to scalar values; use policy.values.head=scalar")
        return ARSQ(policy, self, demonstrations, generator)


class ARSQ(Composite):
    """Learner of the action values of `policy`: of its choices' advantages, and of its critic V."""

    starts = None
    collector = Collector

    def __init__(
        self, policy: DiscretePolicy, config: ARSQConfig, demonstrations: Episodes | None, generator: torch.Generator
    ) -> None:
        self.policy = policy
        self.config = config
        self.generator = generator
        with seeding.undisturbed():
            self.target_policy = policy.with_new_weights()
        self.target_policy.load_state_dict(policy.state_dict())
        rates = (
            (policy.actor_parameters(), config.learning_rate),
            (policy.critic_parameters(), config.value_learning_rate),
        )
        self.optimiser = torch.optim.Adam([{"params": weights, "lr": rate} for weights, rate in rates], fused=True)
        self.replay = MixedReplay(policy, config.capacity, config.demonstration_share, demonstrations)
        self.gradient_steps = 0

    def update(self, rollout: Rollout, progress: float, world: World = ALONE) -> dict[str, float]:
        """Store one rollout, then take gradient steps; returns mean metrics and the number of rows stored."""
        self.replay.add(rollout)
        if self.replay.written < self.config.warmup:
            return {}
        steps = [self._step() for _ in range(self.config.gradient_steps)]
        metrics = {name: float(torch.stack([step[name] for step in steps]).mean()) for name in steps[0]}
        return metrics | {"replay": float(len(self.replay))}

    def _step(self) -> dict[str, Tensor]:
        """Take one gradient step and move the target network; returns metrics.

        Raises:
            DivergedError: before a step whose loss or gradient is not finite.
        """
        batch = self._batch()
        self.gradient_steps += 1
        losses = self._losses(batch, self._target(batch))
        loss = losses["value_loss"] + self.config.imitation * losses["imitation_loss"]
        self.optimiser.zero_grad()
        loss.backward()
        losses = {name: each.detach() for name, each in losses.items()}
        if self.gradient_steps <= self.config.critic_warmup:
            for parameter in self.policy.actor_parameters():  # a new critic would lead a trained policy astray
                parameter.grad = None
        gradient = gradient_norm(self.policy.parameters())
        check_finite(losses | {"gradient": gradient}, self.gradient_steps)
        self.optimiser.step()
        approach(self.target_policy.critic_parameters(), self.policy.critic_parameters(), self.config.averaging)
        return losses

    def _batch(self) -> TensorDict:
        """Transitions, of which `executed` [B, K] actions count and `imitated` [B] rows are imitated."""
        rows = self.replay.draw(self.config.minibatch, self.generator)
        # R = sum of discounted rewards over `lookahead` decisions, carry = gamma^k or 0, next observation s'
        batch = self.replay.transitions(rows, self.config.lookahead, self.config.discount)
        batch["executed"] = self.replay.chunks(rows, self.policy.contract.executed)["valid"]
        own, demonstrated = rows
        imitated = torch.zeros(len(batch), dtype=torch.bool)
        if len(demonstrated):
            outcome = self.replay.demonstrations.decisions(demonstrated, "success")["success"]
            imitated[len(own) :] = outcome != FAILED
        return batch.set("imitated", imitated.to(self.policy.device))

    @torch.no_grad()
    def _target(self, batch: TensorDict) -> Tensor:
        """Targets y = R + carry * V'(s'), or of rewards alone R + carry * Q'(s', a'), a' ~ pi(s'), [B]."""
        observation = batch["next_observation"]
        following = self.target_policy.value(observation)
        if not self.config.entropy_in_target:
            generator = seeding.child(self.generator, self.policy.device)
            log_prob = self.policy.act(observation, generator=generator).log_prob.squeeze(-1)
            # Q'(s', a') = V'(s') + tau log pi(a'|s'): the value without the bonus of its entropy
            following = following + self.config.temperature * log_prob
        return batch["reward"] + batch["carry"] * following

    def _losses(self, batch: TensorDict, target: Tensor) -> dict[str, Tensor]:
        """Losses of values and of imitation, each one scalar; `target` is [B]."""
        observation, executed = batch["observation"], batch["executed"]
        code = self.policy.code(batch["actions"])
        # adv = tau log pi(bin | s, choices before it), [B, K, L, A, G]
        advantage = self.config.temperature * self.policy.log_probs(observation, code)
        chosen = advantage.gather(-1, code.unsqueeze(-1))
        # Q = V + sum of adv over the choices of executed actions
        q = self.policy.value(observation) + (chosen.sum((-1, -2, -3)) * executed).sum(-1)
        # hinge of each other bin: max(0, margin - (adv of the demonstrated bin - adv of the other)), mean over bins
        hinge = (self.config.margin - chosen + advantage).clamp_min(0.0)
        others = torch.ones_like(hinge).scatter(-1, code.unsqueeze(-1), 0.0)
        hinges = (hinge * others).sum((-1, -2, -3)) / max(1, hinge.shape[-1] - 1)
        imitated = executed & batch["imitated"].unsqueeze(-1)
        return {
            # L = mean (Q(s, a) - y)^2
            "value_loss": (q - target).square().mean(),
            # L = sum over choices, mean over imitated actions
            "imitation_loss": (hinges * imitated).sum() / imitated.sum().clamp_min(1),
        }

    def largest_pass(self, passes: Passes) -> int | None:
        """Bytes that a minibatch stores."""
        count = self.config.minibatch
        batch = TensorDict({"observation": passes.observation(count)}, [count])
        batch["actions"] = passes.actions(count)[:, : self.policy.contract.executed]
        batch["executed"] = batch["actions"][..., 0] > 0.0
        batch["imitated"] = batch["executed"][:, 0]
        return saved_bytes(lambda: self._losses(batch, batch["actions"][:, 0, 0]))

    def state_dict(self) -> dict[str, Any]:
        """Target network, optimiser, replay and generator; demonstrations are read from their file."""
        parts = {name: getattr(self, name).state_dict() for name in _PARTS}
        return parts | {"gradient_steps": self.gradient_steps, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        for name in _PARTS:
            getattr(self, name).load_state_dict(state[name])
        self.gradient_steps = state["gradient_steps"]
        self.generator.set_state(state["generator"])


_PARTS = ("target_policy", "optimiser", "replay")
