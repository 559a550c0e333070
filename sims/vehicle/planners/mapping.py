"""A planner with memory: a map, the shortest path on it, and the dynamic window approach along that path.

Similar to Nav2's global costmap, NavFn and DWB: `local_map` finds a point of the shortest path a little ahead, to which
`DynamicWindow` drives. Its numbers, and those of the map, are tuned on training worlds, see README.md.
"""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.contract import Contract
from embodied.navigation.dynamic_window import NEAR, DynamicWindow
from embodied.policy import MEMORY, Decision
from embodied.rollout.memory import STARTED
from sims.vehicle.geometry import Lidar
from sims.vehicle.mapping import drive_of, local_map
from sims.vehicle.vehicles import Vehicle


class MappingPlanner:
    """Drives along the shortest path on its map, planned anew in every period; a `memory.RecurrentPolicy`."""

    def __init__(self, contract: Contract, vehicle: Vehicle, lidar: Lidar) -> None:
        self.contract = contract
        self.map = local_map(lidar, vehicle, contract.control_dt_s, side=128, cell_m=0.125, every=1, ahead_m=(1.0,))
        self.local = DynamicWindow(contract, drive_of(vehicle, lidar), NEAR)

    def initial_memory(self, count: int) -> Tensor:
        """Empty maps of `count` vehicles."""
        return torch.zeros(count, self.map.size)

    def act(
        self, observation: TensorDict, *, deterministic: bool = False, generator: torch.Generator | None = None
    ) -> Decision:
        """Speed and yaw rate [N, H, 2] for the N observations; nothing is random."""
        goal = observation["goal_distance"] * observation["goal_direction"]
        memory = observation[MEMORY].clone()
        started = observation[STARTED]
        measurements = observation["lidar"], observation["velocity"], goal
        self.map.update(memory, *measurements)
        if started.any():
            memory[started] = self.map.begin(*(part[started] for part in measurements))
        target = self.map.observe(memory)["waypoints"]
        actions = self.local.command(observation["lidar"], observation["velocity"], target)
        actions = actions.unsqueeze(1).expand(-1, self.contract.horizon, -1)
        sample = TensorDict({MEMORY: memory}, batch_size=[len(memory)])
        return Decision(actions, sample, torch.zeros(len(memory), 1, 1, device=memory.device))
