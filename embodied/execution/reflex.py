"""A reflex: at every control step a risk critic checks the next action of a running chunk.

The policy decides every K control steps. If the risk of the next action exceeds a threshold, the robot takes the safest
action between it and braking, the rest of the chunk is dropped, and the robot brakes until the next decision. The
reflex comes before analytic safety checks and replaces none: its actions are never farther from braking than the
requested ones. Source: chunked policies with a low-level recovery, as in Bresa; Recovery RL (arXiv
2010.15920), the risk critic. Letters: N observations, A action dimension, C candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.contract import Contract
from embodied.errors import UserError

SHARES = (0.0, 0.25, 0.5, 0.75)
"""Shares of the requested action in the candidates, from braking alone on: the first of equal risks is taken."""
VELOCITIES = {"m/s", "rad/s"}
"""Units of actions in which 0 is standing still."""


class Risk(Protocol):
    """Risk critic: probability of a failure within its horizon, NaN where it is unknown."""

    def __call__(self, observation: TensorDict, actions: Tensor) -> Tensor:
        """Risks [N] in [0, 1] of `actions` [N, A] in robot units."""
        ...


@dataclass(frozen=True)
class Reflex:
    """Decision rule of a reflex for actions of `contract`.

    `brake` [A] is the action at which the robot stops, None for elements that keep the requested value, such as those
    of a gripper.
    """

    risk: Risk
    contract: Contract
    threshold: float
    brake: tuple[float | None, ...]

    def check(self, observation: TensorDict, action: Tensor, cut: Tensor) -> tuple[Tensor, Tensor]:
        """Actions [N, A] in place of `action` [N, A], and the mask [N] of chunks that are cut.

        Robots brake in chunks that were `cut` [N] before. A risk that is not a number exceeds every threshold: then the
        robot brakes, whatever the risk of other actions.
        """
        with torch.no_grad():
            risk = self.risk(observation, action)
            # not (NaN <= threshold)
            replaced = cut | ~(risk <= self.threshold)
            if not bool(replaced.any()):
                return action, cut
            brakes = cut | risk.isnan()
            measured = observation.select(*measured_keys(self.contract))[replaced]
            safest = action.detach().clone()
            safest[replaced] = self._safest(measured, action[replaced], brakes[replaced])
        return torch.where(replaced.unsqueeze(1), safest, action), replaced

    def _safest(self, observation: TensorDict, action: Tensor, brakes: Tensor) -> Tensor:
        """Candidates of the smallest risk, [N, A]; braking where `brakes` [N] or no risk is known."""
        candidates = self.candidates(action)
        risks = torch.stack([self.risk(observation, each) for each in candidates])
        best = torch.where(brakes, 0, risks.nan_to_num(nan=torch.inf).argmin(0))
        return candidates[best, torch.arange(len(best), device=best.device)]

    def candidates(self, action: Tensor) -> Tensor:
        """Actions [C, N, A] between braking and `action` [N, A]."""
        keeps = torch.tensor([each is None for each in self.brake], device=action.device)
        brake = torch.tensor([each or 0.0 for each in self.brake], dtype=action.dtype, device=action.device)
        brake = torch.where(keeps, action, brake)
        # b + s (a - b)
        return torch.stack([brake + share * (action - brake) for share in SHARES])


def braking(contract: Contract, brake: Sequence[float | None] | None) -> tuple[float | None, ...]:
    """Action at which a robot of `contract` stops: `brake`, or zeros if the actions are velocities.

    Raises:
        UserError: for other actions without `brake`, and for values outside the limits or of another number.
    """
    spec = contract.action
    size = spec.shape[-1]
    if brake is None:
        units = {unit.strip() for unit in spec.unit.split(",")}
        if not units <= VELOCITIES:
            raise UserError(
                f"actions in {spec.unit or 'unknown units'} do not tell how the robot stops; name its {size} values, "
                f"null where the policy's is kept: brake=[{','.join(['0'] * size)}]"
            )
        brake = [0.0] * size
    if len(brake) != size:
        raise UserError(f"expected {size} values of brake for {', '.join(spec.names) or 'the action'}, got {brake}")
    for value, low, high in zip(brake, spec.low, spec.high, strict=True):
        if value is not None and not low <= value <= high:
            raise UserError(f"brake={list(brake)} is outside the action's limits {list(spec.low)} to {list(spec.high)}")
    return tuple(brake)


def measured_keys(contract: Contract) -> list[str]:
    """Observations of `contract` that a risk critic reads.

    Raises:
        UserError: if there are none.
    """
    excluded = {
        key
        for key, spec in contract.observation.items()
        if spec.privileged or spec.is_picture or spec.is_text or -1 in spec.shape
    }
    if not (keys := [key for key in contract.observation if key not in excluded]):
        raise UserError("a risk critic reads numbers that the robot measures; this task observes none of fixed size")
    return keys
