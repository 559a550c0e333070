"""Record whole episodes of a policy, for learners of stored episodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.data.episodes import Episodes
from embodied.environment import Environment, NumberedStarts, Transition
from embodied.rollout.finite import check_observation, check_transition


class HasActions(Protocol):
    """A decision."""

    @property
    def actions(self) -> Tensor:
        """Chunks [N, H, A]."""
        ...


class Actor(Protocol):
    """Source of actions, such as a policy."""

    def act(self, observation: TensorDict, *, generator: torch.Generator) -> HasActions:
        """Decision for N observations."""
        ...


def record_episodes(
    env: Environment, policy: Actor, generator: torch.Generator, number: int = 0, device: torch.device | str = "cpu"
) -> Episodes:
    """One episode of `policy`, on `device`, in each environment, with its outcome; an observation before each decision.

    Actions are those that were executed.

    Where initial states are numbered, `number` 0, 1, 2, ... begins with further ones.
    """
    starts = ()
    if isinstance(env, NumberedStarts):
        tasks = len(env.task_names)
        order = torch.arange(env.num_envs) // tasks + number * -(-env.num_envs // tasks)
        starts = (None, (order % env.num_starts if env.num_starts else order).to(env.device))
    observation = env.reset(*starts)
    check_observation(env, observation)
    decisions = []
    done = torch.zeros(env.num_envs, dtype=torch.bool)
    while not done.all():
        actions = policy.act(observation.to(device), generator=generator).actions[:, : env.contract.executed]
        actions = actions.to(env.device)
        transition = env.step(actions.clone())  # the environment may modify it
        check_transition(env, transition)
        actions = actions if transition.actions is None else transition.actions.clone()
        decisions.append((observation.clone(), actions, transition, done))
        observation = transition.observation
        done = done | transition.done.cpu()
    return Episodes.join([_episode(decisions, index, int(env.task_index[index])) for index in range(env.num_envs)])


def _episode(decisions: Sequence[tuple[TensorDict, Tensor, Transition, Tensor]], index: int, task: int) -> Episodes:
    """The episode of environment `index`."""
    own = [(each, actions, transition) for each, actions, transition, done in decisions if not done[index]]
    counts = torch.tensor([int(transition.executed[index].sum()) for *_, transition in own])
    last = own[-1][2]
    lengths = counts.tolist()
    return Episodes.of(
        TensorDict.stack([each[index] for each, *_ in own]).cpu(),
        torch.cat([actions[index, :count] for (_, actions, _), count in zip(own, lengths, strict=True)]).cpu(),
        success=bool(last.success[index]) if last.has_success else None,
        reward=torch.cat([each.reward[index, :count] for (*_, each), count in zip(own, lengths, strict=True)]).cpu(),
        terminated=bool(last.terminated[index]),
        task_index=task,
        final_observation=last.observation[index].clone().cpu(),
        first=counts.cumsum(0) - counts,
    )
