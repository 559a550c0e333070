"""Calibrated Q-learning (Cal-QL, arXiv 2303.05479): offline SAC that lowers values of actions that are not in the data.

Without calibration it is conservative Q-learning (CQL, arXiv 2006.04779).

Differs from the papers:
    - a chunk is one action: its discounted reward, and discount^k for what follows after k executed actions;
    - the weight of the penalty is fixed, and targets use one action instead of the best of ten;
    - rewards are divided by the deviation of the returns, so that a smaller penalty is enough (1, not 5);
    - the temperature begins at 0.01 and learns at 1e-3, in place of 1 and the actor's 1e-4, by which it changes at most
    by a factor of e in 10,000 steps: at 1 the entropy is worth more than values in deviations of returns;
    - returns of episodes that a time limit ended are those of the recorded rewards alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.algorithms.critics import CriticConfig
from embodied.algorithms.micro_batch import saved_bytes
from embodied.algorithms.off_policy.replay import recorded_transitions
from embodied.algorithms.off_policy.sac import SAC, SACConfig
from embodied.algorithms.passes import Passes
from embodied.configuration import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Range,
    common_options,
)
from embodied.data.episodes import Episodes
from embodied.data.transitions import Transitions
from embodied.errors import UserError
from embodied.policy import Reparameterised, TrainablePolicy
from embodied.world import ALONE, World


@dataclass
class CalQLConfig(CriticConfig):
    """Hyper-parameters of Cal-QL; options of the critics are those of CriticConfig, the others those of SAC.

    `conservatism` is the weight of the penalty, which compares the actions of the data with `sampled_actions` of three
    kinds: random ones, and the policy's for this and the next observation. If `calibrated`, values of the policy's
    actions are lowered no further than to the return of the episode. The temperature follows `target_std`, see
    SACConfig, at `temperature_learning_rate`.
    """

    steps: NonNegativeInt = 10_000
    batch: PositiveInt = 256
    conservatism: NonNegativeFloat = 1.0
    sampled_actions: PositiveInt = 10
    calibrated: bool = True
    learning_rate: NonNegativeFloat = 1e-4
    value_learning_rate: NonNegativeFloat = 3e-4
    discount: Fraction = 0.99
    averaging: Annotated[float, Range(above=0, at_most=1)] = 0.005
    initial_temperature: PositiveFloat = 0.01
    temperature_learning_rate: NonNegativeFloat | None = 1e-3
    target_std: PositiveFloat = 0.242  # entropy 0 per element
    layer_norm: bool = True

    @property
    def sac(self) -> SACConfig:
        """Options of SAC with the same names."""
        options = common_options(self, SACConfig)
        return SACConfig(minibatch=self.batch, capacity=1, entropy_in_target=False, **options)

    def build(self, policy: TrainablePolicy, generator: torch.Generator) -> CalQL:
        """Build the learner of `policy`; `generator` draws minibatches and the noise of actions.

        Raises:
            UserError: for a policy without reparameterised samples, or actions without limits.
        """
        if not isinstance(policy, Reparameterised):
            raise UserError("offline=calql and cql need a policy with reparameterised samples; use policy=squashed")
        return CalQL(policy, self, generator)


@dataclass
class CQLConfig(CalQLConfig):
    """CQL: Cal-QL without calibration."""

    calibrated: bool = False


class CalQL(SAC):
    """SAC on stored episodes, with a penalty of the values of actions that are not in them."""

    def __init__(self, policy: Reparameterised, config: CalQLConfig, generator: torch.Generator) -> None:
        super().__init__(policy, config.sac, generator, None, policy)
        self.options = config
        self.transitions: Transitions | None = None

    def fit(self, episodes: Episodes, steps: int, world: World = ALONE) -> dict[str, float]:
        """Take `steps` gradient steps on `episodes`; returns the last metrics.

        Raises:
            UserError: for several processes, and for episodes with unknown rewards, see `recorded_transitions`.
        """
        if world.size > 1:
            raise UserError("offline=calql and cql learn in one process; use offline=iql in several")
        self.transitions = recorded_transitions(self.policy, episodes, self.config.discount, self.transitions)
        self.q.unit = self.transitions.scale
        metrics: dict[str, Tensor] = {}
        for _ in range(steps):
            metrics = self._step()
        return {name: float(value) for name, value in metrics.items()}

    def _update_critics(self, batch: TensorDict) -> dict[str, Tensor]:
        penalty, gap = self._penalty(batch)
        # L = sum_j mean (Q_j(s, a) - y)^2 + conservatism * sum_j mean (log sum_k exp Q_j(s, a_k) - Q_j(s, a))
        weighted = self.options.conservatism * penalty
        return self.q.step(batch, self._target(batch), self.gradient_steps, weighted) | {"conservative_gap": gap}

    def _batch(self) -> TensorDict:
        """Transitions of stored episodes."""
        assert self.transitions is not None
        rows = self.transitions.draw(self.config.minibatch, self.generator)
        return self.transitions.take(rows, self.policy.contract.horizon).to(self.policy.device)

    def _penalty(self, batch: TensorDict) -> tuple[Tensor, Tensor]:
        """Sum over the critics of log sum_k exp(Q(s, a_k) - log p(a_k)) - Q(s, a), and its mean per critic."""
        observation = batch["observation"]
        count = self.options.sampled_actions
        features = self.policy.features(observation)
        recorded = self.q.scaled(batch["actions"])
        rows = torch.arange(len(batch), device=features.device).repeat_interleave(count)
        exponents = []
        for reached in (None, observation, batch["next_observation"]):
            with torch.no_grad():
                actions, log_density = self._candidates(reached, recorded)
            # [M, B, k]
            values = self.q.critics.values(torch.cat((features[rows], actions.flatten(1)), -1)).unflatten(
                -1, (-1, count)
            )
            if self.options.calibrated and reached is not None:
                # Cal-QL: max(Q(s, a_k), G) of the policy's actions
                values = values.maximum(batch["returns"].unsqueeze(-1))
            exponents.append(values - log_density.unflatten(0, (-1, count)))
        data = self.q.critics.values(torch.cat((features, recorded.flatten(1)), -1))
        gap = torch.cat(exponents, -1).logsumexp(-1) - data
        return gap.mean(-1).sum(), gap.detach().mean()

    def _candidates(self, observation: TensorDict | None, like: Tensor) -> tuple[Tensor, Tensor]:
        """Scaled actions [B * k, K, A], k successive ones for each row of `like` [B, K, A], and log densities [B * k].

        They are the policy's for the `observation` [B], uniform without it.
        """
        count = self.options.sampled_actions
        if observation is not None:
            return self._sample(observation, count)
        uniform = torch.rand((len(like) * count, *like.shape[1:]), generator=self.generator).to(like.device)
        # density of the uniform distribution on [-1, 1]^(K A)
        return 2.0 * uniform - 1.0, like.new_full((len(uniform),), like[0].numel() * math.log(0.5))

    def values(self) -> dict[str, Any] | None:
        """Critics with which a learner of the stage rl goes on, see `ActionValues.in_rewards`."""
        return self.q.in_rewards()

    def largest_pass(self, passes: Passes) -> int | None:
        """Bytes that the critics' minibatch stores, and the penalty's with all sampled actions."""
        minibatch = self.config.minibatch
        count = 1 + 3 * self.options.sampled_actions
        observation = passes.observation(minibatch)
        actions = self.q.scaled(passes.actions(minibatch * count))

        def penalty() -> Tensor:
            features = self.policy.features(observation).repeat_interleave(count, 0)
            return self.q.critics(torch.cat((features, actions.flatten(1)), -1))

        return self.q.stored_bytes(passes, minibatch) + saved_bytes(penalty)
