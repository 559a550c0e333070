"""Groups of episodes from one initial state: their starts, and the collection of whole episodes.

Letters: N environments, T decisions, E episodes of a rollout.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from embodied.environment import NumberedStarts
from embodied.rollout.rollout import Collector, Rollout
from embodied.rollout.starts import random_first_start


class GroupStarts:
    """Starts that repeat one initial state for every `group` episodes of a task, then take the next one.

    Episodes are counted by rounds of a task's environments, whichever ends first: the members of a group do not depend
    on how long its episodes take. The last group of an iteration may be smaller. Starts are below `num_starts`; None:
    unlimited.

    With `continuous` there are no rounds: whichever environment is free takes the next place in its task's oldest group
    with places left, so that groups are complete soon, and no group is smaller unless episodes are abandoned.
    """

    def __init__(
        self,
        task_index: Tensor,
        group: int,
        generator: torch.Generator,
        num_starts: int | None = None,
        *,
        continuous: bool = False,
    ) -> None:
        self.task_index = task_index.cpu()
        self.group = group
        self.num_starts = num_starts
        self.continuous = continuous
        self.same = self.task_index.unsqueeze(0) == self.task_index.unsqueeze(1)
        self.place = self.same.tril(-1).sum(1)  # index among the environments of the same task
        self.count = self.same.sum(1)
        self.fresh = torch.full(
            (int(self.task_index.max()) + 1,), random_first_start(generator)
        )  # first start of this iteration, by task
        self.episode_counts = torch.zeros(len(task_index), dtype=torch.int64)  # episodes of this iteration

    def __call__(self, finished: Tensor, success: Tensor) -> Tensor:
        """Initial states [N] for environments that `finished` [N]; elsewhere 0, which is unused."""
        finished = finished.cpu()
        if self.continuous:
            # episodes of the task so far, and those that begin now in environments before this one
            earlier = (self.same.tril(-1) & finished).sum(1)
            number = (self._begun_by_task()[self.task_index] + earlier) // self.group
        else:
            # number of the group within the iteration: (round * environments + index) // group
            number = (self.episode_counts * self.count + self.place) // self.group
        start = self.fresh[self.task_index] + number
        self.episode_counts = self.episode_counts + finished
        return torch.where(finished, start % self.num_starts if self.num_starts else start, 0)

    def separate(self, generator: torch.Generator) -> None:
        """See `OwnStarts.separate`."""
        self.fresh = torch.full_like(self.fresh, random_first_start(generator))

    def abandon(self) -> None:
        """End an iteration: the next episodes belong to new groups."""
        if self.continuous:
            self.fresh = self.fresh + (self._begun_by_task() + self.group - 1) // self.group
        else:
            used = (self.episode_counts * self.count + self.group - 1) // self.group
            self.fresh = self.fresh + torch.zeros_like(self.fresh).scatter_reduce(0, self.task_index, used, "amax")
        self.episode_counts = torch.zeros_like(self.episode_counts)

    def _begun_by_task(self) -> Tensor:
        """Number of episodes of each task in this iteration."""
        return torch.zeros_like(self.fresh).scatter_add(0, self.task_index, self.episode_counts)

    def metrics(self) -> dict[str, float]:
        """No metrics."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Counters of starts and episodes."""
        return {"fresh": self.fresh.clone(), "begun": self.episode_counts.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.fresh, self.episode_counts = state["fresh"].clone(), state["begun"].clone()


class WholeEpisodes(Collector):
    """Collector of whole episodes only, all by the same policy.

    All environments begin together. Each runs as many episodes as fit into the requested decisions, however long they
    take, and at least one; then it stays frozen, with `executed` False and no further endings. With `patience` the
    rollout ends once all are frozen.
    """

    def collect(self, decisions: int) -> Rollout:
        """Collect at least `decisions`, if one episode may take that long; the environments need numbered starts."""
        env = cast(NumberedStarts, self.env)
        longest = -(-env.step_limit // env.contract.executed)
        rounds = max(1, decisions // longest)
        self.abandon()
        self.remaining = torch.full((env.num_envs,), rounds, device=env.device)
        self.frozen: list[Tensor] = []
        rollout = super().collect(rounds * longest)
        running = ~torch.stack(self.frozen).to(rollout.done.device)
        ends = {name: getattr(rollout, name) & running for name in ("terminated", "truncated", "success")}
        return replace(rollout, executed=rollout.executed & running.unsqueeze(-1), **ends)

    def _is_over(self) -> bool:
        return self.patience is not None and bool((self.finished & (self.remaining == 0)).all())

    def _due(self) -> Tensor:
        due = self.finished & (self.remaining > 0)
        self.remaining = self.remaining - due.long()
        self.frozen.append(self.finished & ~due)
        return due


@dataclass(frozen=True)
class WholeRollout:
    """Index of the E episodes of a rollout of whole episodes, ordered by environment, then by time."""

    episode: Tensor  # [T, N] number of each decision's episode; -1: frozen, or an episode that continues afterwards
    last: Tensor  # [E] the last decisions, t * N + n
    env: Tensor  # [E]
    task: Tensor  # [E]
    group: Tensor  # [E] the same for episodes of one task and initial state; unique where states are not numbered

    @staticmethod
    def of(rollout: Rollout) -> WholeRollout:
        """Index of the episodes that end in `rollout`."""
        done = rollout.done
        per_env = done.sum(0)
        number = done.long().cumsum(0) - done.long()  # within its environment
        running = rollout.executed.any(-1) | done
        # offset of the environment's first episode plus the number within the environment
        episode = torch.where(running & (number < per_env), number + per_env.cumsum(0) - per_env, -1)
        env, t = done.T.nonzero().unbind(1)
        last = t * done.shape[1] + env
        task = rollout.task_index.to(env.device)[env]
        if rollout.start is None:
            return WholeRollout(episode, last, env, task, torch.arange(len(last), device=env.device))
        pairs = torch.stack((task, rollout.start.flatten()[last].to(env.device)), 1)
        return WholeRollout(episode, last, env, task, pairs.unique(dim=0, return_inverse=True)[1])

    def __len__(self) -> int:
        """Number of episodes."""
        return len(self.last)

    @property
    def decision(self) -> Tensor:
        """Number of each decision [T, N] within its episode, from 0; undefined outside of episodes."""
        time = torch.arange(len(self.episode), device=self.episode.device).unsqueeze(1).expand_as(self.episode)
        within = self.episode >= 0
        first = torch.full((len(self),), len(self.episode), device=self.episode.device)
        return time - self.spread(first.scatter_reduce(0, self.episode[within], time[within], "amin"))

    def at_end(self, values: Tensor) -> Tensor:
        """Entries of `values` [T, N] at the last decision of each episode, [E]."""
        return values.flatten()[self.last]

    def spread(self, values: Tensor) -> Tensor:
        """Values [E] of episodes, repeated at each of their decisions [T, N]; zero elsewhere."""
        repeated = values[self.episode.clamp_min(0)] if len(values) else values.new_zeros(self.episode.shape)
        return torch.where(self.episode >= 0, repeated, torch.zeros_like(repeated))
