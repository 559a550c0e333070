"""A guard between a policy's executor and the robot, see `embodied.navigation.guard`."""

from __future__ import annotations

import numpy as np
import torch

from embodied.navigation.guard import READ, Guard
from real_robot.robots.control_loop import Executor
from real_robot.robots.robot import Array, Reading


class Guarding:
    """An executor whose commands `guard` checks against the newest measurement.

    Commands and measurements that are not finite are passed on to `Safety`, which holds.
    """

    def __init__(self, executor: Executor, guard: Guard) -> None:
        self._executor = executor
        self._guard = guard
        self._observation: dict[str, torch.Tensor] = {}
        zeros = {key: torch.zeros(1, *guard.window.contract.observation[key].shape) for key in READ}
        guard.command(zeros, torch.zeros(1, 2))  # compiles the guard now, so that the first command does not wait

    def reset(self) -> None:
        """Begin an episode."""
        self._executor.reset()
        self._observation = {}

    def observe(self, reading: Reading) -> None:
        """Pass in the newest measurement."""
        observation = {key: torch.from_numpy(np.array(reading.observation[key], np.float32)) for key in READ}
        finite = all(bool(value.isfinite().all()) for value in observation.values())
        self._observation = {key: value.unsqueeze(0) for key, value in observation.items()} if finite else {}
        self._executor.observe(reading)

    def action(self, now_s: float) -> Array | None:
        """The executor's action [A] for the time `now_s`, or the guard's replacement."""
        action = self._executor.action(now_s)
        if action is None or not self._observation or not np.isfinite(action).all():
            return action
        command, replaced = self._guard.command(self._observation, torch.from_numpy(np.float32(action)).unsqueeze(0))
        return command[0].numpy().astype(action.dtype) if bool(replaced) else action
