"""Our environments as Gymnasium's VectorEnv.

Letters in shape comments: N environments, K executed actions of a chunk, A action dimension.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from tensordict import TensorDict

from embodied.contract import TensorSpec
from embodied.environment import Environment, Transition
from embodied.errors import UserError
from sims.gym.spaces import Array
from sims.gym.starting import Beginner, limits


def as_gymnasium(env: Environment, autoreset_mode: AutoresetMode = AutoresetMode.NEXT_STEP) -> GymnasiumEnv:
    """`env` as a gymnasium.vector.VectorEnv whose finished environments are reset according to `autoreset_mode`."""
    return GymnasiumEnv(env, autoreset_mode)


class GymnasiumEnv(VectorEnv):
    """N environments with observations in a Dict, by their names in the contract.

    An action is [A], or a chunk [K, A] where K is above 1, whose reward is the sum. Infos have the success and the
    metrics of episodes that ended. `reset(seed=...)` chooses the initial states of all episodes that follow.

    Raises:
        UserError: for observations that vary in size, and actions without limits.
    """

    def __init__(self, env: Environment, autoreset_mode: AutoresetMode) -> None:
        self.env = env
        self.num_envs = env.num_envs
        self._mode = autoreset_mode
        self._beginner = Beginner(env, "Gymnasium")
        self.metadata = {"autoreset_mode": autoreset_mode, "render_fps": 1.0 / env.contract.control_dt_s}
        low, high = (each.cpu().numpy() for each in limits(env, "Gymnasium"))
        if env.contract.executed == 1:
            low = low[0]
            high = high[0]
        self.single_action_space = spaces.Box(low, high, dtype=np.float32)
        observation_spaces = {name: _space(spec) for name, spec in env.contract.observation.items()}
        self.single_observation_space = spaces.Dict(observation_spaces)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self._ended = torch.zeros(self.num_envs, dtype=torch.bool, device=env.device)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Array], dict[str, Any]]:
        """Begin episodes everywhere, or where options["reset_mask"] [N] is True.

        Raises:
            UserError: for a seed if initial states have no numbers.
        """
        super().reset(seed=seed)
        if seed is not None:
            self._beginner.seed(seed)
        mask = torch.ones_like(self._ended)
        if options and "reset_mask" in options:
            mask = torch.as_tensor(options["reset_mask"], dtype=torch.bool, device=self.env.device)
        self._ended = self._ended & ~mask
        return _arrays(self._beginner.begin(mask)), {}

    def step(self, actions: Array) -> tuple[dict[str, Array], Array, Array, Array, dict[str, Any]]:
        """Take one action, or one chunk, in each environment.

        Raises:
            UserError: if an episode has ended and there is no automatic reset.
        """
        before = self._ended
        if self._mode is AutoresetMode.DISABLED and bool(before.any()):
            ended = before.nonzero().flatten().tolist()
            raise UserError(f"the episodes of {ended} have ended; reset them with options={{'reset_mask': ...}}")
        chunk = self._beginner.chunk(torch.as_tensor(np.asarray(actions), dtype=torch.float32))
        transition = self.env.step(chunk)  # a no-op in ended episodes
        terminated, truncated = (flag & ~before for flag in (transition.terminated, transition.truncated))
        done = terminated | truncated
        reward = transition.reward.detach().double().sum(1).cpu().numpy()
        observation = transition.observation.detach().clone()
        infos = self._info(transition, done)
        resets = done if self._mode is AutoresetMode.SAME_STEP else before
        if self._mode is not AutoresetMode.DISABLED and bool(resets.any()):
            observation = self._beginner.begin(resets)
        self._ended = done if self._mode is not AutoresetMode.SAME_STEP else torch.zeros_like(done)
        flags = (each.cpu().numpy().copy() for each in (terminated, truncated))
        return _arrays(observation), reward, *flags, infos

    def close_extras(self, **_: object) -> None:
        """Close the environments."""
        self.env.close()

    def _info(self, transition: Transition, done: torch.Tensor) -> dict[str, Any]:
        """Infos of the episodes that end in this step."""
        metrics = {"success": transition.success} if transition.has_success else {}
        metrics |= transition.metrics
        infos: dict[str, Any] = {}
        for row in done.nonzero().flatten().tolist():
            info = {name: values[row].item() for name, values in metrics.items()}
            if self._mode is AutoresetMode.SAME_STEP:
                final = transition.observation[row].detach().clone().to_dict()
                info = {"final_obs": {name: part.cpu().numpy() for name, part in final.items()}, "final_info": info}
            infos = self._add_info(infos, info, row)
        return infos


def _space(spec: TensorSpec) -> spaces.Box:
    kind = np.dtype(spec.dtype)
    low, high = (-np.inf, np.inf) if kind.kind == "f" else (np.iinfo(kind).min, np.iinfo(kind).max)
    bounds = (
        np.broadcast_to(np.asarray(each, dtype=kind), spec.shape) for each in (spec.low or low, spec.high or high)
    )
    return spaces.Box(*bounds, dtype=kind.type)


def _arrays(observation: TensorDict) -> dict[str, Array]:
    return {name: part.detach().cpu().numpy() for name, part in observation.items()}
