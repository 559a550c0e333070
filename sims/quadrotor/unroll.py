"""Rollouts of a policy in one call, with the backward pass, for analytic policy gradients.

Letters: T decisions, N environments, L lanes.
"""

from __future__ import annotations

import math
import time
from itertools import pairwise
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.environment import clip_gradient
from embodied.errors import UserError
from embodied.rollout.rollout import Rollout
from sims.quadrotor.episode import COUNTERS, Episode, Record
from sims.quadrotor.observation import split_rows
from sims.tracer.program import Program
from sims.tracer.unroll import MAX_LAYERS, Layers, run, source

Environment = Any
"""A `QuadrotorEnvironment`, whose module imports this one."""


def unroll(env: Environment, layers: Layers, decisions: int, max_action_gradient: float = math.inf) -> Rollout:
    """Run `decisions` steps in every environment with the policy a = tanh(W_n ... tanh(W_1 x + b_1) ... + b_n).

    x are the task's observations and past actions, concatenated in the order of the contract. Reward, observations and
    actions of the rollout carry gradients to the layers, starting at the current state, so that none flow into earlier
    steps; the gradient by one environment's action is scaled down to norm `max_action_gradient`. An environment whose
    episode ends during the rollout freezes: from the next decision on `executed` is False, `reward` is 0, the
    observation is its last one, and its actions mean nothing. Afterwards `env` is in the last state of the rollout,
    detached, and finished environments wait for `env.reset(mask=...)`. On the CPU forward and backward are one call of
    compiled C each; elsewhere the same is done step by step.

    Raises:
        UserError: for layers that do not fit the contract, another chunk than K = 1, or before the first reset.
    """
    _check(env, layers, decisions)
    started = time.perf_counter()
    env.detach()
    rollout = (_compiled if env._kernels.library is not None else _by_steps)(
        env, layers, decisions, max_action_gradient
    )
    env.detach()
    rollout.simulation_s = time.perf_counter() - started
    return rollout


def unroll_source(episode: Episode) -> str:
    """C code to append to that of the episode's programs."""
    return source(_step(episode), episode.physical_rows)


def _check(env: Environment, layers: Layers, decisions: int) -> None:
    if env.contract.executed != 1:
        raise UserError(
            f"expected one action per decision for analytic gradients, got {env.contract.executed}; use task.executed=1"
        )
    env.check_started()
    if decisions < 1 or not 1 <= len(layers) <= MAX_LAYERS:
        raise ValueError(
            f"expected at least one decision and 1 to {MAX_LAYERS} layers, got {decisions} and {len(layers)}"
        )
    widths = [env.episode.physical_rows + 4 * env._history.length, *(len(weight) for weight, _ in layers)]
    for (inputs, outputs), (weight, bias) in zip(pairwise(widths), layers, strict=True):
        if weight.shape != (outputs, inputs) or bias.shape != (outputs,):
            raise ValueError(
                f"expected a weight of shape ({outputs}, {inputs}) and a bias of shape ({outputs},), got "
                f"{tuple(weight.shape)} and {tuple(bias.shape)}"
            )
    if widths[-1] != 4:
        raise ValueError(f"expected 4 outputs of the last layer, one per rotor, got {widths[-1]}")


def _by_steps(env: Environment, layers: Layers, decisions: int, max_action_gradient: float) -> Rollout:
    """Unroll step by step: for devices without the compiled unroll, and to check it."""
    specs = env.contract.observation.items()
    keys = [key for key, spec in specs if key in env.mdp.OBSERVED or not spec.privileged]
    observations = [env.observe()]
    actions = []
    transitions = []
    for _ in range(decisions):
        x = torch.cat([observations[-1][key] for key in keys], dim=-1)
        for weight, bias in layers:
            x = torch.tanh(torch.nn.functional.linear(x, weight, bias))
        actions.append(x.unsqueeze(1))
        clip_gradient(actions[-1], max_action_gradient)
        transitions.append(env.step(actions[-1]))
        observations.append(transitions[-1].observation)
    fields = ("reward", "executed", "terminated", "truncated", "success")
    stacked = {name: torch.stack([getattr(transition, name) for transition in transitions]) for name in fields}
    return _rollout(env, torch.stack(observations), torch.stack(actions), **stacked)


def _step(episode: Episode) -> Program:
    return next(program for program in episode.programs() if program.name == "step")


def _compiled(env: Environment, layers: Layers, decisions: int, max_action_gradient: float) -> Rollout:
    N = env.num_envs
    length = env._history.length
    past = env._history.rows if length > 1 else env._seen[env.episode.previous]
    inputs = {**env._inputs(), "observation": env._seen}
    past = past.view(length, 4, -1)
    results = run(env._kernels.library, _step(env.episode), layers, decisions, inputs, past, max_action_gradient)
    observations = results.observation
    actions = results.actions
    record = results.record
    executed = results.executed > 0.5
    histories = _histories(actions, executed) if length > 1 else None
    env._state = results.state[-1]
    env._seen = observations[-1]
    env._record = record[-1]
    if histories is not None:
        env._history.rows = histories[:, -1]
    env.settle(env.outcome(results.reward[:, :N].t(), executed[:, :N].t()))
    observation = split_rows(
        env.contract.observation, observations[..., :N].movedim(1, 0), None if histories is None else histories[..., :N]
    )
    records = record[1:, :, :N].movedim(1, 0)
    terminated, truncated = records[1:COUNTERS] > 0.5
    return _rollout(
        env,
        TensorDict(observation, batch_size=[decisions + 1, N]),
        actions[length:, :, :N].transpose(1, 2).unsqueeze(2),
        reward=results.reward[:, :N, None],
        executed=executed[:, :N, None],
        terminated=terminated,
        truncated=truncated,
        success=env.mdp.success(Record(terminated, truncated, records[COUNTERS:], env.step_limit)),
    )


def _rollout(env: Environment, observations: TensorDict, actions: Tensor, **fields: Tensor) -> Rollout:
    """A rollout with `observations` [T + 1, N] and the fields in between; its log-probabilities are 0."""
    T, N = actions.shape[:2]
    return Rollout(
        observation=observations[:-1],
        last_observation=observations[-1],
        actions=actions,
        sample=TensorDict({}, batch_size=[T, N]),
        log_prob=torch.zeros(T, N, 1, device=env.device),
        task_index=env.task_index,
        start=env.start.expand(T, N),
        **fields,
    )


def _histories(actions: Tensor, executed: Tensor) -> Tensor:
    """Past actions before each decision and after the last, [4 length, T + 1, L]; they freeze when episodes end."""
    length = len(actions) - len(executed)
    L = executed.shape[1]
    windows = actions.unfold(0, length, 1)  # [T + 1, 4, L, length]
    executed_steps = torch.cat((executed.new_zeros(1, L), executed)).long().cumsum(0)
    histories = windows.permute(0, 2, 3, 1)[executed_steps, torch.arange(L)]  # [T + 1, L, length, 4]
    return histories.flatten(2).movedim(2, 0)
