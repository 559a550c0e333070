"""A small task that needs memory: SmoothReach with wind as a privileged observation."""

from dataclasses import replace

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.contract import TensorSpec
from embodied.environment import Transition
from tests.embodied.smooth_reach import SmoothReach


class WindyReach(SmoothReach):
    """Every step also moves the point by the episode's wind: one of five from -0.12 to 0.12, chosen by the start."""

    def __init__(self, num_envs: int, step_limit: int = 12, device: torch.device | str = "cpu") -> None:
        super().__init__(num_envs, step_limit, device)
        wind = {"wind": TensorSpec((1,), unit="m", privileged=True)}
        self.contract = replace(self.contract, observation=self.contract.observation | wind)

    @property
    def wind(self) -> Tensor:
        return 0.06 * ((self.start * 7 + self.start // 5) % 5 - 2).unsqueeze(1)

    def step(self, actions: Tensor) -> Transition:
        return super().step(actions + self.wind.unsqueeze(1))

    def _observation(self) -> TensorDict:
        return super()._observation().set("wind", self.wind)
