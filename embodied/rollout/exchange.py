"""Exploration by chunks that were decided for other environments.

Letter: N environments.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from tensordict import TensorDict

from embodied.environment import Environment
from embodied.policy import Decision, Policy
from embodied.rollout.hand_over import HandOverCollector
from embodied.rollout.starts import Starts


class ExchangingCollector(HandOverCollector):
    """Collector that executes in a share `exchange` of decisions a chunk that was decided for another environment.

    Imitating successes alone never teaches the policy to leave states in which it always fails, as when a hand has
    closed around nothing; another environment's chunk leads out of them by chance. A decision keeps the
    log-probability of the chunk that was not executed: for algorithms that do not read it.
    """

    def __init__(
        self,
        env: Environment,
        policy: Policy,
        generator: torch.Generator,
        starts: Starts | None = None,
        exchange: float = 0.0,
        base_decisions_high: int = 0,
    ) -> None:
        super().__init__(env, policy, generator, starts, base_decisions_high)
        self.exchange = exchange

    def _act(self, observation: TensorDict) -> Decision:
        decision = super()._act(observation)
        if not self.exchange:
            return decision
        count = self.env.num_envs
        device = self.generator.device
        exchanged = torch.rand(count, generator=self.generator, device=device) < self.exchange
        permutation = torch.randperm(count, generator=self.generator, device=device)
        source_env = torch.where(exchanged, permutation, torch.arange(count, device=device)).to(decision.actions.device)
        return replace(decision, actions=decision.actions[source_env], sample=decision.sample[source_env])
