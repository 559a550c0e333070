"""Our environments as rsl_rl's VecEnv (version 5).

Letters in shape comments: N environments, K executed actions of a chunk, A action dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.environment import NumberedStarts
from embodied.environments.engine import EpisodeEngine
from embodied.errors import UserError
from embodied.extras import needs_extra
from sims.gym.starting import Beginner, limits

with needs_extra("rsl-rl"):
    from rsl_rl.env import VecEnv


def as_rsl_rl(env: NumberedStarts) -> RslRlEnv:
    """`env` as an rsl_rl.env.VecEnv, for an unchanged OnPolicyRunner."""
    return RslRlEnv(env)


class RslRlEnv(VecEnv):
    """N environments that are reset in the step in which they end.

    Observation groups are "policy", all numbers that robots can measure, "privileged", all others where there are any,
    and each picture by its name, [N, colours, height, width] from 0 to 1. Actions [N, K * A] are in half ranges around
    the middle of the limits. `extras` hold "time_outs", truncated episodes, "final_obs", the true observations after
    the step, and in "log" the success and the metrics of episodes that ended.

    Raises:
        UserError: for observations that vary in size or are text, and actions without limits.
    """

    def __init__(self, env: NumberedStarts) -> None:
        self.env = env
        self.num_envs = env.num_envs
        self.device = env.device
        self._beginner = Beginner(env, "rsl_rl")
        specs = env.contract.observation
        if text := [name for name, spec in specs.items() if spec.is_text]:
            raise UserError(f"rsl_rl reads numbers and pictures, got {', '.join(text)}, which is text")
        low, high = limits(env, "rsl_rl")
        # [K, A]
        self._middle = (high + low) / 2
        self._half = (high - low) / 2
        self.num_actions = low.numel()
        self.max_episode_length = -(-env.step_limit // env.contract.executed)
        self.cfg = {"contract": env.contract.to_dict(), "tasks": list(env.task_names)}
        self._pictures = [name for name, spec in specs.items() if spec.is_picture]
        numbers = [name for name in specs if name not in self._pictures]
        self._groups = {
            "policy": [name for name in numbers if not specs[name].privileged],
            "privileged": [name for name in numbers if specs[name].privileged],
        }
        self._lengths = torch.zeros(self.num_envs, dtype=torch.int64, device=env.device)
        self._observation = self._grouped(self._beginner.begin(torch.ones_like(self._lengths, dtype=torch.bool)))

    @property
    def episode_length_buf(self) -> Tensor:
        """Decisions of the running episodes, [N]."""
        return self._lengths

    @episode_length_buf.setter
    def episode_length_buf(self, lengths: Tensor) -> None:
        if not isinstance(self.env, EpisodeEngine):
            raise UserError("the lengths of these episodes cannot be set; use init_at_random_ep_len=False")
        self._lengths = lengths.to(self._lengths)
        self.env.steps = self._lengths * self.env.contract.executed

    def get_observations(self) -> TensorDict:
        """The present observations, by group."""
        return self._observation

    @torch.no_grad()
    def step(self, actions: Tensor) -> tuple[TensorDict, Tensor, Tensor, dict[str, Any]]:
        """Take `actions` [N, K * A]; returns observations, rewards [N], dones [N] and extras."""
        with torch.inference_mode(False):  # tensors of the runner's inference mode could not be modified later
            chunk = self._beginner.chunk(actions.detach().clone().to(self.device, torch.float32))
            transition = self.env.step(self._middle + self._half * chunk)
            done = transition.done.clone()
            final = self._grouped(transition.observation.clone())
            metrics = ({"success": transition.success.float()} if transition.has_success else {}) | transition.metrics
            log = (
                {f"/{name}": values[done].double().nanmean() for name, values in metrics.items()} if done.any() else {}
            )
            extras = {"time_outs": transition.truncated.clone(), "final_obs": final, "log": log}
            self._lengths = torch.where(done, 0, self._lengths + 1)
            self._observation = self._grouped(self._beginner.begin(done)) if bool(done.any()) else final
            return self._observation, transition.reward.sum(1), done.long(), extras

    def _grouped(self, observation: TensorDict) -> TensorDict:
        groups = {
            group: torch.cat([observation[name].float().flatten(1) for name in names], 1)
            for group, names in self._groups.items()
            if names
        }
        for name in self._pictures:
            groups[name] = observation[name].permute(0, 3, 1, 2).float() / 255.0
        return TensorDict(groups, batch_size=[self.num_envs], device=self.device)
