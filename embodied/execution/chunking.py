"""Transitions from the running action chunk to the next one when inference takes time.

A chunk from an observation at time t has actions for t, t + dt, ... While it is computed the robot continues the
previous chunk, so that its first actions are already past when it arrives: they are `frozen`. Letters: N observations,
H actions of a chunk, A action dimension.

Sources: real-time chunking (arXiv 2506.07339): frozen prefix, soft mask and guidance; with a delay in training (arXiv
2512.05964).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, runtime_checkable

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.contract import ACTION_PREFIX
from embodied.errors import UserError
from embodied.policy import Decision, Policy

EARLY = 0.25
"""Tolerance of early ticks, as a share of a control step."""


class Execution(Enum):
    """Strategy of a robot for chunks that arrive late.

    INPAINT: the new chunk is generated as a continuation of the running one, see `InpaintingPolicy`. BLEND: the two are
    mixed linearly where they overlap, for policies that cannot inpaint. NAIVE: the new chunk begins with its first
    action when it arrives. SYNCHRONOUS: the robot holds from the observation until its chunk arrives. DELAYED: the
    chunk begins as many control steps after its observation as in training, `Contract.delay`, and the policy reads the
    actions that run until then; for policies that were trained so, and for no others.
    """

    INPAINT = "inpaint"
    BLEND = "blend"
    NAIVE = "naive"
    SYNCHRONOUS = "synchronous"
    DELAYED = "delayed"

    @classmethod
    def _missing_(cls, value: object) -> Execution:
        raise UserError(f"unknown execution {value!r}; expected one of {', '.join(each.value for each in cls)}")

    @property
    def aligned(self) -> bool:
        """Whether action i of a chunk runs i control steps after its observation."""
        return self in (Execution.INPAINT, Execution.BLEND, Execution.DELAYED)


@dataclass(frozen=True)
class Running:
    """Running chunk on the time axis of a new observation: action i is for i control steps after it.

    The first `overlap` actions are known, the others are padding; the first `frozen` of them will have run when the new
    chunk arrives.
    """

    actions: Tensor  # [N, H, A]
    frozen: Tensor  # [N] int
    overlap: Tensor  # [N] int, at least `frozen`

    def keeps(self) -> Tensor:
        """Mask of the actions that a new chunk repeats from this one, [N, H] bool."""
        return _index(self.actions) < self.frozen.unsqueeze(1)

    def prefix(self, steps: int) -> Tensor:
        """First `steps` actions, [N, steps, A]; commands of zero, with which a robot holds, where none are known."""
        is_running = _index(self.actions) < self.overlap.unsqueeze(1)
        return torch.where(is_running.unsqueeze(-1), self.actions, 0.0)[:, :steps]

    def soft_mask(self) -> Tensor:
        """Weight with which a new chunk is guided towards this one, [N, H].

        1 where frozen, then c (e^c - 1) / (e - 1) with c falling linearly to 0 where the overlap ends
        (arXiv 2506.07339, equation 5).
        """
        falling = 1.0 - self._progress()
        # c (e^c - 1) / (e - 1)
        soft = falling * torch.expm1(falling) / math.expm1(1.0)
        return torch.where(self.keeps(), 1.0, soft)

    def blended(self, actions: Tensor) -> Tensor:
        """Blend from this chunk, where frozen, linearly to `actions` [N, H, A] until the overlap ends."""
        share = torch.where(self.keeps(), 0.0, self._progress()).unsqueeze(-1)
        return torch.where(share == 0.0, self.actions, torch.lerp(self.actions, actions, share))

    def _progress(self) -> Tensor:
        """Progress of the n overlapping, not frozen actions: i / (n + 1) at the i-th, and 1 after the last."""
        first = self.frozen.unsqueeze(1)
        length = (self.overlap - self.frozen + 1).unsqueeze(1)
        return ((_index(self.actions) - first + 1) / length).clamp(0.0, 1.0)


@runtime_checkable
class InpaintingPolicy(Policy, Protocol):
    """A policy that can generate chunks as the continuation of the running ones."""

    def inpaint(
        self,
        observation: TensorDict,
        running: Running,
        *,
        deterministic: bool = False,
        generator: torch.Generator | None = None,
    ) -> Decision:
        """Act like `act`, guided to `running`; the chunk begins with its frozen actions, its log_prob is NaN."""
        ...


def check_execution(policy: Policy, execution: Execution) -> None:
    """Raise UserError if `policy` does not support `execution`."""
    delay = policy.contract.delay
    if delay and execution is not Execution.DELAYED:
        raise UserError(f"the policy was trained with delay={delay}; use execution=delayed")
    if execution is Execution.DELAYED and not delay:
        raise UserError("execution=delayed runs policies that were trained with delay=D; use blend")
    if execution is Execution.INPAINT and not isinstance(policy, InpaintingPolicy):
        raise UserError(f"{type(policy).__name__} cannot inpaint; use execution=blend")


def follow(
    policy: Policy,
    observation: TensorDict,
    running: Running,
    execution: Execution,
    *,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
) -> Decision:
    """Compute the next chunks for observations [N]; with INPAINT and BLEND they begin with the frozen actions.

    With DELAYED there are also the d actions before a chunk, [N, d + H, A].
    """
    if execution is Execution.INPAINT:
        assert isinstance(policy, InpaintingPolicy)
        return policy.inpaint(observation, running, deterministic=deterministic, generator=generator)
    if execution is Execution.DELAYED:
        prefix = running.prefix(policy.contract.delay)
        observation = observation.copy().update({ACTION_PREFIX: prefix})
        decision = policy.act(observation, deterministic=deterministic, generator=generator)
        decision.actions = torch.cat((prefix, decision.actions), 1)
        return decision
    decision = policy.act(observation, deterministic=deterministic, generator=generator)
    if execution is Execution.BLEND:
        decision.actions = running.blended(decision.actions)
    return decision


def shifted(actions: Tensor, steps: int) -> Tensor:
    """Chunks [N, H, A] without their first `steps` actions, padded with the last action."""
    last = actions[:, -1:].expand(-1, min(steps, actions.shape[1]), -1)
    return torch.cat((actions[:, steps:], last), 1)


def steps_within(duration_s: float, control_dt_s: float) -> int:
    """Number of whole control steps within `duration_s`, where ticks may come early by `EARLY`."""
    return math.floor(duration_s / control_dt_s + EARLY)


def steps_until(duration_s: float, control_dt_s: float) -> int:
    """Number of control steps after which `duration_s` has passed."""
    return max(0, math.ceil(duration_s / control_dt_s - 1e-6))


def _index(actions: Tensor) -> Tensor:
    return torch.arange(actions.shape[1], device=actions.device)
