"""Choice of the initial states of training episodes."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from embodied import seeding

RECENT = 200


class Starts(Protocol):
    """Choice of the initial states of episodes."""

    def __call__(self, finished: Tensor, success: Tensor) -> Tensor:
        """Initial states [N] for environments that `finished` [N] with `success` [N]; values elsewhere are unused."""
        ...

    def abandon(self) -> None:
        """Drop the running episodes: all environments are about to begin new ones."""
        ...

    def metrics(self) -> dict[str, float]:
        """Metrics of success by initial state, by name."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        ...


@runtime_checkable
class OwnStarts(Starts, Protocol):
    """Starts of which each process of a run has its own copy."""

    def separate(self, generator: torch.Generator) -> None:
        """Draw from `generator` from now on, and begin at another state.

        The learner's own generator stays the same in all processes.
        """
        ...


class RetryStarts:
    """Starts that take new initial states, and retry failed ones until success or until `attempts` are used up.

    A simple form of prioritised replay of starts (arXiv 2010.03934): a share `retry` of restarts goes to failed
    states.
    """

    def __init__(self, task_index: Tensor, *, retry: float, attempts: int, generator: torch.Generator) -> None:
        self.task_index = task_index.cpu()
        self.retry = retry
        self.attempts = attempts
        tasks = int(self.task_index.max()) + 1
        count = len(task_index)
        self.fresh = torch.full((tasks,), random_first_start(generator))
        self.generator = seeding.child(generator)
        self.failed = [torch.empty(0, 2, dtype=torch.int64) for _ in range(tasks)]  # initial state, earlier attempts
        self.running = torch.full((count, 2), -1)  # the same of the running episodes; -1: none yet
        self.firsts = torch.empty(0, dtype=torch.bool)  # success of the last first attempts
        self.ended = torch.zeros(count, dtype=torch.bool)  # whether the environment has ended an episode

    def __call__(self, finished: Tensor, success: Tensor) -> Tensor:
        """Initial states [N] for environments that `finished` [N] with `success` [N]; elsewhere 0, which is unused."""
        finished = finished.cpu()
        success = success.cpu()
        draws = torch.rand(len(self.task_index), generator=self.generator)
        began = self.running[:, 0] >= 0
        self.ended = torch.where(finished, began, self.ended)
        self.firsts = torch.cat((self.firsts, success[finished & (self.running[:, 1] == 0)]))[-RECENT:]
        is_failed = finished & began & ~success & (self.running[:, 1] + 1 < self.attempts)
        for task in self.task_index[finished].unique().tolist():
            self._deal(task, (finished & (self.task_index == task)).nonzero().squeeze(1), is_failed, draws < self.retry)
        return torch.where(finished, self.running[:, 0], 0)

    def separate(self, generator: torch.Generator) -> None:
        """See `OwnStarts.separate`."""
        self.generator = generator
        self.fresh = torch.full_like(self.fresh, random_first_start(generator))

    def abandon(self) -> None:
        """Drop the running episodes: they do not count, and their retries return to the queue."""
        retries = self.running[:, 1] > 0
        for task in self.task_index[retries].unique().tolist():
            retried = self.running[retries & (self.task_index == task)]
            self.failed[task] = torch.cat((retried, self.failed[task]))
        self.running = torch.full_like(self.running, -1)

    def _deal(self, task: int, rows: Tensor, again: Tensor, requested: Tensor) -> None:
        """Assign initial states to environments `rows` of `task`, in order; failures (`again` [N]) are queued first.

        One after the other, each environment appends its failure to the queue, then takes the head of the queue if it
        is `requested` [N] and not empty. The queue's length after each is max(length + puts - takes, 0): Lindley's
        recursion, whose solution is a running minimum.
        """
        puts = again[rows].long()
        takes = requested[rows].long()
        queue = torch.cat((self.failed[task], self.running[rows[puts.bool()]] + torch.tensor([0, 1])))
        walk = len(self.failed[task]) + (puts - takes).cumsum(0)
        # Lindley: length_i = walk_i - min(0, min_{j <= i} walk_j)
        length = walk - walk.cummin(0).values.clamp_max(0)
        before = torch.cat((torch.tensor([len(self.failed[task])]), length[:-1]))
        is_retry = takes.bool() & (before + puts > 0)
        fresh = self.fresh[task] + (~is_retry).long().cumsum(0) - 1
        self.running[rows] = torch.stack((fresh, torch.zeros_like(fresh)), 1)
        count = int(is_retry.sum())
        self.running[rows[is_retry]] = queue[:count]
        self.failed[task] = queue[count:]
        self.fresh[task] += len(rows) - count

    def metrics(self) -> dict[str, float]:
        """Metric `first_attempts_success`: success rate of the last `RECENT` first attempts, without retries.

        Empty until every environment has ended an episode, because successful episodes end first.
        """
        return {"first_attempts_success": float(self.firsts.double().mean())} if bool(self.ended.all()) else {}

    def state_dict(self) -> dict[str, Any]:
        """Queues and counters."""
        copies = {name: getattr(self, name).clone() for name in ("fresh", "running", "firsts", "ended")}
        return copies | {"failed": list(self.failed), "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        for name in ("fresh", "running", "firsts", "ended"):
            setattr(self, name, state[name].clone())
        self.failed = list(state["failed"])
        self.generator.set_state(state["generator"])


def random_first_start(generator: torch.Generator) -> int:
    """Random number of the first initial state, so that seeds train on different ones."""
    return int(torch.randint(1 << 40, (), generator=generator))
