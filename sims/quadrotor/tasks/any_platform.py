"""Hover with an unknown platform; see `platforms` for those of training and of evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from embodied.contract import TensorSpec
from sims.quadrotor.episode import Moment
from sims.quadrotor.platforms import DRAWN, DRAWS
from sims.quadrotor.starts import PLATFORM
from sims.quadrotor.tasks.hover import Hover
from sims.tracer.arithmetic import Rows, Value, uniform

POSITION_LIMIT_M = 1.0
"""Limit of the position: hover's 0.6 m are twenty arms of a crazyflie, but only four of the largest platforms."""


@dataclass(frozen=True)
class AnyHover(Hover):
    """`Hover` on random platforms; a teacher may observe the numbers from which the platform is made.

    Only for environments with airframe None: in others these numbers do not describe the drone.
    """

    position_limit_m: Value = POSITION_LIMIT_M

    INSTRUCTION: ClassVar[str] = "hover at the origin"
    OBSERVED: ClassVar[Mapping[str, TensorSpec]] = {
        **Hover.OBSERVED,
        "platform": TensorSpec((DRAWS,), unit="1", names=DRAWN, privileged=True),
    }
    PLAN: ClassVar[int] = DRAWS

    def plan(self, key: Sequence[Value]) -> Rows:
        """The numbers in (0, 1) from which `platforms.Ranges.platforms` makes the episode's platform."""
        return [uniform(key, PLATFORM, index) for index in range(DRAWS)]

    def observe(self, now: Moment, key: Sequence[Value] | None) -> Rows:
        """`Hover`'s observation, and the platform's numbers."""
        return [*super().observe(now, key), *now.plan]
