"""Hand-over from a frozen policy to the residual that corrects it, inside episodes and over training.

The base acts alone in the first decisions of an episode, then the residual takes over in the states that the base
reaches (Probe, Learn, Distill, arXiv 2511.00091). Over training the residual acts in a growing share of decisions
(policy decorator, arXiv 2412.13630).

Letters: N environments, K executed actions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.environment import Environment
from embodied.policy import BASE, Decision, Policy
from embodied.rollout.rollout import Collector
from embodied.rollout.starts import Starts


class HandOverCollector(Collector):
    """Collector in which the base of a policy with a residual acts alone in some decisions, which are stored as such.

    They are the first n of an episode, n uniform from 0 to `base_decisions_high`, and a share of the others that falls
    from 1 to 0 over the first `progressive_steps` control steps of this collector, drawn for each decision. Both do
    nothing where they are 0, and when the policy acts without a residual.
    """

    def __init__(
        self,
        env: Environment,
        policy: Policy,
        generator: torch.Generator,
        starts: Starts | None = None,
        base_decisions_high: int = 0,
        progressive_steps: int = 0,
    ) -> None:
        self.base_decisions_high = base_decisions_high
        self.progressive_steps = progressive_steps
        self.control_steps = 0
        super().__init__(env, policy, generator, starts)

    def abandon(self) -> None:
        """See `Collector.abandon`."""
        super().abandon()
        self.base_decisions = torch.zeros_like(self.finished, dtype=torch.int64)
        """Decisions [N] of the running episodes that are still the base's."""

    def _restart(self, due: Tensor, ended: bool) -> TensorDict:
        begins = self.observation is None or ended
        observation = super()._restart(due, ended)
        if begins and self.base_decisions_high:
            device = self.generator.device
            limits = 0, self.base_decisions_high + 1
            drawn = torch.randint(*limits, (self.env.num_envs,), generator=self.generator, device=device)
            self.base_decisions = torch.where(due, drawn.to(due.device), self.base_decisions)
        return observation

    def _act(self, observation: TensorDict) -> Decision:
        decision = super()._act(observation)
        base = decision.sample.get(BASE, None)
        if base is None or not (self.base_decisions_high or self.progressive_steps):
            return decision
        alone = self.base_decisions > 0
        self.base_decisions = (self.base_decisions - 1).clamp_min(0)
        if self.progressive_steps:
            # P(residual) = min(t / progressive_steps, 1)
            share = min(1.0, self.control_steps / self.progressive_steps)
            drawn = torch.rand(len(alone), generator=self.generator, device=self.generator.device)
            alone = alone | (drawn.to(alone.device) >= share)
            self.control_steps += base.shape[0] * base.shape[1]
        executed = decision.actions[:, : base.shape[1]]
        corrected = torch.where(alone[:, None, None], base, executed)
        return replace(decision, actions=torch.cat((corrected, decision.actions[:, base.shape[1] :]), 1))

    def state_dict(self) -> dict[str, Any]:
        """See `Collector.state_dict`, with the decisions of the base that are left."""
        own = {"base_decisions": self.base_decisions, "control_steps": self.control_steps}
        return super().state_dict() | own

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        super().load_state_dict(state)
        if "env" in state and "base_decisions" in state:  # else the episodes begin again, or there was no hand-over
            self.base_decisions = state["base_decisions"].to(self.env.device)
        self.control_steps = state.get("control_steps", 0)
