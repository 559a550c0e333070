"""Hover with an unknown platform: random ones for training, others for evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from embodied.contract import TensorSpec
from sims.quadrotor.airframes import CRAZYFLIE, CRAZYFLIE_21, DRAWS, GRAVITY, Airframe
from sims.quadrotor.episode import Moment
from sims.quadrotor.starts import PLATFORM
from sims.quadrotor.tasks.hover import Hover
from sims.tracer.arithmetic import Rows, Value, uniform

POSITION_LIMIT_M = 1.0
"""Limit of the position: hover's 0.6 m are twenty arms of a crazyflie, but only four of the largest platforms."""
DRAWN = (
    *("mass", "arm", "inertia_x", "inertia_y", "inertia_z", "thrust_to_weight", "linear_thrust", "lag_rise"),
    *("lag_fall", "torque_per_thrust", "drag", "delay"),
)


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
        """The numbers in (0, 1) from which `airframes.sample_platforms` makes the episode's platform."""
        return [uniform(key, PLATFORM, index) for index in range(DRAWS)]

    def observe(self, now: Moment, key: Sequence[Value] | None) -> Rows:
        """`Hover`'s observation, and the platform's numbers."""
        return [*super().observe(now, key), *now.plan]


def _unseen(
    mass_kg: float, arms_m: tuple[float, float], thrust_to_weight: float, gyration: tuple[float, float, float],
    linear: float, torque_per_arm: float, lags_s: tuple[float, float],
) -> Airframe:  # fmt: skip
    """A platform by the ratios of its class.

    Arms are forward and sideways, `gyration` are squared radii of gyration in squared diagonals (of x, y and z),
    `linear` is the share of the thrust curve that is not quadratic, `torque_per_arm` the yaw torque in mean arms.
    """
    arm_x, arm_y = arms_m
    diagonal_squared = arm_x**2 + arm_y**2
    highest = thrust_to_weight * mass_kg * GRAVITY / 4.0
    inertia = [mass_kg * diagonal_squared * ratio for ratio in gyration]
    return Airframe(
        mass_kg, *inertia, arm_x, arm_y,
        thrust_0_n=0.0, thrust_1_n=linear * highest, thrust_2_n=(1.0 - linear) * highest,
        torque_per_thrust_m=torque_per_arm * (arm_x + arm_y) / 2.0, lag_rise_s=lags_s[0], lag_fall_s=lags_s[1],
        speed_max_rpm=22000.0 * 0.03 ** (1.0 / 3.0) / mass_kg ** (1.0 / 3.0), rotor_radius_m=0.8 * min(arms_m),
    )  # fmt: skip


UNSEEN = {
    "unseen_0032_g": _unseen(0.032, (0.030, 0.028), 2.1, (0.15, 0.16, 0.29), 0.20, 0.17, (0.055, 0.150)),
    "unseen_0045_g": _unseen(0.045, (0.034, 0.037), 3.0, (0.12, 0.13, 0.22), 0.05, 0.12, (0.040, 0.080)),
    "unseen_0080_g": _unseen(0.080, (0.040, 0.046), 3.6, (0.18, 0.20, 0.33), 0.10, 0.20, (0.060, 0.090)),
    "unseen_0150_g": _unseen(0.150, (0.055, 0.061), 4.2, (0.14, 0.13, 0.24), 0.00, 0.14, (0.045, 0.070)),
    "unseen_0250_g": _unseen(0.250, (0.075, 0.068), 2.6, (0.20, 0.18, 0.34), 0.15, 0.16, (0.060, 0.130)),
    "unseen_0400_g": _unseen(0.400, (0.085, 0.098), 4.6, (0.13, 0.15, 0.25), 0.08, 0.13, (0.050, 0.080)),
    "unseen_0650_g": _unseen(0.650, (0.088, 0.078), 4.8, (0.23, 0.20, 0.40), 0.00, 0.15, (0.060, 0.075)),
    "unseen_1000_g": _unseen(1.000, (0.112, 0.125), 2.3, (0.16, 0.18, 0.30), 0.25, 0.18, (0.080, 0.120)),
    "unseen_1600_g": _unseen(1.600, (0.140, 0.128), 3.2, (0.14, 0.12, 0.24), 0.10, 0.22, (0.090, 0.180)),
    "unseen_2400_g": _unseen(2.400, (0.172, 0.150), 2.5, (0.13, 0.15, 0.25), 0.05, 0.14, (0.075, 0.140)),
}
"""Platforms never used in training: their two arms differ, while those of random platforms are equal.

Otherwise they lie inside the ranges of `sample_platforms`. Typical values of small to large machines.
"""
OUTSIDE = {"crazyflie": CRAZYFLIE, "crazyflie_21": CRAZYFLIE_21}
"""Platforms outside the ranges: 27 g and slow rotors both up and down; a thrust-to-weight ratio of 1.4."""
MEASURED = UNSEEN | OUTSIDE
"""Platforms for evaluation, besides random ones."""
