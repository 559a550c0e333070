"""Exploration by chunks that were decided for other environments.

Letter: N environments.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from tensordict import TensorDict

from embodied.environment import Environment
from embodied.policy import Decision, Policy
from embodied.rollout.rollout import Collector
from embodied.rollout.starts import Starts


class ExchangingCollector(Collector):
    """Executes in a share `exchange` of decisions a chunk that was decided for another environment.

    Who imitates successes alone never learns to leave a state from which the policy always fails, as when a hand has
    closed around nothing; another environment's chunk leads out of it by chance. Log-probabilities of chunks that were
    exchanged are not theirs: for algorithms that do not read them.
    """

    def __init__(
        self,
        env: Environment,
        policy: Policy,
        generator: torch.Generator,
        starts: Starts | None = None,
        exchange: float = 0.0,
    ) -> None:
        super().__init__(env, policy, generator, starts)
        self.exchange = exchange

    def _act(self, observation: TensorDict) -> Decision:
        decision = super()._act(observation)
        if not self.exchange:
            return decision
        count, device = self.env.num_envs, self.generator.device
        exchanged = torch.rand(count, generator=self.generator, device=device) < self.exchange
        drawn = torch.randperm(count, generator=self.generator, device=device)
        whose = torch.where(exchanged, drawn, torch.arange(count, device=device)).to(decision.actions.device)
        return replace(decision, actions=decision.actions[whose], sample=decision.sample[whose])
