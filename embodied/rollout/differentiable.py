"""Rollouts through which gradients flow from rewards back to actions."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.environment import DifferentiableEnvironment, Environment, NumberedStarts, clip_gradient
from embodied.policy import Decision, DeterministicPolicy, Policy
from embodied.rollout.finite import check_observation, check_reward, check_transition
from embodied.rollout.rollout import ENDS, Collector, Rollout, stacked_row
from embodied.rollout.starts import Starts

Unroll = Callable[[Sequence[tuple[Tensor, Tensor]], int, float], Rollout]
"""Method `unroll(layers, decisions, max_action_gradient)` that some environments have, faster than step by step.

It runs `decisions` single actions of a feed-forward policy from the current state. `layers` are (weight [out, in],
bias [out]) with tanh after each, from the concatenated observations that the policy's contract reads to actions in half
ranges around the middle. Reward, observations and actions carry gradients to the layers, through `clip_gradient`. An
environment whose episode ends stays frozen.
"""


class DifferentiableCollector(Collector):
    """Collector of deterministic decisions; rewards and observations carry gradients to the policy.

    Environments restart only between rollouts: one whose episode ends inside a rollout stays frozen until its end. A
    gradient by one decision, of a mean over all, has at most that decision's share of norm `max_action_gradient`.
    """

    def __init__(
        self,
        env: Environment,
        policy: Policy,
        generator: torch.Generator,
        starts: Starts | None = None,
        max_action_gradient: float = math.inf,
    ) -> None:
        super().__init__(env, policy, generator, starts)
        self.max_action_gradient = max_action_gradient

    def collect(self, decisions: int) -> Rollout:
        """Run `decisions` single actions in every environment, from where the last rollout ended.

        Raises:
            UserError: for an observation or a reward that is not finite.
        """
        started = time.perf_counter()
        self._restart(self.finished, bool(self.finished.any()))
        env = cast(DifferentiableEnvironment, self.env)
        # the mean over N environments and T decisions divides each gradient by N * T
        limit = self.max_action_gradient / (env.num_envs * decisions)
        unroll: Unroll | None = getattr(env, "unroll", None)
        layers = cast(DeterministicPolicy, self.policy).dense_layers() if unroll is not None else None
        if unroll is not None and layers is not None:
            layers = [(weight.to(env.device), bias.to(env.device)) for weight, bias in layers]
            rollout = unroll(layers, decisions, limit)
            check_reward(env, rollout.reward)
            for observation in (rollout.observation, rollout.last_observation):
                check_observation(env, observation)
        else:
            rollout = self._by_steps(decisions, limit)
        env.detach()
        self.finished = rollout.done[-1]
        self.success = rollout.success[-1]
        self.observation = rollout.last_observation.detach()
        running = rollout.executed.any(-1)  # an episode ends once
        ended = {name: getattr(rollout, name) & running for name in ENDS}
        totals = {"simulation_s": time.perf_counter() - started, "policy_version": self.version}
        return self._with_totals(replace(rollout, **totals, **ended))

    def _by_steps(self, decisions: int, max_action_gradient: float) -> Rollout:
        """Step-by-step equivalent of `Unroll`, for any environment and policy."""
        policy = cast(DeterministicPolicy, self.policy)
        observations = [cast(TensorDict, self.observation)]
        rows = []
        frozen = torch.zeros_like(self.finished)
        empty = TensorDict({}, batch_size=[self.env.num_envs])
        for _ in range(decisions):
            actions = policy.actions(observations[-1].to(policy.device)).to(self.env.device)
            clip_gradient(actions, max_action_gradient)
            transition = self.env.step(actions[:, : self.env.contract.executed])
            check_transition(self.env, transition)
            unscored = Decision(actions, empty, actions.new_zeros(*transition.executed.shape, 1))
            rows.append(stacked_row(unscored, transition, frozen))
            observations.append(transition.observation)
            frozen = transition.done
        stacked = {name: _stacked([row[name] for row in rows]) for name in rows[0]}
        start = self.env.start.expand(decisions, -1) if isinstance(self.env, NumberedStarts) else None
        return Rollout(
            observation=TensorDict.stack(observations[:-1]),
            last_observation=observations[-1],
            task_index=self.env.task_index,
            start=start,
            **cast(dict[str, Any], stacked),
        )


def _stacked(rows: Sequence[Any]) -> Any:  # noqa: ANN401 - tensors, or dictionaries of them
    """Tensors stacked along time, [T, ...]; for dictionaries, by name."""
    if isinstance(rows[0], dict):
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    return torch.stack(cast(Any, rows))
