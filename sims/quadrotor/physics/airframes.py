"""Physical parameters of quadrotors: known airframes, and others near them.

Rotors form an X, in the order front-right, back-right, back-left, front-left (body axes: x forward, y left, z up); each
one's thrust at the fraction u of its highest speed is thrust_0 + thrust_1 u + thrust_2 u^2. With N = 6 or 8
rotors, placed as in `rotors`, each has 4 / N of this thrust, because the curve is a quarter of the drone's thrust.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from embodied.errors import UserError
from sims.quadrotor.physics.rotors import COUNTS

GRAVITY = 9.81
"""m/s^2."""


@dataclass(frozen=True)
class Airframe:
    """Physical parameters of a quadrotor.

    Attributes:
        mass_kg: all-up mass.
        inertia_x, inertia_y, inertia_z: principal moments of inertia, kg m^2.
        arm_x_m, arm_y_m: distance of the rotors from the centre of mass, forward and sideways.
        thrust_0_n, thrust_1_n, thrust_2_n: a quarter of the thrust over the rotors' speed as a fraction of the highest.
        torque_per_thrust_m: yaw reaction torque of a rotor, N m per N of thrust.
        lag_rise_s, lag_fall_s: time constants of rotor speed, speeding up and slowing down.
        speed_max_rpm: the highest rotor speed.
        rotor_radius_m: radius of a propeller, for ground effect.
        drag_x, drag_y, drag_z: linear drag along body axes, N s/m (used where drag is on).
        delay_s: latency from command to rotor (used where delay is on).
        observation_delay_s: latency from motion to measurement (used where senses are on).
        sag: share of the thrust that the battery lacks when all rotors run at full speed (used where sag is on).
        rotors: number of rotors, 4, 6 or 8.
    """

    mass_kg: float
    inertia_x: float
    inertia_y: float
    inertia_z: float
    arm_x_m: float
    arm_y_m: float
    thrust_0_n: float
    thrust_1_n: float
    thrust_2_n: float
    torque_per_thrust_m: float
    lag_rise_s: float
    lag_fall_s: float
    speed_max_rpm: float
    rotor_radius_m: float
    drag_x: float = 0.0
    drag_y: float = 0.0
    drag_z: float = 0.0
    delay_s: float = 0.0
    observation_delay_s: float = 0.0
    sag: float = 0.0
    rotors: float = 4.0

    def __post_init__(self) -> None:
        """Raise UserError for parameters that could not fly."""
        for field in fields(self):
            value = getattr(self, field.name)
            minimum = 0.0
            positive = field.name in POSITIVE
            if not math.isfinite(value) or value < minimum or (positive and value == minimum):
                raise UserError(
                    f"expected {field.name} {'above' if positive else 'of at least'} 0, got {value}; check its unit"
                )
        if self.rotors not in COUNTS:
            raise UserError(f"expected rotors as one of {', '.join(map(str, COUNTS))}, got {self.rotors:g}")
        if self.thrust_to_weight <= 1.0:
            raise UserError(f"expected a thrust-to-weight ratio above 1, got {self.thrust_to_weight:.2f}; cannot fly")

    @property
    def thrust_to_weight(self) -> float:
        """Thrust of all rotors at full speed over weight."""
        return 4.0 * (self.thrust_0_n + self.thrust_1_n + self.thrust_2_n) / (self.mass_kg * GRAVITY)

    @property
    def hover_speed(self) -> float:
        """Rotor speed that carries the weight, as a fraction of the highest."""
        return hover_speed(self)

    @property
    def hover_action(self) -> float:
        """`hover_speed` as an action in [-1, 1]."""
        return 2.0 * self.hover_speed - 1.0

    def values(self) -> list[float]:
        """The parameters in the order of `PARAMETERS`."""
        return [getattr(self, name) for name in PARAMETERS]


def hover_speed(airframe: Airframe) -> Any:  # noqa: ANN401 - a Value
    """Rotor speed u that carries the weight, as a fraction of the highest; also works for thrust_2 = 0.

    It solves thrust_2 u^2 + thrust_1 u + thrust_0 = m g / 4. The parameters of `airframe` may be tensors or
    nodes, see `arithmetic.Value`.
    """
    # u = 2 c / (b + sqrt(b^2 + 4 a c)) for a u^2 + b u = c: no division by a, and no cancellation for small a.
    thrust_gap_n = airframe.mass_kg * (GRAVITY / 4.0) - airframe.thrust_0_n
    root = (airframe.thrust_1_n * airframe.thrust_1_n + 4.0 * airframe.thrust_2_n * thrust_gap_n) ** 0.5
    return 2.0 * thrust_gap_n / (airframe.thrust_1_n + root)


PARAMETERS = tuple(field.name for field in fields(Airframe))
"""Row order of parameter tensors."""
SCATTERED = PARAMETERS[:-1]
"""Real-valued parameters, which can be scattered; the number of rotors is an integer."""
POSITIVE = (
    *("mass_kg", "inertia_x", "inertia_y", "inertia_z", "arm_x_m", "arm_y_m", "lag_rise_s", "lag_fall_s"),
    *("speed_max_rpm", "rotor_radius_m"),
)

CRAZYFLIE = Airframe(
    mass_kg=0.027,
    inertia_x=3.85e-6,
    inertia_y=3.85e-6,
    inertia_z=5.9675e-6,
    arm_x_m=0.028,
    arm_y_m=0.028,
    thrust_0_n=0.0,
    thrust_1_n=0.0,
    thrust_2_n=3.16e-10 * 21702.0**2,
    torque_per_thrust_m=0.005964552,
    lag_rise_s=0.15,
    lag_fall_s=0.15,
    speed_max_rpm=21702.0,
    rotor_radius_m=0.0231,
)
"""Crazyflie 2.0 as in Learning to Fly in Seconds (arXiv 2311.13081)."""

CRAZYFLIE_21 = Airframe(
    mass_kg=0.0319,
    inertia_x=9.4166e-6,
    inertia_y=9.6441e-6,
    inertia_z=1.74595e-5,
    arm_x_m=0.028,
    arm_y_m=0.028,
    thrust_0_n=0.00352526,
    thrust_1_n=0.01437313,
    thrust_2_n=0.09223048,
    torque_per_thrust_m=4.665e-3,
    lag_rise_s=0.0555,
    lag_fall_s=0.2494,
    speed_max_rpm=21702.0,
    rotor_radius_m=0.0231,
)
"""Crazyflie 2.1 as identified for RAPTOR (arXiv 2509.11481); not to be mixed with the parameters above."""

RACER_5_INCH = Airframe(
    mass_kg=0.75,
    inertia_x=2.5e-3,
    inertia_y=2.1e-3,
    inertia_z=4.3e-3,
    arm_x_m=0.078,
    arm_y_m=0.078,
    thrust_0_n=0.0,
    thrust_1_n=0.0,
    thrust_2_n=9.2,
    torque_per_thrust_m=0.014,
    lag_rise_s=0.033,
    lag_fall_s=0.045,
    speed_max_rpm=27000.0,
    rotor_radius_m=0.0635,
    drag_x=0.3,
    drag_y=0.3,
    drag_z=0.15,
    delay_s=0.01,
)
"""A racer with 5-inch propellers, thrust-to-weight 5; typical values of the class, not a particular machine."""

PLATFORM_2KG = Airframe(
    mass_kg=2.0,
    inertia_x=0.0217,
    inertia_y=0.0217,
    inertia_z=0.04,
    arm_x_m=0.159,
    arm_y_m=0.159,
    thrust_0_n=0.0,
    thrust_1_n=0.0,
    thrust_2_n=11.0,
    torque_per_thrust_m=0.016,
    lag_rise_s=0.05,
    lag_fall_s=0.08,
    speed_max_rpm=9000.0,
    rotor_radius_m=0.127,
    drag_x=0.5,
    drag_y=0.5,
    drag_z=0.3,
    delay_s=0.015,
)
"""A 2 kg platform with 10-inch propellers, thrust-to-weight 2.2; typical values of the class."""

AIRFRAMES = {
    "crazyflie": CRAZYFLIE,
    "crazyflie_21": CRAZYFLIE_21,
    "racer_5_inch": RACER_5_INCH,
    "platform_2kg": PLATFORM_2KG,
}
SCATTER_MAX = 0.3


def scatter(parameters: Tensor, draws: Tensor, width: float) -> Tensor:
    """Copy `parameters` [P, M] with each of the `SCATTERED` ones scaled by a factor in [1 - width, 1 + width].

    `draws` [P - 1, M] are in (0, 1). Impossible platforms are excluded: the thrust curve is scaled as a whole and with
    the mass, so that thrust-to-weight lies in [1 - width / 2, 1 + width] of the airframe's, and inertia_z is never
    above the sum of the other two.

    Raises:
        ValueError: for draws of another shape, or a `width` outside [0, SCATTER_MAX], beyond which some could not fly.
    """
    if draws.ndim != 2 or len(draws) != len(SCATTERED) or not 0.0 <= width <= SCATTER_MAX:
        raise ValueError(
            f"expected draws of shape ({len(SCATTERED)}, M) and 0 <= width <= {SCATTER_MAX}, "
            f"got {tuple(draws.shape)}, {width}"
        )
    factors = between(draws, 1.0 - width, 1.0 + width)
    thrust = [PARAMETERS.index(f"thrust_{power}_n") for power in range(3)]
    # The whole thrust curve has the factor of the mass times one of its own, by which thrust-to-weight changes.
    factors[thrust] = factors[PARAMETERS.index("mass_kg")] * between(draws[thrust[0]], 1.0 - width / 2.0, 1.0 + width)
    parameters = torch.cat(
        (parameters[: len(SCATTERED)] * factors, parameters[len(SCATTERED) :].expand(-1, factors.shape[1]))
    )
    x, y, z = (PARAMETERS.index(f"inertia_{axis}") for axis in "xyz")
    # Triangle inequality of principal moments of inertia.
    parameters[z] = torch.minimum(parameters[z], parameters[x] + parameters[y])
    return parameters


def between(u: Tensor, low: Tensor | float, high: float) -> Tensor:
    """Numbers from `low` to `high`, linear in `u` in (0, 1)."""
    return low + (high - low) * u
