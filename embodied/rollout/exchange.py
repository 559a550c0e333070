"""Exploration by chunks that were decided for other environments.

Letter: N environments.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.environment import Environment, NumberedStarts
from embodied.policy import Decision, Policy
from embodied.rollout.rollout import Collector
from embodied.rollout.starts import Starts


class ExchangingCollector(Collector):
    """Executes now and then another environment's chunk, the more often the longer an episode has lasted.

    Who imitates successes alone never learns to leave a state from which the policy always fails, as when a hand has
    closed around nothing; another environment's chunk leads out of it by chance. The probability is `exchange` times
    the squared share of the step limit that has passed, so that episodes which succeed soon are hardly disturbed.
    Log-probabilities of chunks that were exchanged are not theirs: for algorithms that do not read them.
    """

    def __init__(
        self, env: Environment, policy: Policy, generator: torch.Generator, starts: Starts | None = None,
        exchange: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(env, policy, generator, starts)
        self.exchange = exchange
        self.longest = env.step_limit if isinstance(env, NumberedStarts) else None

    def abandon(self) -> None:
        """As `Collector.abandon`."""
        super().abandon()
        self.decided = torch.zeros(self.env.num_envs, device=self.generator.device)  # in the running episodes

    def _restart(self, due: Tensor, ended: bool) -> TensorDict:
        self.decided = self.decided * ~due.to(self.decided.device)
        return super()._restart(due, ended)

    def _act(self, observation: TensorDict) -> Decision:
        decision = super()._act(observation)
        if not self.exchange or self.longest is None:
            return decision
        passed = self.decided * self.env.contract.executed / self.longest
        self.decided = self.decided + 1.0
        count, device = self.env.num_envs, self.generator.device
        exchanged = torch.rand(count, generator=self.generator, device=device) < self.exchange * passed.square()
        drawn = torch.randperm(count, generator=self.generator, device=device)
        whose = torch.where(exchanged, drawn, torch.arange(count, device=device)).to(decision.actions.device)
        return replace(decision, actions=decision.actions[whose], sample=decision.sample[whose])

    def state_dict(self) -> dict[str, Any]:
        """And how long the running episodes are."""
        return super().state_dict() | {"decided": self.decided}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As `Collector.load_state_dict`."""
        super().load_state_dict(state)
        if "env" in state:
            self.decided = state.get("decided", self.decided).to(self.decided.device)  # runs of before have none
