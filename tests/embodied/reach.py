"""A small real environment: push a point on a line to the origin, in chunks, within a step limit."""

from typing import Any

import torch
from tensordict import TensorDict

from embodied.contract import Contract, TensorSpec
from embodied.environment import Transition


class Reach:
    """The initial position depends on (task, start); each action moves it; |x| < 0.1 ends with success."""

    def __init__(
        self,
        num_envs: int,
        *,
        executed: int = 2,
        horizon: int = 2,
        step_limit: int = 7,
        tasks: int = 2,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        spec = {"position": TensorSpec((1,), unit="m"), "task": TensorSpec((1,))}
        action = TensorSpec((1,), low=(-0.25,), high=(0.25,))
        self.contract = Contract(spec, action, 0.1, horizon, executed)
        self.num_envs, self.device, self.step_limit = num_envs, torch.device(device), step_limit
        self.num_starts, self.seed = None, seed
        self.task_names = self.instructions = tuple(f"task {index}" for index in range(tasks))
        self.task_index = torch.arange(num_envs, device=self.device) % tasks
        self.start = torch.full((num_envs,), -1, device=self.device)
        self.steps = torch.zeros(num_envs, dtype=torch.long, device=self.device)
        self.position = torch.zeros(num_envs, device=self.device)
        self.frozen = torch.ones(num_envs, dtype=torch.bool, device=self.device)

    def reset(self, mask: torch.Tensor | None = None, starts: torch.Tensor | None = None) -> TensorDict:
        mask = torch.ones_like(self.frozen) if mask is None else mask
        if (self.start < 0).all():
            self.start = torch.full_like(self.start, 100 * self.seed - 1)
        self.start = torch.where(mask, self.start + 1 if starts is None else starts, self.start)
        sign = 1.0 - 2.0 * (self.start % 2)
        self.position = torch.where(mask, sign * (0.3 + 0.05 * (self.start % 11)), self.position)
        self.steps = torch.where(mask, 0, self.steps)
        self.frozen = self.frozen & ~mask
        return self._observation()

    def step(self, actions: torch.Tensor) -> Transition:
        assert actions.shape == (self.num_envs, self.contract.executed, 1)
        if (self.start < 0).any() or not actions.isfinite().all():
            raise ValueError("expected finite actions after a reset")
        reward = torch.zeros(actions.shape[:2], device=self.device)
        executed = torch.zeros_like(reward, dtype=torch.bool)
        for k in range(self.contract.executed):
            running = ~self.frozen
            executed[:, k] = running
            self.position = torch.where(running, self.position + actions[:, k, 0], self.position)
            self.steps += running
            reached = running & (self.position.abs() < 0.1)
            reward[:, k] = reached.float()
            self.frozen = self.frozen | reached | (self.steps >= self.step_limit)
        success = self.position.abs() < 0.1
        terminated, truncated = self.frozen & success, self.frozen & ~success
        return Transition(self._observation(), reward, executed, terminated, truncated, terminated.clone())

    def close(self) -> None: ...

    def _observation(self) -> TensorDict:
        task = self.task_index.float().unsqueeze(1)
        return TensorDict({"position": self.position.unsqueeze(1).clone(), "task": task}, batch_size=[self.num_envs])

    def state_dict(self) -> dict[str, Any]:
        return {key: getattr(self, key).clone() for key in ("start", "steps", "position", "frozen")}

    def load_state_dict(self, state: dict[str, Any]) -> TensorDict:
        for key, value in state.items():
            setattr(self, key, value.to(self.device, copy=True))
        return self._observation()


class FixedStarts:
    """Every episode of an environment begins at the initial state that was given for it [N]."""

    def __init__(self, starts: list[int]) -> None:
        self.starts = torch.tensor(starts)

    def __call__(self, finished: torch.Tensor, success: torch.Tensor) -> torch.Tensor:
        return self.starts

    def abandon(self) -> None: ...

    def metrics(self) -> dict[str, float]:
        return {}
