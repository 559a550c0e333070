"""Inverse temperature of each state (FamO2O, arXiv 2310.17966): how far a policy moves from the data, for IQL.

A family of policies pi(s, b) imitates by the weights min(exp(b A), w_max) of all b between two bounds, and b(s) is the
one whose actions have the highest value.

Differs from the paper:
    - the family has deterministic actions and never acts: the policy, of any kind, imitates by the weights of b(s);
    - b(s) is deterministic, because nothing is explored;
    - the members read b itself, scaled to [-1, 1], not sines of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from embodied.algorithms.finite import check_finite
from embodied.algorithms.off_policy.action_values import ActionValues
from embodied.algorithms.parts import Composite


class Family(Composite):
    """Family of policies of the actions of `q`, and inverse temperature of each state between `low` and `high`."""

    def __init__(
        self, q: ActionValues, hidden: Sequence[int], learning_rate: float, low: float, high: float, max_weight: float
    ) -> None:
        self.q = q
        self.low = low
        self.high = high
        self.max_weight = max_weight
        size = q.policy.feature_size
        self.members = _bounded_network([size + 1, *hidden, q.executed * q.elements]).to(q.policy.device)
        self.choice = _bounded_network([size, *hidden, 1]).to(q.policy.device)
        self.optimiser = torch.optim.Adam(
            [*self.members.parameters(), *self.choice.parameters()], learning_rate, fused=True
        )

    def step(self, batch: TensorDict, advantage: Tensor, drawn: Tensor, step: int) -> Tensor:
        """Take gradient step number `step` at `drawn` places [B] from -1 (`low`) to 1 (`high`); returns b(s), [B].

        Raises:
            DivergedError: before a step whose loss is not finite.
        """
        with torch.no_grad():
            features = self.q.policy.features(batch["observation"])
        # w = min(exp(b A), w_max), b ~ U(low, high)
        weight = (self._scaled(drawn) * advantage).exp().clamp(max=self.max_weight)
        error = (self._actions(features, drawn) - self.q.scaled(batch["actions"])).square().mean(-1)
        # L_pi = mean w |pi(s, b) - a|^2
        imitation = (weight.unsqueeze(1) * batch["valid"][:, : self.q.executed] * error).mean()
        place = self.choice(features).squeeze(1)
        inputs = torch.cat((features, self._actions(features, place).flatten(1)), -1)
        # L_b = -mean min_j Q_j(s, pi(s, b(s)))
        choice = -self.q.critics.values(inputs).amin(0).mean()
        check_finite({"loss of the family": imitation.detach(), "loss of the temperatures": choice.detach()}, step)
        self.optimiser.zero_grad()
        imitation.backward()
        choice.backward(inputs=list(self.choice.parameters()))
        self.optimiser.step()
        return self._scaled(place.detach())

    def _actions(self, features: Tensor, place: Tensor) -> Tensor:
        """Scaled actions [B, K, A] of the members at `place` [B]."""
        actions = self.members(torch.cat((features, place.unsqueeze(1)), -1))
        return actions.unflatten(-1, (self.q.executed, self.q.elements))

    def _scaled(self, place: Tensor) -> Tensor:
        """Inverse temperatures at `place` from -1 to 1."""
        return self.low + (self.high - self.low) * (place + 1.0) / 2.0

    def state_dict(self) -> dict[str, Any]:
        """Weights, and the optimiser's state."""
        return {name: getattr(self, name).state_dict() for name in _PARTS}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        for name in _PARTS:
            getattr(self, name).load_state_dict(state[name])


_PARTS = ("members", "choice", "optimiser")


def _bounded_network(sizes: Sequence[int]) -> nn.Sequential:
    """Dense layers of `sizes` with ReLU between them and tanh at the end."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1], nn.Tanh())
