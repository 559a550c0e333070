"""Hover with an unknown platform; see `platforms` for the platforms of training and evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from embodied.contract import TensorSpec
from sims.quadrotor.episode import Moment
from sims.quadrotor.observation import AXES
from sims.quadrotor.physics.dynamics import ROTOR_NAMES
from sims.quadrotor.platforms import NUMBERS
from sims.quadrotor.starts import PLATFORM
from sims.quadrotor.tasks.hover import Hover, disturbed
from sims.tracer.arithmetic import Rows, Value, uniform

DISTURBANCE = tuple(f"{kind}_{axis}" for kind in ("force", "torque") for axis in AXES)
POSITION_LIMIT_M = 1.0
"""Limit of the position: hover's 0.6 m are twenty arms of a crazyflie, but only four of the largest platforms."""


@dataclass(frozen=True)
class AnyHover(Hover):
    """`Hover` on random platforms, with privileged observations for a teacher.

    The privileged observations are the numbers that define the platform, the episode's force and torque (in standard
    deviations), and the rotors' speeds above hover, as fractions of the highest, of the four rotors or of four with the
    same effect. Only for environments with airframe None: in others these numbers do not describe the drone.
    """

    position_limit_m: Value = POSITION_LIMIT_M

    INSTRUCTION: ClassVar[str] = "hover at the origin"
    OBSERVED: ClassVar[Mapping[str, TensorSpec]] = {
        **Hover.OBSERVED,
        "platform": TensorSpec((len(NUMBERS),), unit="1", names=NUMBERS, privileged=True),
        "disturbance": TensorSpec((6,), unit="1", names=DISTURBANCE, privileged=True),
        "rotor_excess": TensorSpec((4,), unit="1", names=ROTOR_NAMES, privileged=True),
    }
    PLAN: ClassVar[int] = len(NUMBERS) + len(DISTURBANCE)

    def plan(self, key: Sequence[Value]) -> Rows:
        """The numbers in (0, 1) from which `Ranges.platforms` makes the episode's platform, and the disturbance."""
        return [*(uniform(key, PLATFORM, index) for index in range(len(NUMBERS))), *disturbed(key)]

    def observe(self, now: Moment) -> Rows:
        """The observation of `Hover`, and the privileged observations."""
        return [*super().observe(now), *now.plan, *now.body.rotor_speed]
