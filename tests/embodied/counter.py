"""The smallest simulator on the engine: every action is added to the environment's number."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.contract import Contract, TensorSpec
from embodied.environments.engine import Outcome, RestorableEngine

OBSERVED = {"x": TensorSpec((1,)), "start": TensorSpec((1,))}
GOAL, ABYSS, BLOWN, HOME = 5.0, -5.0, 50.0, 0.5


class Counter(RestorableEngine):
    """x begins at 0; at `GOAL` the task ends with success, at `ABYSS` without, at `BLOWN` the simulation diverges.

    A step to `HOME` truncates the episode before its limit.
    """

    def __init__(
        self,
        num_envs: int = 4,
        step_limit: int = 7,
        tasks: int = 2,
        group: int = 1,
        executed: int = 3,
        **options: Any,
    ) -> None:
        self.group = group
        action = TensorSpec((1,), low=(-1.0,), high=(1.0,))
        contract = Contract(OBSERVED, action, 0.1, horizon=executed, executed=executed)
        names = tuple(f"task {index}" for index in range(tasks))
        super().__init__(contract, num_envs, step_limit, task_names=names, **options)
        self.x = torch.zeros(num_envs)
        self.begun: list[tuple[list[int], list[int]]] = []
        self.remaining_steps: list[list[int]] = []

    def begin(self, ids: Tensor, starts: Tensor) -> None:
        self.begun.append((ids.tolist(), starts.tolist()))
        self.x[ids] = 0.0

    def advance(self, actions: Tensor, remaining_steps: Tensor) -> Outcome:
        self.remaining_steps.append(remaining_steps.tolist())
        executed = torch.zeros(actions.shape[:2], dtype=torch.bool)
        ended = torch.zeros(self.num_envs, dtype=torch.bool)
        for k, action in enumerate(actions[..., 0].unbind(1)):
            executed[:, k] = (remaining_steps > k) & ~ended
            self.x = torch.where(executed[:, k], self.x + action, self.x)
            ended = ended | self._won() | (self.x == ABYSS) | (self.x == BLOWN) | (self.x == HOME)
        won, lost = self._won(), self.x == ABYSS
        home, blown = self.x == HOME, self.x == BLOWN
        told = {"metrics": {"x": self.x}, "failures": {"it fell": lost}}
        return Outcome(executed.float(), executed, won | lost, won, home, blown, **told)

    def observe(self) -> TensorDict:
        seen = {"x": self.x.clone(), "start": (self.start % 1000).float()}
        return TensorDict({name: part.unsqueeze(1) for name, part in seen.items()}, [self.num_envs])

    def save(self) -> dict[str, Any]:
        return {"x": self.x.clone()}

    def restore(self, state: dict[str, Any]) -> None:
        self.x = state["x"].clone()

    def _won(self) -> Tensor:
        return self.x == GOAL


class Costly(Counter):
    """A Counter whose actions cost their square, and whose episodes are hasty if their first action is large."""

    def advance(self, actions: Tensor, remaining_steps: Tensor) -> Outcome:
        outcome = super().advance(actions, remaining_steps)
        outcome.signals["cost"] = actions[..., 0].square() * outcome.executed
        outcome.events["hasty"] = (self.steps == 0) & (actions[:, 0, 0] > 0.5)
        outcome.events["below"] = self.x < 0.0
        return outcome
