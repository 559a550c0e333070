"""A test simulator with no optional capabilities: no numbered initial states, no restorable state."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.environment import Transition
from tests.embodied.reach import Reach


class Nameless:
    """Reach that chooses its initial states itself; `begun` lists them by environment."""

    def __init__(self, num_envs: int, tasks: int = 2, seed: int = 0) -> None:
        self._reach = Reach(num_envs, tasks=tasks)
        self.contract, self.num_envs, self.device = self._reach.contract, num_envs, self._reach.device
        self.task_names, self.instructions = self._reach.task_names, self._reach.instructions
        self.task_index = self._reach.task_index
        self._generator = torch.Generator().manual_seed(seed)
        self.begun: list[tuple[int, int]] = []
        self.closed = False

    def reset(self, mask: Tensor | None = None) -> TensorDict:
        mask = torch.ones(self.num_envs, dtype=torch.bool) if mask is None else mask
        chosen = torch.randint(1000, (self.num_envs,), generator=self._generator)
        self.begun += [(env, int(chosen[env])) for env in mask.nonzero().flatten().tolist()]
        return self._reach.reset(mask, chosen)

    def step(self, actions: Tensor) -> Transition:
        return self._reach.step(actions)

    def close(self) -> None:
        self.closed = True


class Single(Nameless):
    """A simulator that can exist once per process, for training and all evaluations by turns."""

    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs)
        self.place, self.asked = ("wide", "train"), ("wide", "train")
        self.visits: list[tuple[str, str]] = []  # of every reset of all

    def switch(self, distribution: str, split: str) -> None:
        self.asked = distribution, split

    def reset(self, mask: Tensor | None = None) -> TensorDict:
        everywhere = mask is None or bool(mask.all())
        assert everywhere or self.asked == self.place, "the first reset after a switch is of all"
        if everywhere:
            self.place = self.asked
            self.visits.append(self.place)
        return super().reset(mask)

    def step(self, actions: Tensor) -> Transition:
        assert self.asked == self.place, "episodes of another place go on"
        return super().step(actions)
