"""Interface of an environment at another computer, where an actor runs a copy of the policy."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.environment import SwitchableEnvironment
from embodied.evaluation.evaluation import EvaluationResult
from embodied.policy import TrainablePolicy
from embodied.rollout.rollout import Collector, RolloutSource


@runtime_checkable
class ActorEnvironment(SwitchableEnvironment, Protocol):
    """An Environment that only its actor resets and steps: this process orders, waits and learns."""

    def play(self, generator: torch.Generator) -> tuple[TensorDict, Tensor]:
        """Observations [B] and actions [B, K, A] of random play, see `first_decisions`."""
        ...

    def evaluate(self, policy: TrainablePolicy, episodes: int) -> EvaluationResult:
        """Outcomes of `episodes` of the deterministic policy."""
        ...

    def rollouts(self, policy: TrainablePolicy, collector: Collector, max_staleness: int) -> RolloutSource:
        """Source of rollouts of `policy`, in place of the `collector` of an algorithm that takes `max_staleness`."""
        ...
