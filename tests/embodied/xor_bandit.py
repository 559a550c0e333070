"""A bandit whose best actions have elements of opposite signs: no element shows it alone."""

from __future__ import annotations

import torch
from tensordict import TensorDict

from embodied.contract import Contract, TensorSpec
from embodied.environment import Transition

MIDDLE = 0.7
"""Reward of an action with an element in the middle third: less than for opposite signs, more than for a mean sign."""


class XorBandit:
    """Episodes of one step: reward 1 for opposite signs, 0 for equal ones, `MIDDLE` if an element is in (-1/3, 1/3).

    The mean reward over the other element is 1/3 (1 + 0 + MIDDLE) of either sign, and MIDDLE of the middle: whoever
    chooses elements independently of one another, by their mean rewards, chooses the middle.
    """

    def __init__(self, num_envs: int) -> None:
        action = TensorSpec((2,), low=(-1.0, -1.0), high=(1.0, 1.0))
        self.contract = Contract({"constant": TensorSpec((1,))}, action, 0.1)
        self.num_envs, self.device, self.num_starts, self.seed = num_envs, torch.device("cpu"), None, 0
        self.task_names = self.instructions = ("xor",)
        self.task_index = torch.zeros(num_envs, dtype=torch.long)
        self.start = torch.zeros(num_envs, dtype=torch.long)
        self.frozen = torch.ones(num_envs, dtype=torch.bool)

    def reset(self, mask: torch.Tensor | None = None, starts: torch.Tensor | None = None) -> TensorDict:
        return TensorDict({"constant": torch.ones(self.num_envs, 1)}, [self.num_envs])

    def step(self, actions: torch.Tensor) -> Transition:
        reward = rewards(actions[:, 0]).unsqueeze(1)
        ended = torch.ones(self.num_envs, dtype=torch.bool)
        return Transition(self.reset(), reward, ended.unsqueeze(1).clone(), ended, ~ended, reward[:, 0] == 1.0)

    def close(self) -> None: ...


def rewards(actions: torch.Tensor) -> torch.Tensor:
    """Rewards [N] of actions [N, 2]."""
    is_middle = (actions.abs() < 1 / 3).any(-1)
    return torch.where(is_middle, MIDDLE, (actions.prod(-1) < 0).float())
