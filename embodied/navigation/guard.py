"""Guard of policies that drive by a lidar: a command that leaves no room to stop is replaced.

The simplex architecture (Sha 2001, IEEE Software 18(4)): a learned controller drives, a simple one that can
stop in time takes over while necessary. Here the simple one is the dynamic window, on the way to the same
waypoint. In training it is a part of the environment, as a shield (Alshiekh et al. 2018, AAAI). N is the number of
observations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.contract import Contract
from embodied.errors import UserError
from embodied.navigation.dynamic_window import NEAR, Drive, DynamicWindow

READ = "lidar", "remembered", "velocity", "waypoints"
"""Observations that a guard needs."""
BLIND_RAD = 0.5
"""Largest angle between neighbouring beams of a lidar with a full view, rad."""
AHEAD = "x_1_m", "y_1_m"
"""Elements of the waypoint that it drives to."""


class Guard:
    """Guard that replaces commands after which `drive` could not stop before current or recent lidar hits.

    Raises:
        UserError: for a policy of `contract` that lacks the guard's observations, commands several steps, or drives
            backwards outside of the lidar's view.
    """

    def __init__(self, contract: Contract, drive: Drive) -> None:
        if missing := [key for key in READ if key not in contract.observation]:
            raise UserError(f"a guard needs the observations {', '.join(READ)}; the policy has no {missing[0]}")
        if contract.executed != 1:
            raise UserError(f"a guard checks every command; the policy executes {contract.executed} at once, not 1")
        angles = torch.tensor(drive.angles).remainder(2.0 * math.pi).sort().values
        if contract.action.low[0] < 0.0 and (angles.roll(-1) - angles).remainder(2.0 * math.pi).max() > BLIND_RAD:
            raise UserError(
                "a guard of a vehicle that drives backwards needs a lidar that sees all around; use "
                "task.vehicle.speed_min_m_s=0"
            )
        self.window = DynamicWindow(contract, drive, NEAR, backs=True)
        names = contract.observation["waypoints"].names
        self._ahead = [names.index(name) for name in AHEAD]

    def command(self, observation: Mapping[str, Tensor] | TensorDict, command: Tensor) -> tuple[Tensor, Tensor]:
        """Speeds and yaw rates [N, 2] that replace `command` [N, 2], and a mask [N] of those that differ."""
        lidar, remembered, velocity, waypoints = (observation[key] for key in READ)
        lidar = torch.minimum(lidar, remembered)
        unsafe = ~self.window.admissible(lidar, velocity, command)
        if bool(unsafe.any()):
            command = command.clone()
            inputs = lidar[unsafe], velocity[unsafe], waypoints[unsafe][:, self._ahead]
            command[unsafe] = self.window.command(*inputs)
        return command, unsafe
