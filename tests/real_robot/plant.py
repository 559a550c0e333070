"""A robot for tests: executes commands at once and records all of them."""

import numpy as np

from embodied.contract import Contract, TensorSpec
from real_robot.robots.robot import Clock, Reading
from real_robot.safety.consistency import START_READINGS
from real_robot.safety.limits import Kind, Limits
from real_robot.safety.safety import Safety

DT_S = 0.01
NAMES = ("a", "b")


def contract(dt_s: float = DT_S, names: tuple[str, ...] = NAMES, frame: str = "base") -> Contract:
    """Positions of elements, measured and commanded in any of the three ways."""
    spec = TensorSpec((len(names),), unit="m", frame=frame, names=names)
    return Contract({"position": spec}, spec, dt_s)


class Plant:
    """Its measured position follows POSITION, VELOCITY or DELTA commands exactly; time passes by `tick`."""

    def __init__(self, kind: Kind, start: np.ndarray, dt_s: float = DT_S, scale: float = 1.0) -> None:
        self.contract = contract(dt_s, tuple("abcdefg"[: len(start)]))
        self.kind, self.scale, self.position = kind, scale, np.array(start, np.float64)
        self.at_rest = (np.nan if kind is Kind.POSITION else 0.0,) * len(start)
        self.stops_after_s = None
        self.commands: list[np.ndarray | None] = []  # None: hold
        self.ticks = 0

    def clock(self) -> float:
        return self.ticks * self.contract.control_dt_s

    def tick(self) -> Reading:
        self.ticks += 1
        return self.read()

    def read(self) -> Reading:
        return Reading({"position": self.position.copy()}, self.clock(), self.ticks)

    def write(self, action: np.ndarray) -> None:
        self.commands.append(action)
        moved = action * self.scale
        if self.kind is Kind.POSITION:
            self.position = moved
        else:
            self.position = self.position + moved * (self.contract.control_dt_s if self.kind is Kind.VELOCITY else 1.0)

    def hold(self) -> None:
        self.commands.append(None)

    def close(self) -> None:
        self.hold()


def guarded(plant: Plant, limits: Limits, clock: Clock | None = None, steady: Clock | None = None) -> Safety:
    """Safety of `plant`, which has been measured as often as is needed to start."""
    safety = Safety(plant, limits, clock or plant.clock, steady)
    measure(plant, safety)
    return safety


def measure(plant: Plant, safety: Safety) -> None:
    """Measure `plant` as often as is needed to start."""
    for _ in range(START_READINGS):
        safety.observe(plant.tick())
