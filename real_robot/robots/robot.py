"""The robot interface, and a simulator that implements it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from embodied.contract import Contract
from embodied.errors import UserError

if TYPE_CHECKING:
    from embodied.environment import Environment, Transition

Array = np.ndarray
Clock = Callable[[], float]
"""Time in s: time.monotonic, a robot's own clock, ROS time, or a simulator's."""


@dataclass(frozen=True)
class Reading:
    """The newest complete measurement of a robot.

    `observation` holds arrays without a batch axis by the contract's keys, never privileged ones. `sequence` increases
    with every measurement. `frames` are the frames declared by messages, by key. `refusal` is the robot's own reason
    for not moving as commanded; "" if it moves. `stamp_s` is the stamp of the oldest part of a measurement, `newest_s`
    that of the newest part, and `stamps` are the stamps of parts by key, as far as they are known.
    """

    observation: dict[str, Array]
    stamp_s: float
    sequence: int
    frames: Mapping[str, str] = field(default_factory=dict)
    refusal: str = ""
    newest_s: float = -math.inf
    stamps: Mapping[str, float] = field(default_factory=dict)

    @property
    def fault(self) -> str:
        """Description of an observation that is infinite or NaN; "" if all are finite."""
        for key, values in self.observation.items():
            array = np.asarray(values)
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                return f"{key} is not finite"
        return ""


@runtime_checkable
class Robot(Protocol):
    """A robot that measures and takes commands; only `safety.Safety` calls `write`.

    `at_rest` [A] are the commands that stop the robot: the value at which an element stands still, 0.0 for a velocity,
    or NaN for an element that stays where it is commanded to, such as a joint's position. None: no command makes the
    robot safe, for example a quadrotor, only its own `hold`. `stops_after_s` is the time without commands after which
    the robot's driver has brought commanded velocities to rest by itself; None: it never does. Commanded positions and
    displacements end by themselves.
    """

    contract: Contract
    at_rest: tuple[float, ...] | None
    stops_after_s: float | None

    def read(self) -> Reading | None:
        """Return the newest complete measurement without waiting; None before the first one."""
        ...

    def write(self, action: Array) -> None:
        """Command `action` [A], in the order and units of the contract."""
        ...

    def hold(self) -> None:
        """Start or continue the robot's own safe behaviour: a quadrotor hovers or lands, an arm may close its brakes.

        Without `at_rest` this is called every period in which the robot has to be safe; otherwise after the last
        command of a stop, and every period of an emergency stop.
        """
        ...

    def close(self) -> None:
        """Release the hardware; the robot holds."""
        ...


class SimulatedRobot:
    """An Environment with N = 1 as a Robot, in simulated time: `write` and `hold` each take one control period.

    Args:
        environment: executes single actions (K = 1).
        holding: returns the action [A] that stands still for an observation, as the robot's own controller would.
    """

    def __init__(self, environment: Environment, holding: Callable[[dict[str, Array]], Array]) -> None:
        if environment.num_envs != 1 or environment.contract.executed != 1:
            description = f"{environment.num_envs} environments and K={environment.contract.executed}"
            raise UserError(f"expected one environment that executes single actions, got {description}")
        self.contract = environment.contract
        self.environment = environment
        self._holding = holding
        self.at_rest = self.stops_after_s = None
        self.transition: Transition | None = None
        self._keys = [key for key, spec in self.contract.observation.items() if not spec.privileged]
        self._reading: Reading | None = None
        self._periods = 0

    def clock(self) -> float:
        """Simulated time in s since the robot was created, also across resets."""
        return self._periods * self.contract.control_dt_s

    def reset(self, **how: Any) -> Reading:  # noqa: ANN401 - the environment's own
        """Begin an episode as `Environment.reset` does; returns its first measurement."""
        self.transition = None
        return self._measure(self.environment.reset(**how))

    def read(self) -> Reading | None:
        """The measurement at the end of the last period; None before the first reset."""
        return self._reading

    def write(self, action: Array) -> None:
        """Execute `action` [A] for one period.

        Raises:
            ValueError: before the first reset, or for another shape.
        """
        if self._reading is None:
            raise ValueError("expected reset() before the first command to a simulated robot")
        if np.shape(action) != self.contract.action.shape:
            raise ValueError(f"expected an action {self.contract.action.shape}, got {np.shape(action)}")
        import torch  # imported here only, so that safety programs start faster

        # [A] -> [N = 1, K = 1, A]
        chunk = torch.from_numpy(np.array(action, np.float32)).view(1, 1, -1).to(self.environment.device)
        self.transition = self.environment.step(chunk)
        self._periods += 1
        self._measure(self.transition.observation)

    def hold(self) -> None:
        """Simulate one period of the robot's own safe behaviour; no-op before the first reset."""
        if self._reading is not None:
            self.write(self._holding(self._reading.observation))

    def close(self) -> None:
        """No-op: a simulator stands still between calls."""

    def _measure(self, observation: Any) -> Reading:  # noqa: ANN401 - a TensorDict
        """Store the first environment's `observation` as the newest measurement."""
        arrays = {key: observation[key][0].detach().cpu().numpy() for key in self._keys}
        sequence = 0 if self._reading is None else self._reading.sequence + 1
        self._reading = Reading(arrays, self.clock(), sequence)
        return self._reading
