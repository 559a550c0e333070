"""Advantages over chunked decisions.

Letters: T decisions, N environments, K executed actions of a chunk. `discount` is per control step.
"""

from __future__ import annotations

from typing import cast

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.networks.value_head import ValueHead
from embodied.policy import TrainablePolicy
from embodied.rollout.rollout import Rollout
from embodied.world import ALONE, World, of_each


def chunk_reward(reward: Tensor, discount: float) -> Tensor:
    """Discounted reward of each chunk, sum_i discount^i r_i, [..., K] -> [...]."""
    powers = discount ** torch.arange(reward.shape[-1], dtype=reward.dtype, device=reward.device)
    return (reward * powers).sum(-1)


def gae(
    reward: Tensor,
    executed: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    value: Tensor,
    next_value: Tensor,
    *,
    discount: float,
    gae_lambda: float,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv 1506.02438) over macro-steps; returns advantage and return, [T, N].

    A chunk that executed k actions discounts the following value by discount^k. `next_value` [T, N] is V of the true
    next observation: it is used at time limits and ignored after a termination. Both endings stop the recursion.

    Args:
        reward: [T, N, K].
        executed: [T, N, K] bool.
        terminated: [T, N] bool.
        truncated: [T, N] bool.
        value: [T, N], V at each decision.
        next_value: [T, N], V at the true observation after it.
        discount: gamma, per control step.
        gae_lambda: lambda, per decision.
    """
    rewards = chunk_reward(reward, discount)
    decay = discount ** executed.sum(-1).to(value.dtype)
    # delta_t = r_t + gamma^k V(s'_t) (1 - terminated_t) - V(s_t)
    delta = rewards + decay * next_value * ~terminated - value
    carry = decay * gae_lambda * ~(terminated | truncated)
    advantage = torch.zeros_like(value)
    following = torch.zeros_like(value[0])
    # A_t = delta_t + gamma^k lambda (1 - done_t) A_{t+1}
    for t in reversed(range(len(value))):
        following = delta[t] + carry[t] * following
        advantage[t] = following
    return advantage, advantage + value


def moments(values: Tensor, world: World = ALONE) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of `values` [B] over all processes."""
    # Two passes in float64: E[x] first, then sum (x - E[x])^2 / (n - 1), so that large means lose no digits.
    count, total = world.sum(torch.stack((torch.ones_like(values, dtype=torch.float64).sum(), values.double().sum())))
    mean = total / count
    squares = world.sum((values.double() - mean).square().sum())
    return mean, (squares / (count - 1.0).clamp_min(1.0)).sqrt()


def normalise(advantage: Tensor, own: Tensor, world: World = ALONE) -> Tensor:
    """Normalise to zero mean and unit standard deviation over entries of all processes where `own` is True."""
    mean, std = moments(advantage[own], world)
    return (advantage - mean.to(advantage.dtype)) / (std.to(advantage.dtype) + 1e-8)


@torch.no_grad()
def values(policy: TrainablePolicy, observation: TensorDict) -> Tensor:
    """Values V(s) of observations [T, N] by the policy's critic: [T, N] float32 on their device, computed in pieces."""
    device = next(iter(observation.values(include_nested=True, leaves_only=True))).device
    pieces = observation.flatten(0, 1).split(4096)
    value = torch.cat([policy.value(piece.to(policy.device)).to(device, torch.float32) for piece in pieces])
    return value.view(observation.batch_size)


def next_values(policy: TrainablePolicy, rollout: Rollout, value: Tensor, world: World = ALONE) -> Tensor:
    """V of the true observation after each decision, [T, N], which reuses `value` [T, N] of the next decision.

    Values are computed only for the last observation and for the final observations of ended episodes. All processes
    make the same number of forward passes, because their networks may be sharded.
    """
    last = values(policy, rollout.last_observation.unsqueeze(0))
    following = torch.cat((value[1:], last.to(value.device)))
    count = 0 if rollout.final_observation is None else len(rollout.final_observation)
    most_ended = max(of_each(count, world)) if world.size > 1 else count
    ended = rollout.final_observation
    if most_ended > count:
        padding = cast(TensorDict, rollout.last_observation[torch.zeros(most_ended - count, dtype=torch.long)])
        ended = padding if ended is None else TensorDict.cat([ended, padding])
    # An ended episode is followed by the first observation of the next one, whose value does not belong to it.
    if ended is not None:
        final = values(policy, ended.unsqueeze(0)).squeeze(0)[:count]
        if count:
            following.view(-1)[rollout.final_rows] = final.to(value.device)
    return following


def clamped_targets(head: ValueHead, target: Tensor, world: World = ALONE) -> dict[str, float]:
    """Metric of a categorical `head`: share of `target` [B] of all processes outside its range."""
    return {"clamped_targets": float(moments(head.outside(target), world)[0])} if head.categorical else {}


def explained_variance(value: Tensor, returns: Tensor, world: World = ALONE) -> float:
    """Share of the returns' variance, over all processes, that the value predicts: 1 is perfect, 0 a constant."""
    # 1 - Var(return - V) / Var(return)
    residual, total = (float(moments(each, world)[1]) ** 2 for each in (returns - value, returns))
    return 1.0 - residual / max(total, 1e-12)
