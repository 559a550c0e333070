"""Groups of episodes that go on across iterations: their decisions so far wait for the last of their episodes.

Partial rollouts, as in Kimi k1.5 (arXiv 2501.12599). Letters: N environments, T decisions, E episodes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from embodied.rollout.groups import WholeRollout
from embodied.rollout.joining import consecutive, since
from embodied.rollout.rollout import Rollout


class OpenGroups:
    """Decisions since the beginning of the oldest group that lacks some of its `size` episodes."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.rollout: Rollout | None = None
        self.used = torch.zeros(0, 0, dtype=torch.bool)  # [T, N] decisions of `rollout` in groups that were complete
        self.fresh = torch.zeros(0, dtype=torch.int64)

    def continued(self, rollout: Rollout, fresh: Tensor) -> Rollout:
        """Concatenate the waiting decisions and `rollout`, which follows on them.

        The first starts `fresh` of the iteration change when running episodes are abandoned: nothing waits for them.
        """
        used = torch.zeros_like(rollout.done)
        if self.rollout is not None and torch.equal(self.fresh, fresh):
            rollout = consecutive(self.rollout, rollout)
            used = torch.cat((self.used.to(used.device), used))
        self.used, self.fresh = used, fresh.clone()
        return rollout

    def take(self, rollout: Rollout, episodes: WholeRollout) -> Tensor:
        """Episodes [E] of groups that are complete now, for the first time; the decisions of all others wait.

        The `episodes` are those of `rollout`, which `continued` has returned.
        """
        is_open = ~episodes.at_end(self.used)
        count = torch.bincount(episodes.group[is_open], minlength=len(episodes))
        complete = is_open & (count[episodes.group] >= self.size)
        self.used = self.used | episodes.spread(complete)
        waiting = (~self.used).any(1).nonzero()
        self.rollout = None
        if len(waiting):
            first = int(waiting[0])
            self.rollout, self.used = since(rollout, first), self.used[first:]
        return complete

    def state_dict(self) -> dict[str, Any]:
        """The waiting decisions."""
        rollout = None if self.rollout is None else dict(vars(self.rollout))
        return {"rollout": rollout, "used": self.used, "fresh": self.fresh}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.rollout = None if state["rollout"] is None else Rollout(**state["rollout"])
        self.used, self.fresh = state["used"], state["fresh"]
