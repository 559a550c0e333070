"""Early end of hopeless episodes: those that run much longer than successes of their task.

Differs from ActiveVLN's early stop (arXiv 2509.12618), which is for navigation: the only sign is that an episode takes
`factor` times as many decisions as the longest of the last `REMEMBERED` successes of its task. The longest rather than
the median, because successes that are cut off would shorten the median, and with it the limit, again and again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from embodied.environment import Transition

REMEMBERED = 50
"""Number of successes of each task whose lengths count."""
NEEDED = 10
"""Number of successes of a task before its episodes are ended early."""


class Patience:
    """Rule that truncates episodes at `factor` times the decisions of the longest recent success of their task."""

    def __init__(self, task_index: Tensor, factor: float) -> None:
        self.task_index = task_index
        self.factor = factor
        self.lengths: list[list[int]] = [[] for _ in range(int(task_index.max()) + 1)]  # of successes, in decisions
        self.decisions = torch.zeros(len(task_index), dtype=torch.int64, device=task_index.device)
        self.stopped = torch.zeros_like(self.decisions, dtype=torch.bool)  # ended early, and not restarted yet

    def __call__(self, due: Tensor, transition: Transition) -> Transition:
        """Copy of `transition` in which hopeless episodes are truncated, with the event "stopped".

        Environments `due` [N] have begun an episode before this decision.
        """
        self.stopped = self.stopped & ~due
        running = due | (self.decisions > 0)  # 0: the episode has ended
        self.decisions = torch.where(due, 1, torch.where(running, self.decisions + 1, 0))
        for env in (running & transition.done & transition.success).nonzero().flatten().tolist():
            task = int(self.task_index[env])
            self.lengths[task] = [*self.lengths[task], int(self.decisions[env])][-REMEMBERED:]
        stopped = running & ~transition.done & (self.decisions >= self._limits()[self.task_index])
        self.stopped = self.stopped | stopped
        self.decisions = torch.where(transition.done | self.stopped, 0, self.decisions)
        return replace(
            transition,
            truncated=transition.truncated | (self.stopped & ~transition.terminated),
            success=transition.success & ~self.stopped,
            events=transition.events | {"stopped": stopped},
        )

    def _limits(self) -> Tensor:
        """Decisions after which an episode of each task is hopeless; infinite with fewer than `NEEDED` successes."""
        longest = [float(max(each)) if len(each) >= NEEDED else torch.inf for each in self.lengths]
        # limit = factor * longest recent success
        return self.factor * torch.tensor(longest, device=self.decisions.device)

    def state_dict(self) -> dict[str, Any]:
        """Lengths of successes, and decisions of the running episodes."""
        return {"lengths": self.lengths, "decisions": self.decisions, "stopped": self.stopped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.lengths = [list(lengths) for lengths in state["lengths"]]
        self.decisions, self.stopped = (state[name].to(self.decisions.device) for name in ("decisions", "stopped"))
