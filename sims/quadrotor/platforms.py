"""Platforms for one policy: random ones for training, and named ones for evaluation, which are never drawn."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import Annotated

import torch
from torch import Tensor

from embodied.configuration import Configuration, PositiveFloat, PositiveInt, Range
from embodied.errors import UserError
from embodied.export.conditions import Conditions
from sims.quadrotor.physics.airframes import CRAZYFLIE, CRAZYFLIE_21, GRAVITY, PARAMETERS, Airframe, between
from sims.quadrotor.physics.rotors import COUNTS

NUMBERS = (
    *("mass", "arm", "inertia_x", "inertia_y", "inertia_z", "thrust_to_weight", "linear_thrust", "lag_rise"),
    *("lag_fall", "torque_per_thrust", "drag", "delay", "arm_ratio"),
)
"""Numbers of one random platform, except its number of rotors, which a teacher does not need: commands are the same."""
DRAWS = len(NUMBERS) + 1
DELAY_MAX_S = 0.02
"""Largest latency from command to rotor; it is drawn from 0 to this value."""
MARGIN = 0.02
"""Masses within this share of a named platform's are never drawn."""


def _ratios(
    mass_kg: float,
    arms_m: tuple[float, float],
    thrust_to_weight: float,
    gyration: tuple[float, float, float],
    linear: float,
    torque_per_arm: float,
    lags_s: tuple[float, float],
    rotors: int = 4,
) -> Airframe:
    """Platform from the ratios of its class.

    Arms are forward and sideways, `gyration` are squared radii of gyration in squared diagonals (of x, y and z),
    `linear` is the share of the thrust curve that is not quadratic, `torque_per_arm` the yaw torque in mean arms.
    """
    arm_x, arm_y = arms_m
    diagonal_squared = arm_x**2 + arm_y**2
    highest = thrust_to_weight * mass_kg * GRAVITY / 4.0
    inertia = [mass_kg * diagonal_squared * ratio for ratio in gyration]
    return Airframe(
        mass_kg,
        *inertia,
        arm_x,
        arm_y,
        thrust_0_n=0.0,
        thrust_1_n=linear * highest,
        thrust_2_n=(1.0 - linear) * highest,
        torque_per_thrust_m=torque_per_arm * (arm_x + arm_y) / 2.0,
        lag_rise_s=lags_s[0],
        lag_fall_s=lags_s[1],
        speed_max_rpm=22000.0 * 0.03 ** (1.0 / 3.0) / mass_kg ** (1.0 / 3.0),
        rotor_radius_m=0.8 * min(arms_m),
        rotors=rotors,
    )


INSIDE = {
    "unseen_0032_g": _ratios(0.032, (0.030, 0.028), 2.1, (0.15, 0.16, 0.29), 0.20, 0.17, (0.055, 0.150)),
    "unseen_0045_g": _ratios(0.045, (0.034, 0.037), 3.0, (0.12, 0.13, 0.22), 0.05, 0.12, (0.040, 0.080)),
    "unseen_0080_g": _ratios(0.080, (0.040, 0.046), 3.6, (0.18, 0.20, 0.33), 0.10, 0.20, (0.060, 0.090)),
    "unseen_0150_g": _ratios(0.150, (0.055, 0.061), 4.2, (0.14, 0.13, 0.24), 0.00, 0.14, (0.045, 0.070)),
    "unseen_0250_g": _ratios(0.250, (0.075, 0.068), 2.6, (0.20, 0.18, 0.34), 0.15, 0.16, (0.060, 0.130)),
    "unseen_0400_g": _ratios(0.400, (0.085, 0.098), 4.6, (0.13, 0.15, 0.25), 0.08, 0.13, (0.050, 0.080)),
    "unseen_0650_g": _ratios(0.650, (0.088, 0.078), 4.8, (0.23, 0.20, 0.40), 0.00, 0.15, (0.060, 0.075)),
    "unseen_1000_g": _ratios(1.000, (0.112, 0.125), 2.3, (0.16, 0.18, 0.30), 0.25, 0.18, (0.080, 0.120)),
    "unseen_1600_g": _ratios(1.600, (0.140, 0.128), 3.2, (0.14, 0.12, 0.24), 0.10, 0.22, (0.090, 0.180)),
    "unseen_2400_g": _ratios(2.400, (0.172, 0.150), 2.5, (0.13, 0.15, 0.25), 0.05, 0.14, (0.075, 0.140)),
    "crazyflie": CRAZYFLIE,
    "crazyflie_late_10_ms": replace(CRAZYFLIE, delay_s=0.01),
    "crazyflie_late_20_ms": replace(CRAZYFLIE, delay_s=0.02),
    "crazyflie_21": CRAZYFLIE_21,
    "slow_rotors": _ratios(0.060, (0.038, 0.035), 2.5, (0.15, 0.16, 0.28), 0.10, 0.16, (0.160, 0.200)),
    "slower_rotors": _ratios(0.040, (0.030, 0.032), 3.0, (0.10, 0.11, 0.20), 0.10, 0.16, (0.260, 0.310)),
    "low_thrust": _ratios(0.500, (0.082, 0.090), 1.45, (0.16, 0.15, 0.28), 0.10, 0.15, (0.050, 0.080)),
    "hexa_0550_g": _ratios(0.550, (0.100, 0.100), 2.4, (0.15, 0.15, 0.27), 0.10, 0.15, (0.060, 0.110), rotors=6),
    "hexa_2000_g": _ratios(2.000, (0.165, 0.150), 2.0, (0.17, 0.18, 0.31), 0.10, 0.16, (0.080, 0.140), rotors=6),
    "octo_0900_g": _ratios(0.900, (0.125, 0.120), 3.4, (0.16, 0.16, 0.29), 0.05, 0.17, (0.055, 0.090), rotors=8),
    "octo_2200_g": _ratios(2.200, (0.170, 0.165), 1.8, (0.18, 0.18, 0.33), 0.15, 0.17, (0.090, 0.160), rotors=8),
    "high_thrust": _ratios(0.300, (0.070, 0.064), 5.7, (0.15, 0.17, 0.29), 0.05, 0.15, (0.035, 0.060)),
}
"""Platforms inside the ranges of training; all but the Crazyflies have typical values of small to large machines.

Commands reach the rotors at once, but for those called late.
"""
OUTSIDE = {"beyond_slow_rotors": _ratios(0.048, (0.032, 0.034), 3.0, (0.11, 0.12, 0.22), 0.10, 0.16, (0.420, 0.500))}
"""Platforms outside the ranges of training."""
MEASURED = INSIDE | OUTSIDE
"""Platforms for evaluation, besides random ones."""


def described(name: str, airframe: Airframe) -> str:
    """Sentence on the platform `name` of `MEASURED`, whose `airframe` training never draws."""
    kind = {4: "A quadrotor", 6: "A hexarotor", 8: "An octorotor"}[airframe.rotors]
    late = f", commands {1e3 * airframe.delay_s:g} ms late" if airframe.delay_s else ""
    beyond = "; slower rotors than any in training" if name in OUTSIDE else ""
    return (
        f"{kind} of {1e3 * airframe.mass_kg:.4g} g, thrust {airframe.thrust_to_weight:.3g} times its weight, rotors "
        f"that lag {1e3 * airframe.lag_rise_s:.3g} ms{late}{beyond}."
    )


@dataclass
class Ranges(Configuration):
    """Ranges of random platforms, each [lowest, highest].

    Attributes:
        mass_kg: all-up mass; small and large ones are as frequent (log-uniform).
        thrust_to_weight: thrust of all rotors at full speed over weight.
        lag_rise_s: time constant of rotors that speed up.
        lag_fall_s: time constant of rotors that slow down, never less than when they speed up.
        arm_ratio: length of forward arms over sideways ones, log-uniform.
        rotors: numbers of rotors that a platform may have, each as frequent: some of 4, 6 and 8.
    """

    mass_kg: list[PositiveFloat] = field(default_factory=lambda: [0.02, 2.6])
    thrust_to_weight: list[Annotated[float, Range(above=1)]] = field(default_factory=lambda: [1.3, 6.0])
    lag_rise_s: list[PositiveFloat] = field(default_factory=lambda: [0.03, 0.36])
    lag_fall_s: list[PositiveFloat] = field(default_factory=lambda: [0.03, 0.43])
    arm_ratio: list[PositiveFloat] = field(default_factory=lambda: [0.8, 1.25])
    rotors: list[PositiveInt] = field(default_factory=lambda: list(COUNTS))

    def __post_init__(self) -> None:
        """Raise UserError for numbers out of range, and platforms that could not fly."""
        super().__post_init__()
        if not self.rotors or not set(self.rotors) <= set(COUNTS):
            raise UserError(f"expected platforms.rotors as some of {list(COUNTS)}, got {list(self.rotors)}")
        for name in RANGES:
            limits = getattr(self, name)
            if len(limits) != 2 or limits[0] > limits[1]:
                raise UserError(f"expected platforms.{name} as [lowest, highest], got {list(limits)}")
        if self.lag_rise_s[1] > self.lag_fall_s[1]:
            raise UserError("expected platforms.lag_fall_s to reach as far as platforms.lag_rise_s: motors brake less")

    @property
    def conditions(self) -> Conditions:
        """Conditions, in words, that a policy trained on these platforms is prepared for."""
        mass, thrust, rise, fall = (
            "{:g} to {:g}".format(*each)
            for each in (self.mass_kg, self.thrust_to_weight, self.lag_rise_s, self.lag_fall_s)
        )
        return Conditions(
            trained_for=(
                f"platforms of {mass} kg with {', '.join(map(str, self.rotors))} rotors, thrust-to-weight {thrust}",
                f"rotors that lag {rise} s speeding up and {fall} s slowing down",
                f"commands 0 to {1e3 * DELAY_MAX_S:g} ms late, measurements at once",
                "constant random forces and torques, linear drag",
            ),
            missing=(),
            first_action=0.0,
        )

    def platforms(self, draws: Tensor) -> Tensor:
        """Plausible platforms: parameters [P, M], in the order of `PARAMETERS`, from `draws` [DRAWS, M] in (0, 1).

        Size grows with the cube root of mass, and inertia with mass times size squared, as between known airframes. Up
        to 30% of the thrust curve is not quadratic. All parameters are scattered around these values. Masses differ by
        at least the share `MARGIN` from those of `MEASURED`.

        Raises:
            ValueError: for draws of another shape.
        """
        if draws.ndim != 2 or len(draws) != DRAWS:
            raise ValueError(f"expected draws of shape ({DRAWS}, M), got {tuple(draws.shape)}")
        u = dict(zip((*NUMBERS, "rotors"), draws, strict=True))
        mass = _masses(u["mass"], *self.mass_kg)
        size = (mass / 0.03) ** (1.0 / 3.0)  # a crazyflie's
        arm = 0.028 * size * between(u["arm"], 0.8, 1.5)
        ratio = _log_between(u["arm_ratio"], *self.arm_ratio)
        arm_x = arm * ratio**0.5
        arm_y = arm / ratio**0.5
        gyration = _log_between(u["inertia_x"], 0.1, 0.6)
        inertia_x = mass * arm_y**2 * gyration
        inertia_y = mass * arm_x**2 * gyration * between(u["inertia_y"], 0.8, 1.25)
        inertia_z = (inertia_x + inertia_y) * between(u["inertia_z"], 0.75, 1.0)  # never above the sum
        highest = mass * GRAVITY * between(u["thrust_to_weight"], *self.thrust_to_weight) / 4.0
        linear = highest * between(u["linear_thrust"], 0.0, 0.3)
        rise = between(u["lag_rise"], *self.lag_rise_s)
        fall = between(u["lag_fall"], rise.clamp(min=self.lag_fall_s[0]), self.lag_fall_s[1])
        zero = torch.zeros_like(mass)
        rows = {
            "mass_kg": mass,
            "inertia_x": inertia_x,
            "inertia_y": inertia_y,
            "inertia_z": inertia_z,
            "arm_x_m": arm_x,
            "arm_y_m": arm_y,
            "thrust_0_n": zero,
            "thrust_1_n": linear,
            "thrust_2_n": highest - linear,
            "torque_per_thrust_m": arm * between(u["torque_per_thrust"], 0.1, 0.25),
            "lag_rise_s": rise,
            "lag_fall_s": fall,
            "speed_max_rpm": 22000.0 / size,
            "rotor_radius_m": 0.8 * arm,
            "drag_x": mass * between(u["drag"], 0.0, 0.4),
            "drag_y": mass * between(u["drag"], 0.0, 0.4),
            "drag_z": mass * between(u["drag"], 0.0, 0.2),
            "delay_s": between(u["delay"], 0.0, DELAY_MAX_S),
            "observation_delay_s": zero,
            "sag": zero,
            "rotors": _one_of(u["rotors"], self.rotors),
        }
        return torch.stack([rows[name] for name in PARAMETERS])


RANGES = tuple(entry.name for entry in fields(Ranges) if entry.name != "rotors")


def _masses(u: Tensor, lowest: float, highest: float) -> Tensor:
    """Log-uniform masses from `lowest` to `highest`, kg, without those near a named platform's.

    Raises:
        UserError: if all of them are near.
    """
    gaps = []
    end = math.log(lowest)
    for mass in sorted(airframe.mass_kg for airframe in MEASURED.values()):
        first, last = (min(max(math.log(mass * (1.0 + side)), end), math.log(highest)) for side in (-MARGIN, MARGIN))
        gaps.append((first, last - first))
        end = last
    # u selects a place in the range without the gaps, in logs; every gap below it then shifts it upwards.
    width_without_gaps = math.log(highest / lowest) - sum(width for _, width in gaps)
    if width_without_gaps <= 0.0:
        raise UserError(f"expected masses apart from those of evaluation, got {lowest:g} to {highest:g} kg: all near")
    log_mass = math.log(lowest) + u * width_without_gaps
    for first, width in gaps:
        log_mass = torch.where(log_mass >= first, log_mass + width, log_mass)
    return log_mass.exp()


def _one_of(u: Tensor, values: list[int]) -> Tensor:
    """One of `values` for each `u` in (0, 1)."""
    return torch.tensor(values, device=u.device, dtype=u.dtype)[(u * len(values)).long().clamp(max=len(values) - 1)]


def _log_between(u: Tensor, low: float, high: float) -> Tensor:
    return low * (high / low) ** u
