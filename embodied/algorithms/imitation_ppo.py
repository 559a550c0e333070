"""Self-imitation first, then PPO: the one is fast where successes are few, the other goes on where it flattens.

A new network that learns from the first few hundred successes gains more than policy gradients do on as many episodes;
from then on imitating itself adds little, since success alone does not tell good chunks from bad ones, and PPO's
advantages do. Both try failed starts again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDict

from embodied.algorithms.ppo import PPO, PPOConfig
from embodied.algorithms.self_imitation import SelfImitation, SelfImitationConfig
from embodied.environment import StartEnvironment
from embodied.policy import TrainablePolicy
from embodied.rollout import Rollout


@dataclass
class ImitationPPOConfig:
    """The share `imitation` of a run's environment steps goes to `self_imitation`, the rest to `ppo`."""

    imitation: float = 0.1
    self_imitation: SelfImitationConfig = field(default_factory=lambda: SelfImitationConfig(rounds=1))
    ppo: PPOConfig = field(default_factory=PPOConfig)

    def __post_init__(self) -> None:
        """Raise ValueError for sizes that do not fit together."""
        if not 0.0 < self.imitation < 1.0:
            raise ValueError(f"expected imitation between 0 and 1, got {self.imitation}; use algorithm=ppo for 0")
        if self.self_imitation.decisions != self.ppo.decisions:
            raise ValueError(
                f"expected as many decisions of both learners, got self_imitation.decisions="
                f"{self.self_imitation.decisions} and ppo.decisions={self.ppo.decisions}"
            )

    @property
    def decisions(self) -> int:
        """Chunks per environment and iteration."""
        return self.ppo.decisions

    def build(
        self, policy: TrainablePolicy, demonstrations: TensorDict, env: StartEnvironment, generator: torch.Generator
    ) -> ImitationPPO:
        """Make the learner of `policy` in `env`, beside `demonstrations` [D] chunks; `generator` draws minibatches."""
        first = self.self_imitation.build(policy, demonstrations, env, generator)
        return ImitationPPO(self.imitation, first, self.ppo.build(policy, demonstrations, env, generator))


class ImitationPPO:
    """Updates a policy by self-imitation until `share` of the run is done, then by PPO."""

    def __init__(self, share: float, first: SelfImitation, second: PPO) -> None:
        self.share, self.first, self.second = share, first, second
        self.starts = first.starts
        self.imitating = True

    @property
    def gradient_steps(self) -> int:
        """Gradient steps taken so far."""
        return self.first.gradient_steps + self.second.gradient_steps

    def update(self, rollout: Rollout, progress: float) -> dict[str, float]:
        """One update by the learner whose turn it is; returns its metrics."""
        if self.imitating:
            part = min(1.0, progress / self.share)
            self.imitating = part < 1.0
            return self.first.update(rollout, part)
        metrics = self.second.update(rollout, progress)
        return metrics | {"first_attempts_success": self.starts.first_attempts_success()}

    def state_dict(self) -> dict[str, Any]:
        """Both learners and whose turn it is; of self-imitation only the starts, once it is over."""
        first = self.first.state_dict() if self.imitating else {"starts": self.starts.state_dict()}
        steps = self.first.gradient_steps
        return {"imitating": self.imitating, "first": first, "first_steps": steps, "second": self.second.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.imitating = state["imitating"]
        if self.imitating:
            self.first.load_state_dict(state["first"])
        else:
            self.starts.load_state_dict(state["first"]["starts"])
        self.first.gradient_steps = state["first_steps"]
        self.second.load_state_dict(state["second"])
