"""Our environments as TorchRL's EnvBase.

Letters in shape comments: N environments, K executed actions of a chunk, A action dimension.
"""

from __future__ import annotations

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from embodied.contract import TensorSpec
from embodied.environment import Environment
from embodied.extras import needs_extra
from sims.gym.starting import Beginner, limits

with needs_extra("torchrl"):
    from torchrl.data import Bounded, Categorical, Composite, Unbounded
    from torchrl.envs import EnvBase

ENDINGS = "done", "terminated", "truncated"


def as_torchrl(env: Environment) -> TorchRLEnv:
    """`env` as a torchrl.envs.EnvBase of batch size [N]."""
    return TorchRLEnv(env)


class TorchRLEnv(EnvBase):
    """N environments, which TorchRL resets where they end; "next" has the true last observation.

    Observations have their names in the contract. An action is [A], or a chunk [K, A] where K is above 1, whose reward
    is the sum. `set_seed` chooses the initial states of all episodes that follow.

    Raises:
        UserError: for observations that vary in size, and actions without limits.
    """

    def __init__(self, env: Environment) -> None:
        count = env.num_envs
        super().__init__(device=env.device, batch_size=torch.Size([count]))
        self.simulator = env
        self._beginner = Beginner(env, "TorchRL")
        low, high = (each if env.contract.executed > 1 else each[0] for each in limits(env, "TorchRL"))
        self.action_spec = Bounded(low.expand(count, *low.shape), high.expand(count, *high.shape), device=env.device)
        specs = {name: _spec(spec, count, env.device) for name, spec in env.contract.observation.items()}
        self.observation_spec = Composite(specs, shape=[count], device=env.device)
        self.reward_spec = Unbounded((count, 1), device=env.device)
        flag = Categorical(2, shape=(count, 1), dtype=torch.bool, device=env.device)
        self.done_spec = Composite({name: flag.clone() for name in ENDINGS}, shape=[count], device=env.device)
        self._ended = torch.zeros(2, count, dtype=torch.bool, device=env.device)  # terminated, truncated

    def _reset(self, tensordict: TensorDictBase | None = None, **_: object) -> TensorDict:
        requested = None if tensordict is None else tensordict.get("_reset", None)
        all_environments = torch.ones_like(self._ended[0])
        mask = all_environments if requested is None else requested.view(-1)
        self._ended = self._ended & ~mask
        return self._beginner.begin(mask).update(self._endings())

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        transition = self.simulator.step(self._beginner.chunk(tensordict["action"]))
        self._ended = torch.stack((transition.terminated, transition.truncated))
        reward = transition.reward.sum(1, keepdim=True)
        return transition.observation.clone().update({"reward": reward, **self._endings()})

    def _set_seed(self, seed: int | None) -> None:
        if seed is not None:
            self._beginner.seed(seed)

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Close the environments."""
        if not self.is_closed:
            self.simulator.close()
        super().close(raise_if_closed=raise_if_closed)

    def _endings(self) -> dict[str, Tensor]:
        terminated, truncated = self._ended.unsqueeze(-1)
        return {"done": terminated | truncated, "terminated": terminated.clone(), "truncated": truncated.clone()}


def _spec(spec: TensorSpec, count: int, device: torch.device) -> Bounded | Unbounded:
    shape = (count, *spec.shape)
    dtype = getattr(torch, spec.dtype)
    if spec.dtype == "uint8":
        return Bounded(0, 255, shape=shape, dtype=dtype, device=device)
    if not spec.low or not spec.high:
        return Unbounded(shape, dtype=dtype, device=device)
    low, high = (torch.tensor(each, dtype=dtype, device=device).expand(shape) for each in (spec.low, spec.high))
    return Bounded(low, high, shape=shape, dtype=dtype, device=device)
