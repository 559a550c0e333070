"""RECAP, a policy conditioned on advantages (pi*0.6, arXiv 2511.14759): offline, from all episodes, good and bad.

A value function learns the returns, actions with a large advantage are labelled positive and others negative, and the
policy imitates all of them under the condition of their label. It acts under the condition positive, with
classifier-free guidance (arXiv 2505.23458).

Differs from the paper:
    - of small policies the condition is a learned vector that is added to the features of the observation; the prompts
      of pi0 and pi0.5 have the paper's text (`policies/vla/conditioning.py`);
    - the value function reads the policy's features for critics. It is an ensemble, each network of which learns
      without one part of the episodes and values these alone: no label depends on a value that has learned its return;
    - the rewards are those of the data, in place of one for each step and for failure; values of each task are scaled
      by the range of its returns;
    - one round on the episodes of the run. Further rounds start from its weights with episodes of its policy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from torch import Tensor

from embodied.algorithms.critics import CriticConfig, Critics
from embodied.algorithms.finite import check_finite
from embodied.algorithms.imitation.sft import SFT, SFTConfig
from embodied.algorithms.micro_batch import saved_bytes
from embodied.algorithms.off_policy.replay import recorded_transitions
from embodied.algorithms.passes import Passes
from embodied.configuration import Fraction, NonNegativeFloat, PositiveInt, Range
from embodied.data.episodes import Episodes
from embodied.data.transitions import Transitions
from embodied.errors import UserError
from embodied.networks.value_head import CriticHead
from embodied.policy import CONDITION, Condition, TrainablePolicy
from embodied.world import ALONE, World


@dataclass
class RECAPConfig(SFTConfig):
    """Hyper-parameters of RECAP; options of the policy's optimiser are those of SFT.

    The first `value_share` of the `steps` train `folds` networks with layers `hidden`, whose values are distributions
    over `bins`. The advantage of an action looks `lookahead` control steps ahead; the `positive_share` of each task's
    actions with the largest is positive, and with `human_positive` all actions of a person. The policy learns a share
    `dropout` of them without their label.
    """

    value_share: Annotated[float, Range(above=0, below=1)] = 0.25
    value_learning_rate: NonNegativeFloat = 3e-3
    hidden: list[PositiveInt] = field(default_factory=lambda: [256, 256])
    folds: Annotated[int, Range(at_least=2)] = 5
    bins: Annotated[int, Range(at_least=2)] = 201
    discount: Fraction = 0.99
    lookahead: PositiveInt = 10
    positive_share: Annotated[float, Range(above=0, below=1)] = 0.3
    human_positive: bool = True
    dropout: Fraction = 0.1

    def build(self, policy: TrainablePolicy, generator: torch.Generator) -> RECAP:
        """Build the learner of `policy`; `generator` draws minibatches.

        Raises:
            UserError: for a policy without a condition.
        """
        if not policy.conditioned:
            raise UserError(
                "offline=recap needs a policy that reads a condition; "
                "use policy=flow, diffusion, pi0, pi05, smolvla or groot"
                " with policy.advantage_guidance=1.5"
            )
        return RECAP(policy, self, generator)


class RECAP(SFT):
    """Learner of values from stored episodes, then of a policy under the condition of its actions' advantages."""

    config: RECAPConfig

    def __init__(self, policy: TrainablePolicy, config: RECAPConfig, generator: torch.Generator) -> None:
        super().__init__(policy, config, generator)
        critics = CriticConfig(
            hidden=config.hidden,
            ensemble=config.folds,
            layer_norm=True,
            head=CriticHead.HL_GAUSS,
            bins=config.bins,
            value_low=-1.0,
            value_high=0.0,
        )
        self.v = Critics(policy.feature_size, critics).to(policy.device)
        weights = [*self.v.parameters(), *policy.critic_parameters()]
        self.v_optimiser = torch.optim.Adam(weights, config.value_learning_rate, fused=True)
        self.value_loss = self.held_out_value_loss = 0.0
        self.begins = self.value_steps
        self.transitions: Transitions | None = None
        self.conditions: Tensor | None = None  # [R] of the observations, once the values are learned

    @property
    def value_steps(self) -> int:
        """Gradient steps of the value function, which come first."""
        return round(self.config.value_share * self.config.steps)

    def fit(self, episodes: Episodes, steps: int, world: World = ALONE) -> dict[str, float]:
        """Take `steps` gradient steps on `episodes`, which the processes of `world` share; returns the last metrics.

        Raises:
            UserError: for fewer episodes than folds, and episodes with unknown rewards, see `recorded_transitions`.
        """
        transitions = recorded_transitions(self.policy, episodes, self.config.discount, self.transitions)
        if transitions is not self.transitions:
            self._read(transitions)
        for _ in range(steps):
            rows = transitions.draw(self.config.batch, self.generator, world)
            if self.gradient_steps < self.value_steps:
                self._learn_values(rows)
            else:
                self._learn_policy(rows, world)
        metrics = {"value_loss": self.value_loss, "held_out_value_loss": self.held_out_value_loss}
        if self.conditions is not None:
            positive = self.conditions == Condition.POSITIVE
            metrics |= {"positive_share": float(positive.float().mean())}
            metrics |= {"actor_loss": sum(self.losses) / max(1, len(self.losses))}
        return metrics

    def _read(self, transitions: Transitions) -> None:
        """Scale the returns of `transitions` to [-1, 0] in each task, and divide their episodes into folds."""
        episodes = transitions.episodes
        count = len(episodes.ends)
        folds = self.config.folds
        if count < folds:
            raise UserError(f"expected at least offline.folds={folds} episodes, got {count}; use fewer folds")
        if self.transitions is not None:  # other episodes than before
            self.conditions = None
        self.transitions = transitions
        order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
        self.fold = (order.argsort() % folds)[episodes.episode]
        self.task = episodes.task_index[episodes.episode]
        returns = transitions.returns
        self.target = torch.zeros_like(returns)
        for task in self.task.unique():
            rows = self.task == task
            high = returns[rows].max()
            spread = high - returns[rows].min()
            # y = (G - max G) / (max G - min G), in [-1, 0]
            self.target[rows] = (returns[rows] - high) / (spread if spread > 0.0 else 1.0)

    def _learn_values(self, rows: Tensor) -> None:
        """Take one step of the value function on the observations `rows`.

        Raises:
            DivergedError: before a step whose loss is not finite.
        """
        assert self.transitions is not None
        device = self.policy.device
        observation = self.transitions.episodes.chunks(rows, 1)["observation"].to(device)
        target = self.target[rows].to(device)
        # [F, B], networks that learn an observation's return: not that of its fold
        learns = self.fold[rows].to(device) != torch.arange(self.config.folds, device=device).unsqueeze(1)
        errors = self.v.config.errors(self.v(self.policy.features(observation)), target)
        # L = sum over the networks of the mean error of the observations that each learns
        loss = (errors * learns).mean(-1).sum()
        held_out = (errors.detach() * ~learns).mean(-1).sum()
        step = self.gradient_steps + 1
        check_finite({"value loss": loss.detach()}, step)
        self.v_optimiser.zero_grad()
        loss.backward()
        self.v_optimiser.step()
        self.gradient_steps = step
        # means over the networks that have learned an observation, and over those that have not
        self.value_loss = float(loss.detach()) / (self.config.folds - 1)
        self.held_out_value_loss = float(held_out)

    def _learn_policy(self, rows: Tensor, world: World) -> None:
        """Take one step of the policy's supervised loss on chunks from the observations `rows`, with conditions."""
        assert self.transitions is not None
        if self.conditions is None:
            self.conditions = self._labels(self.transitions, world)
        for policy in (self.policy, self.trained):
            policy.start_conditioning()
        batch = self.transitions.episodes.chunks(rows, self.policy.contract.horizon)
        dropped = torch.rand(self.config.batch, generator=self.generator)[world.rank :: world.size]
        condition = self.conditions[rows].masked_fill(dropped < self.config.dropout, Condition.NONE)
        batch["observation"] = batch["observation"].copy().update({CONDITION: condition})
        steps = self.config.steps - self.value_steps
        progress = min(1.0, (self.gradient_steps - self.value_steps) / max(1, steps))
        self.losses.append(self.step(batch, progress, world))

    def _labels(self, transitions: Transitions, world: World = ALONE) -> Tensor:
        """Condition of the action after each observation, [R]."""
        episodes = transitions.episodes
        advantage = self._advantages(transitions, world)
        positive = torch.zeros_like(advantage, dtype=torch.bool)
        for task in self.task.unique():
            rows = self.task == task
            # the largest share of each task, as easy tasks would otherwise have all positive ones
            ascending = advantage[rows].sort().values
            positive[rows] = advantage[rows] >= ascending[int((1.0 - self.config.positive_share) * len(ascending))]
        if self.config.human_positive:
            positive |= episodes.human[episodes.first]
        return torch.where(positive, Condition.POSITIVE, Condition.NEGATIVE)

    def _advantages(self, transitions: Transitions, world: World = ALONE) -> Tensor:
        """Advantage of the actions after each observation, in ranges of the task's returns, [R]."""
        episodes = transitions.episodes
        error = self.target - self._values(episodes, world)
        # the first observation of the same episode at least `lookahead` control steps later
        later = torch.searchsorted(episodes.first, episodes.first + self.config.lookahead)
        exists = later < len(episodes)
        later = later.where(exists, 0)
        goes_on = exists & (episodes.episode[later] == episodes.episode)
        # a power only where the episode goes on: elsewhere its exponent may be negative, and the power infinite
        ahead = (episodes.first[later] - episodes.first).where(goes_on, 0)
        carry = goes_on * self.config.discount ** ahead.float()
        # A_t = R_{t:t+n} + gamma^n V_{t+n} - V_t = (y_t - V_t) - gamma^n (y_{t+n} - V_{t+n}), the last is 0 at the end
        return error - carry * error[later]

    @torch.no_grad()
    def _values(self, episodes: Episodes, world: World = ALONE) -> Tensor:
        """Value of each observation by the network that has not learned its episode, scaled as the returns, [R].

        Every process of `world` computes all of them, in pieces of its share of a minibatch, for which there is memory.
        """
        values = []
        for rows in torch.arange(len(episodes)).split(max(1, self.config.batch // world.size)):
            observation = episodes.chunks(rows, 1)["observation"].to(self.policy.device)
            each = self.v.values(self.policy.features(observation)).cpu()
            values.append(each.gather(0, self.fold[rows].unsqueeze(0)).squeeze(0))
        return torch.cat(values)

    def largest_pass(self, passes: Passes) -> int | None:
        """Bytes that the value function's minibatch stores, or the policy's if that is more."""
        rows = passes.share(self.config.batch)
        observation = passes.observation(rows)
        return max(saved_bytes(lambda: self.v(self.policy.features(observation))), passes.loss(rows))

    def state_dict(self) -> dict[str, Any]:
        """State of SFT, values, their optimiser and last losses, and the conditions, which features decided then."""
        return super().state_dict() | {
            "v": self.v.state_dict(),
            "v_optimiser": self.v_optimiser.state_dict(),
            "value_losses": [self.value_loss, self.held_out_value_loss],
            "conditions": self.conditions,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        super().load_state_dict(state)
        self.v.load_state_dict(state["v"])
        self.v_optimiser.load_state_dict(state["v_optimiser"])
        self.value_loss, self.held_out_value_loss = state["value_losses"]
        self.transitions = None
        self.conditions = state.get("conditions")  # None in states of earlier releases: it follows from the values
