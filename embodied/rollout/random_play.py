"""Random play, whose observations define the normalisation statistics of a policy without demonstrations."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.environment import Environment, in_real_time
from embodied.errors import UserError
from embodied.rollout.finite import check_observation

RANDOM_DECISIONS = 8
OBSERVATIONS = 2048
REAL_OBSERVATIONS = 128
"""Number of observations, and that of a robot, which a person may have to reset after every eighth."""


def first_decisions(
    env: Environment, generator: torch.Generator, count: int | None = None
) -> tuple[TensorDict, Tensor]:
    """At least `count` observations [B] from the first decisions of episodes, and uniformly random actions [B, K, A].

    By default they are `OBSERVATIONS`, of a robot `REAL_OBSERVATIONS`. A policy without demonstrations computes its
    normalisation statistics from them. Each episode runs for `RANDOM_DECISIONS`: initial states alone may have constant
    elements, and longer random play leads far from the states that a policy will visit.

    Raises:
        UserError: if actions have no limits, or an observation is not finite.
    """
    spec = env.contract.action
    if not spec.low:
        raise UserError("expected action limits in the contract for a policy without demonstrations; set low and high")
    count = count or (REAL_OBSERVATIONS if in_real_time(env) else OBSERVATIONS)
    low = torch.tensor(spec.low)
    high = torch.tensor(spec.high)
    shape = (env.num_envs, env.contract.executed, *spec.shape)
    observations: list[TensorDict] = []
    actions: list[Tensor] = []
    while sum(map(len, observations)) < count:
        observation = env.reset()
        for _ in range(RANDOM_DECISIONS):
            check_observation(env, observation)
            observations.append(observation.clone())
            actions.append(low + (high - low) * torch.rand(shape, generator=generator))
            observation = env.step(actions[-1].to(env.device, copy=True)).observation  # it may modify its actions
    return TensorDict.cat(observations), torch.cat(actions)
