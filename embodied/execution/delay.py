"""Evaluation of a policy whose inference takes d control steps, as on a robot, though it was trained without delay.

This is `real_robot.serving.chunk_executor` in simulated time, for N environments: the running chunk is part of the
policy's memory (`rollout.memory`), so that `evaluation.evaluate` needs no change. Each decision is from an observation
at time t: for d steps the robot executes the previous chunk, and from t + d on the new one. The first
chunk of an episode has no delay: an episode begins with its first command. Letters: N observations, H predicted and K
executed actions, A action dimension, M memory.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.errors import UserError
from embodied.execution.chunking import Execution, Running, check_execution, follow, shifted, steps_until
from embodied.policy import MEMORY, Decision, Policy
from embodied.rollout.memory import RecurrentPolicy


class DelayedPolicy:
    """Wrapper of `policy` with an inference time of `delay_s`, rounded up to control steps; a `RecurrentPolicy`.

    With Execution.SYNCHRONOUS the robot holds with a command of zero, which suits displacements, velocities and rates.

    Args:
        policy: any policy.
        delay_s: time from an observation to its chunk.
        execution: strategy of the robot in the meantime.
        executed: K, actions between observations; the policy's if None. A smaller K allows longer delays.
        device: the policy's.

    Raises:
        UserError: if chunks are shorter than the delay, or the policy or its contract does not allow `execution`.
    """

    def __init__(
        self,
        policy: Policy,
        delay_s: float,
        execution: Execution,
        *,
        executed: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if policy.contract.delay:
            raise UserError(
                f"the policy's environment has the delay={policy.contract.delay} of its training; leave out delay_s and"
                " execution"
            )
        check_execution(policy, execution)
        self.policy = policy
        self.execution = execution
        self.device = device
        self.contract = replace(policy.contract, executed=executed or policy.contract.executed)
        self.steps = steps_until(delay_s, self.contract.control_dt_s)
        self._check(delay_s)
        self.chunk_size = self.contract.horizon * math.prod(self.contract.action.shape)

    def initial_memory(self, count: int) -> Tensor:
        """Memory [count, 1 + H * A + M]: whether a chunk runs, its remaining actions, the policy's memory."""
        policy_memory = (
            self.policy.initial_memory(count) if isinstance(self.policy, RecurrentPolicy) else torch.empty(count, 0)
        )
        return torch.cat((torch.zeros(count, 1 + self.chunk_size), policy_memory.detach().cpu()), 1).to(self.device)

    @torch.no_grad()
    def act(
        self, observation: TensorDict, *, deterministic: bool = False, generator: torch.Generator | None = None
    ) -> Decision:
        """H actions that the robot executes from the time of the observation if no other chunk arrives."""
        memory = observation[MEMORY]
        runs, chunk, policy_memory = memory.tensor_split((1, 1 + self.chunk_size), 1)
        runs = runs.squeeze(1).long()
        past = chunk.unflatten(1, (self.contract.horizon, -1))
        running = Running(past, runs * self.steps, runs * (self.contract.horizon - self.contract.executed))
        has_memory = isinstance(self.policy, RecurrentPolicy)
        policy_observation = (
            observation.copy().update({MEMORY: policy_memory}) if has_memory else observation.exclude(MEMORY)
        )
        decision = follow(
            self.policy, policy_observation, running, self.execution, deterministic=deterministic, generator=generator
        )
        actions = self._executed(decision.actions, past, runs.bool())
        next_memory = [torch.ones_like(memory[:, :1]), shifted(actions, self.contract.executed).flatten(1)]
        next_memory += [decision.sample[MEMORY]] if has_memory else []
        sample = TensorDict({MEMORY: torch.cat(next_memory, 1)}, batch_size=[len(runs)])
        return Decision(actions, sample, decision.log_prob_terms, decision.value)

    def _executed(self, actions: Tensor, past: Tensor, runs: Tensor) -> Tensor:
        """Executed actions [N, H, A]: aligned chunks begin with the frozen actions, others start after the delay."""
        if self.execution.aligned:
            return actions
        before = past if self.execution is Execution.NAIVE else torch.zeros_like(past)
        # d steps of the previous chunk (or of holding), then the new chunk from its first action
        late = torch.cat((before[:, : self.steps], actions), 1)[:, : self.contract.horizon]
        return torch.where(runs.view(-1, 1, 1), late, actions)

    def _check(self, delay_s: float) -> None:
        horizon = self.contract.horizon
        executed = self.contract.executed
        spec = self.contract.action
        waits = self.execution is Execution.SYNCHRONOUS
        longest = executed - 1 if waits else min(executed, horizon - executed)
        if not 0 <= self.steps <= longest or delay_s < 0.0:
            raise UserError(
                f"expected delay_s from 0 to {longest * self.contract.control_dt_s:g}, got {delay_s:g}: that is the "
                f"longest for horizon={horizon} executed={executed} execution={self.execution.value}"
            )
        if waits and not all(low <= 0.0 <= high for low, high in zip(spec.low, spec.high, strict=True)):
            raise UserError("execution=synchronous holds with zero commands, which action limits exclude; use blend")


def delayed(
    policy: Policy, delay_s: float, execution: str | None, *, executed: int | None, device: torch.device | str
) -> Policy:
    """Wrap `policy` with the delay and execution, see `DelayedPolicy`; unchanged if `execution` is None.

    Raises:
        UserError: for a delay without `execution`.
    """
    if execution is not None:
        return DelayedPolicy(policy, delay_s, Execution(execution), executed=executed, device=device)
    if delay_s:
        raise UserError(f"delay_s needs execution=..., one of {', '.join(each.value for each in Execution)}")
    return policy
