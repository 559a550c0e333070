"""Late, noisy and lost measurements of any robot, for training with a simulated one."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np

from embodied.configuration import Configuration, NonNegativeFloat, Range
from real_robot.robots.robot import Array, Clock, Reading, Robot


@dataclass
class DisturbanceConfig(Configuration):
    """Disturbances of a robot's measurements.

    They arrive `latency_s` after their stamp, with normal noise of deviation `noise` on every number, in its unit, and
    a share `lost` never arrives.
    """

    latency_s: NonNegativeFloat = 0.0
    noise: NonNegativeFloat = 0.0
    lost: Annotated[float, Range(at_least=0, below=1)] = 0.0

    @property
    def present(self) -> bool:
        """Whether there are any."""
        return max(self.latency_s, self.noise, self.lost) > 0.0


class DisturbedRobot:
    """The robot `robot` with the disturbances of `config`, drawn by `seed`; commands arrive as they are."""

    def __init__(self, robot: Robot, clock: Clock, config: DisturbanceConfig, seed: int) -> None:
        self.robot = robot
        self.contract = robot.contract
        self.at_rest = robot.at_rest
        self.stops_after_s = robot.stops_after_s
        self.config = config
        self._clock = clock
        self._rng = np.random.default_rng(seed)
        self.restart()

    def restart(self) -> None:
        """Begin an episode, as if its first measurement had been sent long before."""
        self._underway: deque[Reading] = deque()
        self._newest: Reading | None = None
        self._sequence = -1  # of the measurement that was sent last

    def read(self) -> Reading | None:
        """See `Robot.read`: the newest measurement that has arrived."""
        sent = self.robot.read()
        if sent is not None and sent.sequence != self._sequence:
            self._sequence = sent.sequence
            disturbed = replace(sent, observation={key: self._noisy(value) for key, value in sent.observation.items()})
            if self._newest is None:
                self._newest = disturbed
            elif self._rng.random() >= self.config.lost:
                self._underway.append(disturbed)
        while self._underway and self._underway[0].stamp_s + self.config.latency_s <= self._clock() + 1e-9:
            self._newest = self._underway.popleft()
        return self._newest

    def write(self, action: Array) -> None:
        """See `Robot.write`."""
        self.robot.write(action)

    def hold(self) -> None:
        """See `Robot.hold`."""
        self.robot.hold()

    def close(self) -> None:
        """See `Robot.close`."""
        self.robot.close()

    def _noisy(self, value: Array) -> Array:
        array = np.asarray(value)
        if array.dtype.kind != "f" or not self.config.noise:
            return array
        return (array + self.config.noise * self._rng.standard_normal(array.shape)).astype(array.dtype)
