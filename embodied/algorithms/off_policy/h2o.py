"""H2O (arXiv 2206.13464): SAC on a log of the real system and an imperfect simulator, which counts where it is right.

The log is in place of demonstrations, failures included. Two discriminators estimate for each simulated transition how
much likelier it is in the simulator than in reality; such transitions count less in targets, and values are lowered
where they occur.

Differs from the paper:
    - a chunk is one action: its discounted reward, discount^k for what follows after k executed actions;
    - discriminators read the critics' features and the change of these, in deviations of a batch: the change in one
    step of control is smaller than the noise that the paper adds to next states;
    - the gap of a simulated transition is that at its own next state, not the mean over ten states around it;
    - transitions that end an episode have no known next state everywhere, and count fully;
    - losses are means over the whole batch, not sums of two means.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from embodied.algorithms.critics import CriticConfig, Critics
from embodied.algorithms.finite import check_finite
from embodied.algorithms.off_policy.action_values import ActionValues
from embodied.algorithms.off_policy.sac import SAC, SACConfig
from embodied.algorithms.parts import Composite
from embodied.algorithms.passes import Passes
from embodied.configuration import Fraction, NonNegativeFloat
from embodied.data.episodes import Episodes
from embodied.environment import Environment
from embodied.errors import UserError
from embodied.policy import Reparameterised, TrainablePolicy

MIN_WEIGHT = 1e-5
GAP_RANGE = 1e-6, 10.0
"""Bounds of a dynamics gap in the penalty: where the simulator is right, values are hardly lowered."""


@dataclass
class H2OConfig(SACConfig):
    """SACConfig with a log of the real system as `demonstration_share` of each batch.

    `conservatism` is the weight of the penalty that lowers simulated values, discriminators have the layers `hidden`,
    `discriminator_learning_rate`, and normal noise of deviation `discriminator_noise` on their inputs in training.
    With `keep_interventions` a person's actions in the simulator are drawn with the log, and count as simulated.
    """

    demonstration_share: Fraction = 0.5
    keep_interventions: bool = False
    entropy_in_target: bool = False
    conservatism: NonNegativeFloat = 0.01
    discriminator_learning_rate: NonNegativeFloat = 3e-4
    discriminator_noise: NonNegativeFloat = 0.1

    without_demonstrations: ClassVar[str] = "algorithm=sac"

    def __post_init__(self) -> None:
        """Raise UserError for numbers that are out of range, or leave out the log or the simulator."""
        super().__post_init__()
        share = self.demonstration_share
        if not 0 < round(self.minibatch * share) < self.minibatch:
            raise UserError(
                f"algorithm=h2o learns from a log and a simulator, got a demonstration_share of {share:g}; use a larger"
                " minibatch or a share nearer 0.5, or algorithm=sac without a log"
            )
        if self.lookahead != 1:
            raise UserError(
                f"algorithm=h2o compares single transitions, got lookahead={self.lookahead}; use lookahead=1"
            )

    def build(
        self,
        policy: TrainablePolicy,
        demonstrations: Episodes | None,
        env: Environment,
        generator: torch.Generator,
    ) -> H2O:
        """Build the learner of `policy`; `generator` draws minibatches and noise.

        Raises:
            UserError: for a policy without reparameterised samples, actions without limits, and a log that is missing
                or lacks rewards or observations.
        """
        if not isinstance(policy, Reparameterised):
            raise UserError("expected a policy with reparameterised samples for algorithm=h2o; use policy=squashed")
        return H2O(policy, self, generator, demonstrations, policy)


class DynamicsGap(Composite):
    """Discriminators of logged and simulated transitions: of (s, a), and of (s, a, s')."""

    def __init__(self, q: ActionValues, config: H2OConfig) -> None:
        self.q = q
        self.noise = config.discriminator_noise
        one = CriticConfig(hidden=config.hidden, ensemble=1, activation=config.activation)
        features = q.policy.feature_size
        size = features + q.executed * q.elements
        self.of_actions, self.of_transitions = (
            Critics(inputs, one).to(q.policy.device) for inputs in (size, size + features)
        )
        parameters = [*self.of_actions.parameters(), *self.of_transitions.parameters()]
        self.optimiser = torch.optim.Adam(parameters, config.discriminator_learning_rate, fused=True)

    @torch.no_grad()
    def inputs(self, batch: TensorDict) -> Tensor:
        """Features, actions and scaled changes of the features, [B, 2 features + K * A]."""
        before, after = (self.q.policy.features(batch[name]) for name in ("observation", "next_observation"))
        change = after - before
        change = change / change.std(0).clamp_min(1e-6)
        return torch.cat((before, self.q.scaled(batch["actions"]).flatten(1), change), -1)

    def logits(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [B] of p(real | s, a) and of p(real | s, a, s')."""
        size = inputs.shape[1] - self.q.policy.feature_size
        return self.of_actions.values(inputs[:, :size])[0], self.of_transitions.values(inputs)[0]

    @torch.no_grad()
    def gap(self, inputs: Tensor) -> Tensor:
        """Dynamics gap log p_sim(s'|s, a) - log p_real(s'|s, a), [B]."""
        of_actions, of_transitions = self.logits(inputs)
        # p(s'|s, a, real) / p(s'|s, a, sim) = p(real|s, a, s') p(sim|s, a) / (p(sim|s, a, s') p(real|s, a))
        return of_actions - of_transitions

    def step(self, inputs: Tensor, is_real: Tensor, goes_on: Tensor, generator: torch.Generator, step: int) -> Tensor:
        """Take gradient step number `step` on the rows that go on, of which `is_real` are logged; returns the loss.

        Both are masks [B].

        Raises:
            DivergedError: before a step whose loss is not finite.
        """
        noise = torch.randn(inputs.shape, generator=generator).to(inputs.device)
        target = is_real.to(inputs.dtype)
        # L = -mean (log p(is_real | s, a) + log p(is_real | s, a, s'))
        losses = [
            nn.functional.binary_cross_entropy_with_logits(logits, target, goes_on.to(inputs.dtype))
            for logits in self.logits(inputs + self.noise * noise)
        ]
        loss = losses[0] + losses[1]
        check_finite({"loss of the discriminators": loss.detach()}, step)
        self.optimiser.zero_grad()
        loss.backward()
        self.optimiser.step()
        return loss.detach()

    def state_dict(self) -> dict[str, Any]:
        """Weights, and the optimiser's state."""
        return {name: getattr(self, name).state_dict() for name in _PARTS}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        for name in _PARTS:
            getattr(self, name).load_state_dict(state[name])


_PARTS = ("of_actions", "of_transitions", "optimiser")


class H2O(SAC):
    """SAC with critics that trust simulated transitions as far as the discriminators do."""

    config: H2OConfig

    def __init__(
        self,
        policy: Reparameterised,
        config: H2OConfig,
        generator: torch.Generator,
        demonstrations: Episodes | None,
        actor: Reparameterised,
    ) -> None:
        super().__init__(policy, config, generator, demonstrations, actor)
        self.dynamics = DynamicsGap(self.q, config)

    def _batch(self) -> TensorDict:
        """Transitions, of which those that are logged, `is_real` [B], are the last."""
        own, logged = self.replay.draw(self.config.minibatch, self.generator)
        batch = self.replay.transitions((own, logged), self.config.lookahead, self.config.discount)
        return batch.set("is_real", torch.arange(len(batch), device=self.policy.device) >= len(own))

    def _update_critics(self, batch: TensorDict) -> dict[str, Tensor]:
        is_real = batch["is_real"]
        simulated = len(batch) - int(is_real.sum())
        inputs = self.dynamics.inputs(batch)
        goes_on = batch["carry"] > 0.0
        loss = self.dynamics.step(inputs, is_real, goes_on, self.generator, self.gradient_steps)
        gap = torch.where(goes_on, self.dynamics.gap(inputs), 0.0)
        # w = p_real(s'|s, a) / p_sim(s'|s, a) of simulated rows, 1 of logged ones
        weight = torch.where(is_real, 1.0, (-gap).exp().clamp(MIN_WEIGHT, 1.0))
        # L = sum_j mean w (Q_j(s, a) - y)^2 + conservatism * penalty
        penalty = self.config.conservatism * self._penalty(batch, gap, simulated)
        metrics = self.q.step(batch, self._target(batch), self.gradient_steps, penalty, weight)
        own = weight[:simulated].mean()
        return metrics | {"discriminator_loss": loss, "simulator_weight": own}

    def _penalty(self, batch: TensorDict, gap: Tensor, simulated: int) -> Tensor:
        """Sum over the critics of log sum_sim omega exp Q(s, a) - mean_real Q(s, a)."""
        values = self.q.values(batch["observation"], self.q.scaled(batch["actions"]))
        # omega = u / sum u, u = min(max(gap, 0), 10)
        omega = gap[:simulated].clamp(*GAP_RANGE)
        log_omega = (omega / omega.sum()).log()
        return ((values[:, :simulated] + log_omega).logsumexp(-1) - values[:, simulated:].mean(-1)).sum()

    def largest_pass(self, passes: Passes) -> int | None:
        """Bytes of the largest pass: that of SAC, or that of the critics, which loss and penalty store once each."""
        return max(super().largest_pass(passes) or 0, 2 * self.q.stored_bytes(passes, self.config.minibatch))

    def state_dict(self) -> dict[str, Any]:
        """State of SAC, and the discriminators."""
        return {**super().state_dict(), "dynamics": self.dynamics.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        super().load_state_dict(state)
        self.dynamics.load_state_dict(state["dynamics"])
