"""Which initial states training episodes begin from."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

RECENT = 200


class RetryStarts:
    """Fresh initial states, and again those that failed, until an attempt succeeds or `attempts` are used up.

    A simple form of prioritised replay of starts (arXiv 2010.03934): a share `retry` of restarts goes to failed states.
    """

    def __init__(self, task_index: Tensor, *, retry: float, attempts: int, generator: torch.Generator) -> None:
        self.task_index, self.retry, self.attempts, self.generator = task_index.tolist(), retry, attempts, generator
        tasks = max(self.task_index) + 1
        first = int(torch.randint(1 << 40, (), generator=generator))  # another seed trains on other states
        self.fresh = [first] * tasks
        self.failed: list[deque[tuple[int, int]]] = [deque() for _ in range(tasks)]
        self.running: list[tuple[int, int] | None] = [None] * len(self.task_index)  # initial state, attempts before
        self.firsts: deque[bool] = deque(maxlen=RECENT)  # whether the last first attempts succeeded
        self.ended = [False] * len(self.task_index)  # whether the environment has ended an episode

    def __call__(self, finished: Tensor, success: Tensor) -> Tensor:
        """Initial states [N] for environments that `finished` [N] with `success` [N]; elsewhere 0, which is unused."""
        starts = torch.zeros(len(self.task_index), dtype=torch.long)
        draws = torch.rand(len(self.task_index), generator=self.generator)
        for env in torch.nonzero(finished).flatten().tolist():
            task, before = self.task_index[env], self.running[env]
            self.ended[env] = before is not None
            if before and before[1] == 0:
                self.firsts.append(bool(success[env]))
            if before and not success[env] and before[1] + 1 < self.attempts:
                self.failed[task].append((before[0], before[1] + 1))
            if self.failed[task] and draws[env] < self.retry:
                self.running[env] = self.failed[task].popleft()
            else:
                self.running[env] = (self.fresh[task], 0)
                self.fresh[task] += 1
            starts[env] = self.running[env][0]
        return starts

    def first_attempts(self) -> dict[str, float]:
        """`first_attempts_success`, of the last ones: what the policy can do, whatever is tried again.

        Empty until every environment has ended an episode: what ends first is what succeeds.
        """
        return {"first_attempts_success": sum(self.firsts) / len(self.firsts)} if all(self.ended) else {}

    def state_dict(self) -> dict[str, Any]:
        """Queues and counters."""
        return {
            "fresh": self.fresh,
            "failed": [list(map(list, queue)) for queue in self.failed],
            "running": self.running,
            "firsts": list(self.firsts),
            "ended": self.ended,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.fresh = list(state["fresh"])
        self.failed = [deque((start, tries) for start, tries in queue) for queue in state["failed"]]
        self.running = [None if running is None else (running[0], running[1]) for running in state["running"]]
        self.firsts, self.ended = deque(state["firsts"], maxlen=RECENT), list(state["ended"])
