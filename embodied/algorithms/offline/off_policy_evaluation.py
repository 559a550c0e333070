"""Off-policy evaluation: the value of a policy, estimated from episodes that other policies have recorded.

Fitted Q evaluation (FQE, arXiv 1903.08738): critics Q of the policy itself, whose mean at the initial states is J.
AM-Q (Uni-O4, arXiv 2311.03351, the gate of RL-100, arXiv 2510.14830): the mean of given critics over rollouts of the
policy in a learned model of the dynamics.

Differs from the papers:
    - a chunk is one action: its discounted reward, and discount^k for what follows after k executed actions;
    - the policy acts as when it is deployed, deterministically;
    - FQE takes the mean of an ensemble in targets and estimates; features of the critics have no target network;
    - the critics of AM-Q are those of the policy that is to be replaced, by FQE; states of its rollouts count as far as
    their episode goes on in the model, so that success does not end a sum of positive values.

Letters: R observations of E episodes, K executed actions, A elements of an action.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied import seeding
from embodied.algorithms.critics import CriticConfig
from embodied.algorithms.off_policy.action_values import ActionValues
from embodied.algorithms.off_policy.replay import recorded_transitions
from embodied.algorithms.offline.dynamics import Dynamics, DynamicsConfig
from embodied.algorithms.parts import Composite
from embodied.configuration import Fraction, NonNegativeFloat, PositiveInt, Range
from embodied.data.episodes import Episodes
from embodied.data.transitions import Transitions, held_out_episodes
from embodied.errors import UserError
from embodied.policy import TrainablePolicy

RESAMPLES = 1000
"""Number of resamples of the episodes for an interval."""


class Estimator(Enum):
    """Off-policy estimator of a policy's value; NONE: it is not estimated."""

    NONE = "none"
    FQE = "fqe"
    AM_Q = "am_q"


@dataclass
class OffPolicyEvaluationConfig(CriticConfig):
    """Hyper-parameters of an estimate: of its critics and, for am_q, of rollouts of `horizon` decisions in a model.

    The critics take `steps` gradient steps, and the model `model_steps`. Target networks follow fast (`averaging`): a
    reward is told to the decision before within 1 / averaging steps, and has to reach the first one of an episode.
    """

    steps: PositiveInt = 2_000
    batch: PositiveInt = 256
    learning_rate: NonNegativeFloat = 1e-3
    discount: Fraction = 0.99
    averaging: Annotated[float, Range(above=0, at_most=1)] = 0.05
    ensemble: PositiveInt = 5
    layer_norm: bool = True
    model_steps: PositiveInt = 2_000
    horizon: PositiveInt = 10


@dataclass(frozen=True)
class Estimate:
    """Estimated value J of a policy in the unit of rewards: the mean over the initial states of episodes, [E] each."""

    values: Tensor

    @property
    def mean(self) -> float:
        """The value J."""
        return float(self.values.mean())

    def interval(self, generator: torch.Generator) -> tuple[float, float]:
        """Interval of 95% by bootstrap over the episodes, drawn by `generator`.

        Raises:
            UserError: for a single episode, whose spread is unknown.
        """
        if len(self.values) < 2:
            raise UserError("an estimate from a single episode has no interval; record more, or use rounds.gate=none")
        rows = torch.randint(len(self.values), (RESAMPLES, len(self.values)), generator=generator)
        low, high = self.values.cpu()[rows].mean(1).quantile(torch.tensor([0.025, 0.975])).tolist()
        return low, high


class FittedQ(Composite):
    """Critics of `policy`, which does not change, on `transitions`; `generator` draws weights and minibatches."""

    def __init__(
        self,
        policy: TrainablePolicy,
        transitions: Transitions,
        config: OffPolicyEvaluationConfig,
        generator: torch.Generator,
    ) -> None:
        self.config = config
        self.transitions = transitions
        self.generator = seeding.child(generator)
        with seeding.undisturbed():
            torch.manual_seed(self.generator.initial_seed())
            self.q = ActionValues(with_own_critic(policy), config, config.learning_rate)
        rows = torch.arange(len(transitions.episodes))
        self.actions = self._act(policy, rows, "observation")
        self.next_actions = self._act(policy, rows, "next_observation")
        self.gradient_steps = 0

    def fit(self) -> dict[str, float]:
        """Take all gradient steps; returns the metrics of the last."""
        metrics: dict[str, Tensor] = {}
        for _ in range(self.config.steps):
            rows = self.transitions.draw(self.config.batch, self.generator)
            batch = self.transitions.take(rows, self.q.executed).to(self.q.policy.device)
            self.gradient_steps += 1
            # L = sum_j mean (Q_j(s, a) - y)^2
            metrics = self.q.step(batch, self._target(batch, rows), self.gradient_steps)
            self.q.follow(self.config.averaging)
        return {name: float(value) for name, value in metrics.items()}

    @torch.no_grad()
    def _target(self, batch: TensorDict, rows: Tensor) -> Tensor:
        """Targets y = R + carry * mean_j Q_j'(s', pi(s')), [B]."""
        inputs = self.q.inputs(batch["next_observation"], self.next_actions[rows.to(self.next_actions.device)])
        return batch["reward"] + batch["carry"] * self.q.targets.values(inputs).mean(0)

    @torch.no_grad()
    def estimate(self) -> Estimate:
        """J = mean over the episodes of mean_j Q_j(s_0, pi(s_0))."""
        rows = initial_rows(self.transitions.episodes)
        observation = self.transitions.take(rows, 1)["observation"].to(self.q.policy.device)
        values = self.q.values(observation, self.actions[rows.to(self.actions.device)]).mean(0)
        return Estimate(values * self.transitions.scale)

    def _act(self, policy: TrainablePolicy, rows: Tensor, name: str) -> Tensor:
        """Actions [R, K, A] of `policy` in the observations `name` of the transitions `rows`, scaled to [-1, 1]."""
        pieces = rows.split(self.config.batch)  # thousands of pictures at once would need a larger card than training
        observations = (self.transitions.take(part, 1)[name].to(policy.device) for part in pieces)
        return torch.cat([self.q.scaled(policy.act(each, deterministic=True).actions) for each in observations])


class ModelRollouts(Composite):
    """Rollouts in a model of `transitions`, for estimates by critics that several policies share (AM-Q)."""

    def __init__(
        self,
        policy: TrainablePolicy,
        transitions: Transitions,
        config: OffPolicyEvaluationConfig,
        dynamics: DynamicsConfig,
        generator: torch.Generator,
    ) -> None:
        self.config = config
        self.transitions = transitions
        self.generator = seeding.child(generator)
        self.critics = FittedQ(policy, transitions, config, self.generator)
        with seeding.undisturbed():
            torch.manual_seed(self.generator.initial_seed())
            self.dynamics = Dynamics(policy.contract, dynamics, policy.device)

    def fit(self) -> dict[str, float]:
        """Train critics and model; returns metrics."""
        metrics = self.critics.fit()
        held_out = held_out_episodes(len(self.transitions.episodes.ends), self.dynamics.config.held_out)
        learned = self.transitions.of_episodes(~held_out)
        metrics |= self.dynamics.fit(learned, self.config.model_steps, self.generator)
        error = self.dynamics.choose_elites(self.transitions.of_episodes(held_out))
        return metrics | {"model_error": error}

    @torch.no_grad()
    def estimate(self, policy: TrainablePolicy) -> Estimate:
        """J = mean over the episodes of sum_t p_t Q(s_t, pi(s_t)) / sum_t p_t, where p_t is the share that goes on."""
        q = self.critics.q
        generator = torch.Generator().manual_seed(self.generator.initial_seed())
        rows = initial_rows(self.transitions.episodes)
        observation = self.transitions.take(rows, 1)["observation"].to(policy.device)
        goes_on = torch.ones(len(observation), device=policy.device)
        total = torch.zeros_like(goes_on)
        weight = torch.zeros_like(goes_on)
        for _ in range(self.config.horizon):
            actions = policy.act(observation, deterministic=True).actions
            total += goes_on * q.values(observation, q.scaled(actions)).mean(0)
            weight += goes_on
            observation, _, terminated = self.dynamics.step(observation, actions, generator)
            goes_on = goes_on * (1.0 - terminated)
        return Estimate(total / weight * self.transitions.scale)


class OffPolicyEvaluation(Composite):
    """Estimates of policies on the same episodes, by the same draws of `generator`."""

    def __init__(
        self, kind: Estimator, config: OffPolicyEvaluationConfig, dynamics: DynamicsConfig, generator: torch.Generator
    ) -> None:
        self.kind = kind
        self.config = config
        self.dynamics = dynamics
        self.generator = generator
        self.fitted: FittedQ | ModelRollouts | None = None

    def estimates(self, policies: Sequence[TrainablePolicy], episodes: Episodes) -> list[Estimate]:
        """Estimates of `policies`, of which the first is the one that the others may replace.

        Raises:
            UserError: for episodes with unknown rewards, see `recorded_transitions`.
        """
        transitions = recorded_transitions(policies[0], episodes, self.config.discount)
        if self.kind is Estimator.AM_Q:
            model = ModelRollouts(policies[0], transitions, self.config, self.dynamics, self.generator)
            self.fitted = model
            model.fit()
            results = [model.estimate(policy) for policy in policies]
        else:
            results = [self._fitted(policy, transitions) for policy in policies]
        self.fitted = None
        seeding.child(self.generator)  # the next estimates have other draws
        return results

    def _fitted(self, policy: TrainablePolicy, transitions: Transitions) -> Estimate:
        state = self.generator.get_state()
        self.fitted = FittedQ(policy, transitions, self.config, self.generator)
        self.generator.set_state(state)
        self.fitted.fit()
        return self.fitted.estimate()


def with_own_critic(policy: TrainablePolicy) -> TrainablePolicy:
    """Copy of `policy` with a critic of its own, whose encoder learns with critics, on the same weights of the actor.

    A second copy of a large actor would take as much memory again.
    """
    own = set(policy.critic_parameters())
    return copy.deepcopy(policy, {id(each): each for each in policy.parameters() if each not in own})


def with_weights(policy: TrainablePolicy, weights: dict[str, Any]) -> TrainablePolicy:
    """Policy like `policy` with these `weights`, not copied, in which it may act, but not learn."""
    tensors = [*policy.parameters(), *policy.buffers()]
    other = copy.deepcopy(policy, {id(each): each for each in tensors})
    other.load_state_dict(weights, assign=True)
    return other


def initial_rows(episodes: Episodes) -> Tensor:
    """Rows of the first observation of each episode, [E]."""
    begins = torch.cat((torch.zeros(1, dtype=episodes.ends.dtype), episodes.ends[:-1]))
    return torch.searchsorted(episodes.first, begins)
