"""Scales of rewards, so that one learning rate of the critic, or one range of its values, suits every task."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from embodied.algorithms.advantage import chunk_reward, gae
from embodied.rollout.rollout import Rollout
from embodied.world import ALONE, World


class RewardScale:
    """Factor of rewards: one over the running standard deviation of discounted returns; 1 until there is a reward.

    Returns contain only rewards up to the end of the episode or the rollout, no values, so that an untrained value
    function has no influence. While rewards are rare the deviation is small, and the factor would be far too large once
    they are common: it is at most one over the root mean square of the nonzero rewards per decision.
    """

    def __init__(self, discount: float) -> None:
        self.discount = discount
        # count, sum of returns, sum of squared returns
        self.decisions = 0
        self.total = 0.0
        self.squares = 0.0
        # decisions with a reward
        self.rewarded = 0
        self.squared_rewards = 0.0

    def __call__(self) -> float:
        """Current factor."""
        if self.squared_rewards == 0.0:
            return 1.0
        variance = self.squares / self.decisions - (self.total / self.decisions) ** 2
        # 1 / max(std(G), rms of nonzero rewards)
        return 1.0 / math.sqrt(max(variance, self.squared_rewards / self.rewarded))

    def add(self, rollout: Rollout, world: World = ALONE) -> None:
        """Add the rewards of one rollout of each process, except those of simulations that diverged."""
        reward = rollout.reward.masked_fill(~rollout.simulated.unsqueeze(-1), 0.0)
        rewards = chunk_reward(reward, self.discount).double()
        endings = (rollout.executed, rollout.terminated, rollout.truncated)
        zero_values = torch.zeros_like(rewards)
        # with V = 0 and lambda = 1, GAE's return is the discounted sum of rewards to the end
        returns, _ = gae(reward, *endings, zero_values, zero_values, discount=self.discount, gae_lambda=1.0)
        added = returns.numel(), returns.sum(), returns.square().sum(), rewards.count_nonzero(), rewards.square().sum()
        as_sums = {"dtype": torch.float64, "device": rewards.device}
        sums = world.sum(torch.stack([torch.as_tensor(each, **as_sums) for each in added])).tolist()
        self.decisions += int(sums[0])
        self.total += sums[1]
        self.squares += sums[2]
        self.rewarded += int(sums[3])
        self.squared_rewards += sums[4]

    def state_dict(self) -> dict[str, Any]:
        """Counts and sums so far."""
        return {name: value for name, value in vars(self).items() if name != "discount"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        vars(self).update(state)


class RunningReturnScale:
    """Factor of rewards, so that returns are in [-bound, bound]: 1 / max(std, largest / bound) (arXiv 2604.04539).

    `std` is the standard deviation of running returns G <- discount G + r, which begin at 0 with each episode, and
    `largest` their largest amount so far; 1 until there is a reward. Decisions with unknown consequences do not count:
    one reward of a simulation that blew up would make all others small for ever.
    """

    def __init__(self, discount: float, bound: float) -> None:
        self.discount = discount
        self.bound = bound
        self.running: Tensor | None = None  # [N]
        # count, sum and sum of squares of running returns, their largest amount
        self.steps = 0
        self.total = 0.0
        self.squares = 0.0
        self.largest = 0.0

    def __call__(self) -> float:
        """Current factor."""
        if self.largest == 0.0:
            return 1.0
        variance = self.squares / self.steps - (self.total / self.steps) ** 2
        return 1.0 / max(math.sqrt(max(variance, 0.0)), self.largest / self.bound)

    def add(self, rollout: Rollout) -> None:
        """Add the rewards of one rollout."""
        rewards = rollout.reward.double()
        running = torch.zeros_like(rewards[0, :, 0]) if self.running is None else self.running.to(rewards)
        if rollout.episode_steps is not None:  # episodes may have been abandoned between rollouts
            begins = rollout.episode_steps[0] == rollout.executed[0].sum(-1)
            running = torch.where(begins.to(running.device), 0.0, running)
        returns = []
        counted = rollout.executed & rollout.simulated.unsqueeze(-1)
        for reward, executed, done in zip(rewards, counted, rollout.done, strict=True):
            for action in range(reward.shape[-1]):
                # G <- discount G + r, of executed actions
                running = torch.where(executed[:, action], self.discount * running + reward[:, action], running)
                returns.append(running[executed[:, action]])
            running = torch.where(done, 0.0, running)
        self.running = running
        added = torch.cat(returns)
        self.steps += added.numel()
        self.total += float(added.sum())
        self.squares += float(added.square().sum())
        self.largest = max(self.largest, float(added.abs().amax())) if added.numel() else self.largest

    def state_dict(self) -> dict[str, Any]:
        """Running returns, counts and sums so far."""
        return {name: value for name, value in vars(self).items() if name not in ("discount", "bound")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        vars(self).update(state)
