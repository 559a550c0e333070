"""Implicit Q-learning (arXiv 2110.06169): offline, without values of actions that are not in the data.

With another loss of V, the conjugate of an f-divergence, it is f-DVL (arXiv 2302.08560), `offline=f_dvl`. With an
inverse temperature for each state it is FamO2O (arXiv 2310.17966), `offline=famo2o`, see family.py.

Differs from the papers:
    - a chunk is one action: its discounted reward, and discount^k for what follows after k executed actions;
    - the policy is extracted by supervised fine-tuning with weights, so that it can be any that has a supervised loss
      (a flow policy's loss is weighted as in arXiv 2304.10573), and acts by its moving average; weights are divided by
      their mean over a minibatch;
    - alternatively the policy maximises Q beside its supervised loss (DDPG+BC, arXiv 2406.09329);
    - rewards are divided by the deviation of the returns, so that one temperature fits many tasks;
    - features that are learned, as of pictures, are trained by the loss of Q alone;
    - f-DVL: the loss of Q is the squared error, and conjugates are zero for all negative advantages, as a convex loss
    needs; V = Q where actions are alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Annotated, Any

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.algorithms.critics import CriticConfig, Critics
from embodied.algorithms.finite import check_finite
from embodied.algorithms.imitation.sft import SFT, SFTConfig
from embodied.algorithms.off_policy.action_values import ActionValues
from embodied.algorithms.off_policy.replay import recorded_transitions
from embodied.algorithms.offline.family import Family
from embodied.algorithms.parts import Composite
from embodied.algorithms.passes import Passes
from embodied.configuration import Configuration, Fraction, NonNegativeFloat, PositiveFloat, Range
from embodied.data.episodes import Episodes
from embodied.data.transitions import Transitions
from embodied.errors import UserError
from embodied.policy import DeterministicPolicy, TrainablePolicy
from embodied.world import ALONE, World


class Extraction(Enum):
    """Policy extraction: AWR imitates actions by their advantage, DDPG_BC maximises Q and imitates all actions."""

    AWR = "awr"
    DDPG_BC = "ddpg_bc"


class ValueLoss(Enum):
    """Loss of V: an expectile of Q over the actions of the data, or the conjugate of an f-divergence."""

    EXPECTILE = "expectile"
    CHI_SQUARE = "chi_square"
    TOTAL_VARIATION = "total_variation"


@dataclass
class ImplicitValuesConfig(Configuration):
    """Hyper-parameters of the critics Q and V of implicit Q-learning.

    V is the `expectile` of Q over the actions of the data; with another `value_loss` it comes the nearer to the largest
    Q, the nearer `conjugate_weight` is to 1.
    """

    value_loss: ValueLoss = ValueLoss.EXPECTILE
    expectile: Annotated[float, Range(above=0, below=1)] = 0.9
    conjugate_weight: Annotated[float, Range(above=0.5, below=1)] = 0.8
    discount: Fraction = 0.99
    averaging: Annotated[float, Range(above=0, at_most=1)] = 0.005
    value_learning_rate: NonNegativeFloat = 3e-4
    critics: CriticConfig = field(default_factory=lambda: CriticConfig(layer_norm=True))


@dataclass
class IQLConfig(SFTConfig, ImplicitValuesConfig):
    """Hyper-parameters of implicit Q-learning; options of the policy's optimiser are those of SFT.

    The extraction awr has the weight exp(`inverse_temperature` * advantage), at most `max_weight`; ddpg_bc multiplies
    the supervised loss by `bc_weight`. With a `highest_inverse_temperature` each state has its own between the two.
    """

    extraction: Extraction = Extraction.AWR
    inverse_temperature: NonNegativeFloat = 10.0
    highest_inverse_temperature: PositiveFloat | None = None
    max_weight: PositiveFloat = 100.0
    bc_weight: PositiveFloat = 0.3

    def __post_init__(self) -> None:
        """Raise UserError for numbers that are out of range or do not go together."""
        super().__post_init__()
        low = self.inverse_temperature
        high = self.highest_inverse_temperature
        if high is not None and high <= low:
            raise UserError(f"expected highest_inverse_temperature > inverse_temperature, got {high:g} and {low:g}")
        if high is not None and self.extraction is not Extraction.AWR:
            raise UserError("highest_inverse_temperature is an option of offline.extraction=awr; leave it out")

    def build(self, policy: TrainablePolicy, generator: torch.Generator) -> SFT:
        """Build the learner of `policy`, an `IQL`; `generator` draws minibatches.

        Raises:
            UserError: for extraction=ddpg_bc of a policy without deterministic actions, or actions without limits.
        """
        self.check_extraction(policy)
        return IQL(policy, self, generator)

    def check_extraction(self, policy: TrainablePolicy) -> None:
        """Raise UserError for extraction=ddpg_bc of a policy without deterministic actions."""
        if self.extraction is Extraction.DDPG_BC and not isinstance(policy, DeterministicPolicy):
            raise UserError(
                "offline.extraction=ddpg_bc needs deterministic actions; use awr, or policy=mlp or squashed"
            )


@dataclass
class FDVLConfig(IQLConfig):
    """IQLConfig with the loss of V of f-DVL."""

    value_loss: ValueLoss = ValueLoss.TOTAL_VARIATION


@dataclass
class FamO2OConfig(IQLConfig):
    """IQLConfig with an inverse temperature for each state."""

    inverse_temperature: NonNegativeFloat = 8.0
    highest_inverse_temperature: PositiveFloat | None = 14.0


class ImplicitValues(Composite):
    """Critics Q and V of recorded chunks, and their optimisers; they read the features of `policy`."""

    def __init__(self, policy: TrainablePolicy, config: ImplicitValuesConfig) -> None:
        self.policy = policy
        self.config = config
        self.q = ActionValues(policy, config.critics, config.value_learning_rate)
        one = replace(config.critics, ensemble=1, subset=None)
        self.v = Critics(policy.feature_size, one).to(policy.device)
        self.v_optimiser = torch.optim.Adam(self.v.parameters(), config.value_learning_rate, fused=True)

    def advantage(self, observation: TensorDict, scaled: Tensor, generator: torch.Generator) -> Tensor:
        """Advantage A = min_j Q_j'(s, a) - V(s) of actions `scaled` [B, K, A], [B], differentiable in V only."""
        with torch.no_grad():
            inputs = self.q.inputs(observation, scaled)
            value = self.q.targets.minimum(inputs, generator)
        # both read the same features, which come first
        return value - self.v.values(inputs[:, : self.policy.feature_size])[0]

    def step(self, batch: TensorDict, generator: torch.Generator, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Take gradient step number `step` of V and Q; returns A of the chunks of `batch` before it [B], and metrics.

        Raises:
            DivergedError: before a step whose loss or gradient is not finite.
        """
        advantage = self.advantage(batch["observation"], self.q.scaled(batch["actions"]), generator)
        loss = self.state_value_loss(advantage)
        check_finite({"state value loss": loss.detach()}, step)
        target = self._target(batch)
        self.v_optimiser.zero_grad()
        loss.backward()
        self.v_optimiser.step()
        # L_Q = sum_j mean (Q_j(s, a) - y)^2
        metrics = self.q.step(batch, target, step)
        self.q.follow(self.config.averaging)
        return advantage.detach(), metrics | {"state_value_loss": loss.detach()}

    def state_value_loss(self, advantage: Tensor) -> Tensor:
        """Loss of V from A = Q(s, a) - V(s), [B], one scalar."""
        config = self.config
        if config.value_loss is ValueLoss.EXPECTILE:
            # L_V = mean |tau - 1(A < 0)| A^2
            weight = torch.where(advantage < 0.0, 1.0 - config.expectile, config.expectile)
            return (weight * advantage.square()).mean()
        # f*(A) = max(A, 0) of the total variation, plus max(A, 0)^2 / 4 of chi-square
        positive = advantage.relu()
        is_square = config.value_loss is ValueLoss.CHI_SQUARE
        conjugate = positive + positive.square() / 4 if is_square else positive
        # L_V = mean (lambda f*(A) - (1 - lambda) A)
        return (config.conjugate_weight * conjugate - (1.0 - config.conjugate_weight) * advantage).mean()

    @torch.no_grad()
    def _target(self, batch: TensorDict) -> Tensor:
        """Targets y = R + carry * V(s'), [B]."""
        return batch["reward"] + batch["carry"] * self.state_value(batch["next_observation"])

    def state_value(self, observation: TensorDict) -> Tensor:
        """V(s), [B], differentiable in the weights of V only."""
        with torch.no_grad():
            features = self.policy.features(observation)
        return self.v.values(features)[0]

    def state_dict(self) -> dict[str, Any]:
        """Critics and optimisers."""
        return {**self.q.state_dict(), "v": self.v.state_dict(), "v_optimiser": self.v_optimiser.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.q.load_state_dict(state)
        self.v.load_state_dict(state["v"])
        self.v_optimiser.load_state_dict(state["v_optimiser"])


class IQL(SFT):
    """Learner of critics Q and V from stored episodes, and of a policy by supervised fine-tuning towards them."""

    config: IQLConfig

    def __init__(self, policy: TrainablePolicy, config: IQLConfig, generator: torch.Generator) -> None:
        super().__init__(policy, config, generator)
        self.critics = ImplicitValues(policy, config)
        self.q = self.critics.q
        self.family: Family | None = None
        if (high := config.highest_inverse_temperature) is not None:
            low = config.inverse_temperature
            self.family = Family(
                self.q, config.critics.hidden, config.value_learning_rate, low, high, config.max_weight
            )
        self.transitions: Transitions | None = None

    def fit(self, episodes: Episodes, steps: int, world: World = ALONE) -> dict[str, float]:
        """Take `steps` gradient steps on `episodes`, which the processes of `world` share; returns the last metrics.

        Raises:
            UserError: for episodes with unknown rewards, see `recorded_transitions`.
        """
        self.transitions = recorded_transitions(self.policy, episodes, self.config.discount, self.transitions)
        self.q.unit = self.transitions.scale
        metrics: dict[str, float] = {}
        for _ in range(steps):
            rows = self.transitions.draw(self.config.batch, self.generator, world)
            batch = self.transitions.take(rows, self.policy.contract.horizon).to(self.policy.device)
            metrics = self._learn(batch, world)
        return metrics

    def _learn(self, batch: TensorDict, world: World) -> dict[str, float]:
        """Take one step of V, Q and the policy.

        Raises:
            DivergedError: before a step whose loss or gradient is not finite.
        """
        step = self.gradient_steps + 1
        advantage, metrics = self.critics.step(batch, self.generator, step)
        progress = min(1.0, self.gradient_steps / max(1, self.config.steps))
        temperature: Tensor | float = self.config.inverse_temperature
        if self.family is not None:
            # each process draws the places of all rows
            places = 2.0 * torch.rand(self.config.batch, generator=self.generator)[world.rank :: world.size] - 1.0
            temperature = self.family.step(batch, advantage, places.to(self.policy.device), step)
            metrics |= {"inverse_temperature": temperature.mean(), "inverse_temperature_std": temperature.std()}
        self.losses.append(self._extract(batch, advantage, temperature, progress, world))
        numbers = {name: float(value) for name, value in metrics.items()}
        return {"actor_loss": sum(self.losses) / len(self.losses), **numbers}

    def _extract(
        self, batch: TensorDict, advantage: Tensor, temperature: Tensor | float, progress: float, world: World
    ) -> float:
        """Take one step of the policy, at one inverse `temperature` or one for each row [B]; returns its loss."""
        config = self.config
        if config.extraction is Extraction.DDPG_BC:
            return self.step(batch, progress, world, self._negative_value(batch["observation"], world))
        # w = min(exp(beta A), max_weight)
        weight = (temperature * advantage).exp().clamp(max=config.max_weight)
        weight = weight / (world.sum(weight.mean()) / world.size)
        # L = sum_b w_b valid_b L_BC(s_b, a_b) / sum_b w_b valid_b
        return self.step(batch.copy().update({"valid": batch["valid"] * weight.unsqueeze(1)}), progress, world)

    def _negative_value(self, observation: TensorDict, world: World) -> Callable[[TrainablePolicy], Tensor]:
        """The loss of a policy besides imitation: -mean Q(s, pi(s)) / (bc_weight * mean |Q|)."""

        def loss(policy: TrainablePolicy) -> Tensor:
            assert isinstance(policy, DeterministicPolicy)
            values = self.q.values(observation, self.q.scaled(policy.actions(observation)), frozen=True).amin(0)
            size = world.sum(values.detach().abs().mean()) / world.size
            return -values.mean() / (self.config.bc_weight * size)

        return loss

    def values(self) -> dict[str, Any] | None:
        """Critics with which a learner of the stage rl goes on, see `ActionValues.in_rewards`."""
        return self.q.in_rewards()

    def largest_pass(self, passes: Passes) -> int | None:
        """Bytes that the critics' minibatch stores, or the policy's if that is more."""
        rows = passes.share(self.config.batch)
        return max(self.q.stored_bytes(passes, rows), passes.loss(rows))

    def state_dict(self) -> dict[str, Any]:
        """State of SFT, critics and optimisers."""
        family = {} if self.family is None else {"family": self.family.state_dict()}
        return {**super().state_dict(), **self.critics.state_dict(), **family}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        super().load_state_dict(state)
        self.critics.load_state_dict(state)
        if self.family is not None:
            self.family.load_state_dict(state["family"])
