"""Hover with an unknown platform; see `platforms` for those of training and of evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from embodied.contract import TensorSpec
from sims.quadrotor.dynamics import ROTOR_NAMES
from sims.quadrotor.episode import Moment
from sims.quadrotor.observation import AXES
from sims.quadrotor.platforms import DRAWN
from sims.quadrotor.starts import PLATFORM
from sims.quadrotor.tasks.hover import Hover, disturbed
from sims.tracer.arithmetic import Rows, Value, uniform

DISTURBANCE = tuple(f"{kind}_{axis}" for kind in ("force", "torque") for axis in AXES)
POSITION_LIMIT_M = 1.0
"""Limit of the position: hover's 0.6 m are twenty arms of a crazyflie, but only four of the largest platforms."""


@dataclass(frozen=True)
class AnyHover(Hover):
    """`Hover` on random platforms, of which a teacher may observe all that a policy has to find out.

    That is the numbers from which the platform is made, the episode's force and torque (in standard deviations), and
    how much faster than in hover the rotors turn, as a fraction of their highest speed: the four rotors, or four that
    would fly alike. Only for environments with airframe None: in others these numbers do not describe the drone.
    """

    position_limit_m: Value = POSITION_LIMIT_M

    INSTRUCTION: ClassVar[str] = "hover at the origin"
    OBSERVED: ClassVar[Mapping[str, TensorSpec]] = {
        **Hover.OBSERVED,
        "platform": TensorSpec((len(DRAWN),), unit="1", names=DRAWN, privileged=True),
        "disturbance": TensorSpec((6,), unit="1", names=DISTURBANCE, privileged=True),
        "rotor_excess": TensorSpec((4,), unit="1", names=ROTOR_NAMES, privileged=True),
    }
    PLAN: ClassVar[int] = len(DRAWN) + len(DISTURBANCE)

    def plan(self, key: Sequence[Value]) -> Rows:
        """The numbers in (0, 1) from which `Ranges.platforms` makes the episode's platform, and the disturbance."""
        return [*(uniform(key, PLATFORM, index) for index in range(len(DRAWN))), *disturbed(key)]

    def observe(self, now: Moment, key: Sequence[Value] | None) -> Rows:
        """`Hover`'s observation, and what a teacher may observe."""
        return [*super().observe(now, key), *now.plan, *now.body.rotor_speed]
