"""Common parts of the adapters for training libraries: beginning of episodes, and observations of fixed size."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.environment import Environment, NumberedStarts
from embodied.environments.engine import STARTS_PER_SEED
from embodied.errors import UserError


class Beginner:
    """Begins episodes of `env`, from its own next initial states or from the states that a seed selects.

    Raises:
        UserError: if an observation varies in size, which `library` does not support.
    """

    def __init__(self, env: Environment, library: str) -> None:
        varying = [name for name, spec in env.contract.observation.items() if -1 in spec.shape]
        if varying:
            raise UserError(f"{library} reads observations of fixed size, got {', '.join(varying)} that vary")
        self.env = env
        self._next: int | None = None

    def seed(self, seed: int) -> None:
        """Begin later episodes from the initial states of `seed`, like environments made with that seed.

        Raises:
            UserError: if initial states have no numbers.
        """
        if not isinstance(self.env, NumberedStarts):
            raise UserError("the initial states of this environment have no numbers; reset it without a seed")
        self._next = seed % (1 << 31) * STARTS_PER_SEED

    def begin(self, mask: Tensor) -> TensorDict:
        """Begin episodes where `mask` [N]; returns a copy of all observations."""
        if self._next is None:
            return self.env.reset(mask).clone()
        assert isinstance(self.env, NumberedStarts)
        starts = self._next + mask.long().cumsum(0) - 1
        self._next += int(mask.sum())
        number = starts % self.env.num_starts if self.env.num_starts else starts
        return self.env.reset(mask, number.clamp_min(0)).clone()

    def chunk(self, actions: Tensor) -> Tensor:
        """`actions` as a chunk [N, K, A] of the environment."""
        contract = self.env.contract
        return actions.reshape(self.env.num_envs, contract.executed, *contract.action.shape).to(self.env.device)


def limits(env: Environment, library: str) -> tuple[Tensor, Tensor]:
    """Bounds of a chunk [K, A], low and high, on the environment's device.

    Raises:
        UserError: if actions have no limits.
    """
    action = env.contract.action
    if not action.low:
        raise UserError(f"{library} explores within action limits, and the contract has none")
    low, high = (torch.tensor(each, device=env.device) for each in (action.low, action.high))
    return low.repeat(env.contract.executed, 1), high.repeat(env.contract.executed, 1)
