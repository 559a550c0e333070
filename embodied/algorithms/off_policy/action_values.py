"""Values Q(s, a) of executed chunks: an ensemble of critics, its target networks and its optimiser.

Off-policy learners share them. A chunk is one action of K * A dimensions, scaled to [-1, 1] by the contract's limits.
The critics read `policy.features`, with privileged observations; features that are learned have no target network, as
in DrQ-v2 (arXiv 2107.09645). Letters: M critics, B rows, H actions of a chunk, K executed ones, A elements of one.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.algorithms.critics import CriticConfig, approach, frozen_weights
from embodied.algorithms.finite import check_finite, gradient_norm
from embodied.algorithms.micro_batch import saved_bytes
from embodied.algorithms.parts import Composite
from embodied.algorithms.passes import Passes
from embodied.contract import Contract
from embodied.errors import UserError
from embodied.networks.value_head import CriticHead
from embodied.policy import TrainablePolicy


class ActionValues(Composite):
    """Critics of the executed chunks of `policy`, with Adam of `learning_rate`; `trains_features` trains its encoder.

    With a `contract` they are critics of the actions of that contract.

    Raises:
        UserError: for actions without limits.
    """

    def __init__(
        self,
        policy: TrainablePolicy,
        config: CriticConfig,
        learning_rate: float,
        *,
        trains_features: bool = True,
        contract: Contract | None = None,
    ) -> None:
        contract = contract or policy.contract
        action = contract.action
        if not action.low:
            raise UserError("critics of actions need action limits; set low and high in the action spec")
        self.policy = policy
        self.executed = contract.executed
        self.elements = len(action.low)
        low = torch.tensor(action.low)
        high = torch.tensor(action.high)
        self.centre = ((high + low) / 2).to(policy.device)
        self.half_range = ((high - low) / 2).to(policy.device)
        self.critics = config.critics(policy.feature_size + self.executed * self.elements).to(policy.device)
        self.targets = copy.deepcopy(self.critics)
        self.trains_features = trains_features
        features = policy.critic_parameters() if trains_features else []
        self.optimiser = torch.optim.Adam([*self.critics.parameters(), *features], learning_rate, fused=True)
        self.unit = 1.0
        """Reward that a value of 1 stands for; learners that scale rewards set it."""

    def scaled(self, actions: Tensor) -> Tensor:
        """Executed actions [B, K, A] of chunks [B, H, A] in robot units, scaled to [-1, 1]."""
        return (actions[:, : self.executed] - self.centre) / self.half_range

    def inputs(self, observation: TensorDict, scaled: Tensor, *, frozen: bool = False) -> Tensor:
        """Inputs of the critics, [B, features + K * A], from `scaled` actions [B, K, A]; features may be `frozen`."""
        with torch.set_grad_enabled(self.trains_features and not frozen and torch.is_grad_enabled()):
            features = self.policy.features(observation)
        return torch.cat((features, scaled.flatten(1)), -1)

    def values(self, observation: TensorDict, scaled: Tensor, *, frozen: bool = False) -> Tensor:
        """Values [M, B] of all critics for `scaled` actions [B, K, A]; if `frozen`, gradients reach these alone."""
        with frozen_weights(self.critics) if frozen else nullcontext():
            return self.critics.values(self.inputs(observation, scaled, frozen=frozen))

    def loss(self, batch: TensorDict, target: Tensor, weight: Tensor | float = 1.0) -> Tensor:
        """Loss of `step`, one scalar."""
        inputs = self.inputs(batch["observation"], self.scaled(batch["actions"]))
        companions = None
        if self.critics.normalises_batches:
            companions = self.inputs(batch["next_observation"], batch["following"]).detach()
        # L = sum_i mean w (Q_i(s, a) - y)^2, or the cross-entropy of categorical critics
        return self.critics.loss(inputs, target, weight, companions)

    @torch.no_grad()
    def target_minimum(self, observation: TensorDict, scaled: Tensor, generator: torch.Generator) -> Tensor:
        """Smallest value [B] of a subset of the target networks, drawn by `generator`."""
        return self.targets.minimum(self.inputs(observation, scaled), generator)

    @torch.no_grad()
    def target(
        self, batch: TensorDict, scaled: Tensor, generator: torch.Generator, bonus: Tensor | None = None
    ) -> Tensor:
        """Targets R + carry * (min_i Q_i'(s', a') + `bonus`), [B], with actions a' `scaled`; or their distribution.

        Critics with a C51 head have targets [1, B, bins]: the distribution of the target network of smallest value, all
        of whose atoms move.
        """
        inputs = self.inputs(batch["next_observation"], scaled)
        companions = None
        if self.critics.normalises_batches:
            companions = self.inputs(batch["observation"], self.scaled(batch["actions"]))
        reward = batch["reward"]
        head = self.critics.config
        if head.head is not CriticHead.C51:
            following = self.targets.minimum(inputs, generator, companions)
            return reward + batch["carry"] * (following if bonus is None else following + bonus)
        atoms = head.centres(reward.device)
        if bonus is not None:
            atoms = atoms + bonus.unsqueeze(-1)
        # z -> clip(R + carry * (z + bonus)), whose mass is split between two neighbours
        moved = reward.unsqueeze(-1) + batch["carry"].unsqueeze(-1) * atoms
        logits = self.targets.lowest(inputs, generator, companions)
        return head.projected(moved, logits.float().softmax(-1)).unsqueeze(0)

    def step(
        self,
        batch: TensorDict,
        target: Tensor,
        step: int,
        penalty: Tensor | float = 0.0,
        weight: Tensor | float = 1.0,
    ) -> dict[str, Tensor]:
        """Take gradient step number `step` towards `target` [B], [M, B] or [1, B, bins]; returns its metrics.

        Rows count by their `weight` [B]. A differentiable `penalty` is added to the loss. For critics that normalise
        batches `batch` has the scaled actions `following` [B, K, A].

        Raises:
            DivergedError: before a step whose loss or gradient is not finite.
        """
        loss = self.loss(batch, target, weight) + penalty
        self.optimiser.zero_grad()
        loss.backward()
        gradient = gradient_norm(self.critics.parameters())
        check_finite({"value_loss": loss.detach(), "gradient of the critic": gradient}, step)
        self.optimiser.step()
        self.critics.constrain()
        metrics = {"value_loss": loss.detach()}
        return metrics | self._saturation(target)

    def _saturation(self, target: Tensor) -> dict[str, Tensor]:
        """Metric of categorical critics: share of values out of their range, or mass of distributions at its ends."""
        head = self.critics.config
        if not head.categorical:
            return {}
        if target.ndim == 3:
            return {"clamped_targets": (target[..., 0] + target[..., -1]).mean()}
        return {"clamped_targets": head.outside(target).mean()}

    def follow(self, share: float) -> None:
        """Move the target networks towards the critics by `share`."""
        approach(self.targets.parameters(), self.critics.parameters(), share)

    def stored_bytes(self, passes: Passes, minibatch: int) -> int:
        """Bytes that the backward pass of a `minibatch` stores."""
        observation = passes.observation(minibatch)
        actions = passes.actions(minibatch).new_empty(minibatch, self.executed, self.elements)

        def outputs() -> Tensor:
            inputs = self.inputs(observation, actions)
            return self.critics(inputs, inputs.detach() if self.critics.normalises_batches else None)

        return saved_bytes(outputs)

    @torch.no_grad()
    def in_rewards(self) -> dict[str, Any] | None:
        """Weights of critics, target networks and features, with values in the unit of rewards; None: categorical."""
        if self.critics.config.categorical:
            return None  # their bins stay those of scaled rewards
        networks = {"critics": copy.deepcopy(self.critics), "target_critics": copy.deepcopy(self.targets)}
        for network in networks.values():
            # unit * Q(s, a): the last layer is linear
            network.weights[-1].mul_(self.unit)
            network.biases[-1].mul_(self.unit)
        features = [each.detach().clone() for each in self.policy.critic_parameters()]
        return {name: network.state_dict() for name, network in networks.items()} | {"features": features}

    @torch.no_grad()
    def continue_from(self, values: Mapping[str, Any]) -> None:
        """Load weights that `in_rewards` returned.

        Raises:
            UserError: for critics of other layers.
        """
        try:
            self.critics.load_state_dict(values["critics"])
            self.targets.load_state_dict(values["target_critics"])
        except RuntimeError as error:
            raise UserError(
                "the critics of the stage offline have other layers; use the same hidden, ensemble, layer_norm and head"
                " in offline= and algorithm="
            ) from error
        for own, other in zip(self.policy.critic_parameters(), values["features"], strict=True):
            own.copy_(other)

    def state_dict(self) -> dict[str, Any]:
        """Weights of critics and target networks, the optimiser's state, and the unit of values."""
        return {
            "critics": self.critics.state_dict(),
            "target_critics": self.targets.state_dict(),
            "critic_optimiser": self.optimiser.state_dict(),
            "value_unit": self.unit,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the entries of `state_dict` in `state`."""
        self.critics.load_state_dict(state["critics"])
        self.targets.load_state_dict(state["target_critics"])
        self.optimiser.load_state_dict(state["critic_optimiser"])
        self.unit = state.get("value_unit", 1.0)  # older checkpoints are of unscaled rewards
