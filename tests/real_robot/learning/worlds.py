"""Robots for tests of learning on a robot: the `reach` toy behind the interface of a robot, and an exact plant."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from real_robot.learning.control import Control
from real_robot.learning.environment import RobotEnvironment, Rules
from real_robot.learning.scripted import ScriptedPerson
from real_robot.robots.intervention import Person
from real_robot.robots.robot import Clock
from real_robot.robots.teleoperation import Station, limits, simulated
from real_robot.safety.limits import ElementLimits, Kind, Limits
from real_robot.safety.safety import Safety
from tests.embodied.reach import Reach
from tests.real_robot.plant import Plant

LIMITED = ElementLimits(Kind.POSITION, low=-1.0, high=1.0, velocity=2.0, measured="position.a")


class ReachExpert:
    """Moves the point of `env` to the origin as fast as it can."""

    def __init__(self, env: Reach) -> None:
        self.env = env

    def reset(self) -> None: ...

    def action(self) -> np.ndarray:
        most = self.env.contract.action.high[0]
        return np.clip(-self.env.position.numpy(), -most, most).astype(np.float64)

    def progress(self) -> float:
        return -abs(float(self.env.position[0]))


def reaching(
    person: Callable[[Reach], Person] | None = None,
    *,
    executed: int = 1,
    steps: int = 20,
    speed: float = 0.25,
    **options: Any,
) -> tuple[RobotEnvironment, Reach]:
    """The toy as a robot that moves by `speed` a step, with chunks of `executed` actions; it never runs out of time."""
    toy = Reach(1, executed=1, horizon=1, tasks=1, step_limit=10_000)
    toy.contract = replace(toy.contract, action=replace(toy.contract.action, low=(-speed,), high=(speed,)))
    station = simulated(toy)
    safety = Safety(station.robot, limits(None, 0.1), station.clock, relocates=True)
    contract = replace(toy.contract, horizon=executed, executed=executed)
    opened = person(toy) if person else None
    env = RobotEnvironment(
        Control(replace(station, sleep=lambda seconds: None), safety, (lambda: opened) if opened else None),
        contract,
        ("reach", "reach the origin"),
        Rules(steps, waits=False),
        begins=opened.begin if isinstance(opened, ScriptedPerson) else lambda training: None,
        help=opened if isinstance(opened, ScriptedPerson) else None,
        **options,
    )
    return env, toy


class Arm(Plant):
    """A plant with commands in [-1, 1], whose time passes in sleep; `fault` may change what it measures."""

    def __init__(self, start: float = 0.0, kind: Kind = Kind.POSITION) -> None:
        super().__init__(kind, np.array([start]))
        action = replace(self.contract.action, low=(-1.0,), high=(1.0,))
        self.contract = replace(self.contract, action=action)
        self.fault: Callable[[Any], Any] = lambda reading: reading
        self.slept = 0.0

    def read(self):
        return self.fault(super().read())

    def sleep(self, seconds: float) -> None:
        self.slept += seconds
        self.ticks += max(1, round(seconds / self.contract.control_dt_s))


def arm_environment(
    arm: Arm,
    person: Callable[[], Person] | None = None,
    *,
    executed: int = 4,
    delay: int = 0,
    rules: Rules | None = None,
    steady: Clock | None = None,
    acceleration: float = math.inf,
    **options: Any,
) -> RobotEnvironment:
    """`arm` as an environment, which may move at 2 m/s: 0.02 m in a period."""
    station = Station(arm, arm.contract, arm.clock, arm.sleep, lambda: None, steady=steady)
    limited = replace(LIMITED, kind=arm.kind, acceleration=acceleration)
    safety = Safety(arm, Limits({"a": limited}, observation_timeout_s=0.05, recovery_s=0.1), arm.clock, steady)
    contract = replace(arm.contract, horizon=executed, executed=executed).delayed(delay)
    control = Control(station, safety, person)
    return RobotEnvironment(control, contract, ("hold", "hold"), rules or Rules(50, waits=False), **options)
