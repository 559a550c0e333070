"""A small differentiable environment: Reach with the negative squared distance as reward."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.environment import Transition, clip_gradient
from embodied.rollout.rollout import Rollout
from tests.embodied.reach import Reach


class SmoothReach(Reach):
    """Reward of every executed action is -x^2 after it; gradients pass through `step`."""

    def __init__(self, num_envs: int, step_limit: int = 7, device: torch.device | str = "cpu") -> None:
        super().__init__(num_envs, executed=1, horizon=1, step_limit=step_limit, device=device)

    def step(self, actions: Tensor) -> Transition:
        transition = super().step(actions)
        return replace(
            transition,
            reward=-self.position.square().unsqueeze(1) * transition.executed,
            metrics={"distance_m": torch.where(transition.done, self.position.abs().detach(), torch.nan)},
        )

    def detach(self) -> None:
        self.position = self.position.detach()

    def unroll(
        self, layers: Sequence[tuple[Tensor, Tensor]], decisions: int, max_action_gradient: float = math.inf
    ) -> Rollout:
        self.detach()
        seen, acted, made = [], [], []
        for _ in range(decisions):
            seen.append(self._observation())
            hidden = torch.cat([seen[-1][key] for key in self.contract.observation], -1)
            for weight, bias in layers:
                hidden = torch.tanh(hidden @ weight.T + bias)
            acted.append(0.25 * hidden.unsqueeze(1))
            clip_gradient(acted[-1], max_action_gradient)
            made.append(self.step(acted[-1]))
        shape = (decisions, self.num_envs)
        return Rollout(
            observation=torch.stack(seen),
            last_observation=made[-1].observation,
            actions=torch.stack(acted),
            sample=TensorDict({}, shape),
            log_prob=torch.zeros(*shape, 1, device=self.device),
            **{
                name: torch.stack([getattr(transition, name) for transition in made])
                for name in ("reward", "executed", "terminated", "truncated", "success")
            },
            task_index=self.task_index,
            start=self.start.expand(shape),
            simulation_s=0.0,
            policy_s=0.0,
        )
