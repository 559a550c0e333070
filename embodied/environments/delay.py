"""Inference delay in any environment: a chunk begins d control steps after the observation that it is decided from.

Meanwhile the environment executes the last d actions of the chunk before, which the policy reads as its action prefix,
so that it learns under the delay of its deployment. The decision process stays Markov: its state is the observation and
the prefix (real-time reinforcement learning, arXiv 1911.04448; chunks, arXiv 2512.05964). Rewards, ends and
log-probabilities keep their meaning, because the prefix was decided before. A robot runs such policies with
`execution=delayed` (`chunking.Execution`); for a delay of policies that were trained without one see
`execution.delay`. Letters: N environments, K executed actions, A action dimension, d delay, M memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.contract import ACTION_PREFIX, Contract
from embodied.data.delayed import with_action_prefix
from embodied.data.episodes import Episodes
from embodied.environment import DifferentiableEnvironment, Environment, Restorable, Transition
from embodied.environments.wrapping import WrappedEnvironment, WrappedTask
from embodied.errors import UserError
from embodied.policy import MEMORY, Decision, Policy
from embodied.rollout.memory import RecurrentPolicy
from embodied.task import Task


def delayed(contract: Contract, delay: int) -> Contract:
    """Contract of an environment with a `delay`, from its `contract` without one.

    Raises:
        UserError: if a command of zero, with which an episode begins, is outside the limits.
    """
    action = contract.action
    if not all(low <= 0.0 <= high for low, high in zip(action.low, action.high, strict=True)):
        raise UserError("an episode with delay begins with commands of zero, which action limits exclude; use delay=0")
    return contract.delayed(delay)


class DelayEnvironment(WrappedEnvironment):
    """Environment `env` with a `delay` in control steps; it keeps the other capabilities of `env`.

    An episode begins with `delay` commands of zero, while its first chunk is computed, which suits displacements,
    velocities and rates.
    """

    def __init__(self, env: Environment, delay: int) -> None:
        super().__init__(env)
        self.delay = delay
        self.contract = delayed(env.contract, delay)
        shape = self.contract.observation[ACTION_PREFIX].shape
        self.prefix = torch.zeros(env.num_envs, *shape, device=env.device)
        if isinstance(env, Restorable):
            self.state_dict, self.load_state_dict = self._state_dict, self._load_state_dict
        if isinstance(env, DifferentiableEnvironment):
            self.detach = self._detach

    def reset(self, mask: Tensor | None = None, starts: Tensor | None = None) -> TensorDict:
        """See `NumberedStarts.reset`."""
        observation = super().reset(mask, starts)
        begins = torch.ones(self.num_envs, dtype=torch.bool) if mask is None else mask
        self.prefix = torch.where(begins.to(self.device).view(-1, 1, 1), 0.0, self.prefix)
        return self._observed(observation)

    def step(self, actions: Tensor) -> Transition:
        """See `Environment.step`; the first actions [N, K, A] run d steps later, the last ones in later chunks."""
        if not bool(actions.isfinite().all()):
            return self.env.step(actions)  # raises the environment's own error
        decided = torch.cat((self.prefix, actions), 1)
        transition = self.env.step(decided[:, : actions.shape[1]])
        # the d actions after the executed ones, also where an episode has ended
        index = transition.executed.sum(1, keepdim=True) + torch.arange(self.delay, device=self.device)
        self.prefix = decided.take_along_dim(index.unsqueeze(-1), 1)
        transition.observation = self._observed(transition.observation)
        if transition.actions is not None:
            # decided actions in place of which others were executed; those of the prefix were decided before
            pending = actions[:, max(0, actions.shape[1] - self.delay) :]
            transition.actions = torch.cat((transition.actions[:, self.delay :], pending), 1)
        return transition

    def _observed(self, observation: TensorDict) -> TensorDict:
        return TensorDict({**observation, ACTION_PREFIX: self.prefix}, batch_size=[self.num_envs])

    def _state_dict(self) -> dict[str, Any]:
        """See `Restorable.state_dict`."""
        return {"env": cast(Restorable, self.env).state_dict(), ACTION_PREFIX: self.prefix}

    def _load_state_dict(self, state: dict[str, Any]) -> TensorDict:
        """See `Restorable.load_state_dict`."""
        observation = cast(Restorable, self.env).load_state_dict(state["env"])
        self.prefix = state[ACTION_PREFIX].to(self.device)
        return self._observed(observation)

    def _detach(self) -> None:
        """Cut the graph, see `DifferentiableEnvironment`."""
        assert isinstance(self.env, DifferentiableEnvironment)
        self.env.detach()
        self.prefix = self.prefix.detach()


class DelayTask(WrappedTask):
    """Task with a `delay` in its environments, demonstrations and videos."""

    def __init__(self, task: Task, delay: int) -> None:
        super().__init__(task)
        self.delay = delay

    def contract(self, distribution: str) -> Contract:
        """See `Task.contract`."""
        return delayed(super().contract(distribution), self.delay)

    def environment(
        self, num_envs: int, distribution: str, split: str, seed: int = 0, device: str = "cpu"
    ) -> Environment:
        """See `Task.environment`."""
        env = super().environment(num_envs, distribution, split, seed, device)
        return cast(Environment, DelayEnvironment(env, self.delay))  # whose attributes are only read

    def demonstrations(self, directory: Path, seed: int) -> Episodes | None:
        """Demonstrations of the task, see `with_action_prefix`."""
        demonstrations = super().demonstrations(directory, seed)
        return None if demonstrations is None else with_action_prefix(demonstrations, self.delay)

    def video(
        self, path: Path, policies: Mapping[str, Policy], device: str, distribution: str | None = None, first: int = 0
    ) -> None:
        """See `Task.video`."""
        waiting = {caption: _Waiting(policy, self.delay) for caption, policy in policies.items()}
        super().video(path, waiting, device, distribution, first)


class _Waiting:
    """Policy whose chunks begin `delay` control steps late, for environments without a delay; a `RecurrentPolicy`.

    Its memory has the action prefix, and the memory of the policy.
    """

    def __init__(self, policy: Policy, delay: int) -> None:
        self.policy = policy
        self.contract = policy.contract.delayed(0)
        self.shape = policy.contract.delayed(delay).observation[ACTION_PREFIX].shape

    def initial_memory(self, count: int) -> Tensor:
        """Memory [count, d * A + M] at the beginning of episodes."""
        memory = (
            self.policy.initial_memory(count) if isinstance(self.policy, RecurrentPolicy) else torch.empty(count, 0)
        )
        return torch.cat((torch.zeros(count, math.prod(self.shape), device=memory.device), memory.detach()), 1)

    def act(
        self, observation: TensorDict, *, deterministic: bool = False, generator: torch.Generator | None = None
    ) -> Decision:
        """Actions [N, H, A] from the time of the observation on."""
        flat, memory = observation[MEMORY].tensor_split((math.prod(self.shape),), 1)
        prefix = flat.unflatten(1, self.shape)
        delayed_observation = observation.copy().update({ACTION_PREFIX: prefix, MEMORY: memory})
        decision = self.policy.act(delayed_observation, deterministic=deterministic, generator=generator)
        executed = self.contract.executed
        waiting = torch.cat((prefix.to(decision.actions.device), decision.actions), 1)
        following = [waiting[:, executed : executed + self.shape[0]].flatten(1), decision.sample.get(MEMORY, memory)]
        sample = TensorDict({MEMORY: torch.cat(following, 1)}, batch_size=[len(prefix)])
        return Decision(waiting[:, : self.contract.horizon], sample, decision.log_prob_terms, decision.value)


def with_delay(task: Task, delay: int) -> Task:
    """Task with a `delay` in control steps; unchanged without one."""
    return DelayTask(task, delay) if delay else task
