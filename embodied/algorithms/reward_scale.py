"""What rewards are multiplied by, so that one learning rate of the critic suits every task."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from embodied.advantage import chunk_reward
from embodied.rollout import Rollout


class RewardScale:
    """One over the running root mean square of the discounted sums of rewards; 1 until there is a reward.

    Rewards alone are summed, forward through each episode and on across rollouts (as in baselines' `VecNormalize`): a
    value function that has learned nothing yet has no say. Decisions before the first reward of an episode are left
    out, as they do not tell how large rewards are: a rare reward would seem small, and its scale would be far too
    large until it is common.
    """

    def __init__(self, discount: float) -> None:
        self.discount = discount
        self.sums: Tensor | None = None  # [N], of the running episodes
        self.count, self.squares = 0, 0.0  # of all sums so far that are not zero

    def __call__(self) -> float:
        """The scale as of now."""
        return (self.count / self.squares) ** 0.5 if self.squares > 0.0 else 1.0

    def add(self, rollout: Rollout) -> None:
        """Take in the rewards of a rollout that follows the one before."""
        rewards = chunk_reward(rollout.reward, self.discount).double()
        decay = self.discount ** rollout.executed.sum(-1).double()
        sums = torch.zeros_like(rewards[0]) if self.sums is None else self.sums.to(rewards.device)
        for reward, carry, done in zip(rewards, decay, rollout.done, strict=True):
            sums = carry * sums + reward
            self.count += int(sums.count_nonzero())
            self.squares += float(sums.square().sum())
            sums = sums * ~done
        self.sums = sums

    def state_dict(self) -> dict[str, Any]:
        """What was summed so far."""
        return {"sums": self.sums, "count": self.count, "squares": self.squares}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.sums, self.count, self.squares = state["sums"], state["count"], state["squares"]
