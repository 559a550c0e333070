"""Memory of a recurrent policy between decisions: policies are stateless, and `Memory` stores and resets it.

A policy reads its memory as observation "memory" [N, M] and returns the next one as `sample["memory"]`. For a policy
without memory all of this does nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.policy import MEMORY, Decision, Policy

STARTED = "started"
"""Observation key, [N] bool: whether an episode begins with this decision."""


@runtime_checkable
class RecurrentPolicy(Policy, Protocol):
    """Policy with memory; a trainable one also scores sequences [T, N] through time."""

    def initial_memory(self, count: int) -> Tensor:
        """Memory [count, M] at the beginning of episodes."""
        ...


class Memory:
    """Memory of `policy` for `count` running episodes, on `device`, that of the observations."""

    def __init__(self, policy: Policy, count: int, device: torch.device | str = "cpu") -> None:
        self.device = device
        self.of(policy)
        self.values = torch.empty(count, 0)
        self.started = torch.ones(count, dtype=torch.bool, device=device)
        if self.policy:
            self.values = self._initial()

    def of(self, policy: Policy) -> None:
        """Store the memory of `policy` from now on."""
        self.policy = policy if isinstance(policy, RecurrentPolicy) else None

    def restart(self, mask: Tensor | None) -> None:
        """Reset the memory where `mask` [N] is True, of all episodes if None."""
        if self.policy:
            mask = torch.ones_like(self.started) if mask is None else mask.to(self.device)
            self.values = torch.where(mask.unsqueeze(1), self._initial(), self.values)
            self.started = self.started | mask

    def with_observation(self, observation: TensorDict) -> TensorDict:
        """Copy of `observation` [N] with "memory" and `STARTED` added."""
        if not self.policy:
            return observation
        return observation.copy().update({MEMORY: self.values, STARTED: self.started})

    def keep(self, decisions: Sequence[Decision], rows: Tensor | None = None) -> None:
        """Store the memory in `decisions`, whose first n rows are environments `rows` [n] (all if None)."""
        if self.policy:
            rows = torch.arange(len(self.values)) if rows is None else rows
            values = torch.cat([decision.sample[MEMORY] for decision in decisions])[: len(rows)]
            self.values = self.values.index_copy(0, rows.to(self.device), values.to(self.device))
            self.started = self.started.index_fill(0, rows.to(self.device), False)

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue; empty for a policy without memory."""
        return {"memory": self.values, "started": self.started} if self.policy else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`; other keys are ignored."""
        if self.policy:
            self.values, self.started = state["memory"].to(self.device), state["started"].to(self.device)

    def _initial(self) -> Tensor:
        assert self.policy is not None
        return self.policy.initial_memory(len(self.started)).detach().to(self.device)
