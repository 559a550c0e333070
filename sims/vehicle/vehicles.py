"""Vehicle parameters: dimensions, actuators and tyres, which may vary per episode."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from enum import IntEnum

import torch
from torch import Tensor

from embodied.configuration import FiniteFloat, NonNegativeFloat, PositiveFloat


class Model(IntEnum):
    """Equations of motion, see `dynamics.step`; the values equal those in native.c."""

    DIFFERENTIAL_DRIVE = 0
    KINEMATIC_BICYCLE = 1
    DYNAMIC_BICYCLE = 2


@dataclass(frozen=True)
class Vehicle:
    """One vehicle; its position is its centre of mass, which is also the middle of its rectangular outline.

    Attributes:
        length_m, width_m: size of the outline.
        lidar_x_m: distance of the lidar in front of the middle.
        speed_min_m_s, speed_max_m_s: limits of the commanded speed.
        acceleration_m_s2, deceleration_m_s2: limits of the speed's change.
        lag_s: time constant with which speeds follow commands.
        yaw_rate_rad_s, yaw_acceleration_rad_s2: limits of a differential drive.
        steering_rad, steering_rate_rad_s: limits of a bicycle.
        front_axle_m, rear_axle_m: distances of the axles from the centre of mass.
        mass_kg, inertia_kg_m2, height_m: mass, moment about the vertical axis, height of the centre of mass.
        friction: coefficient of friction between tyres and road.
        front_stiffness, rear_stiffness: cornering stiffness, 1/rad: lateral force over load and friction at small slip.
    """

    length_m: PositiveFloat
    width_m: PositiveFloat
    lidar_x_m: FiniteFloat
    speed_min_m_s: FiniteFloat
    speed_max_m_s: PositiveFloat
    acceleration_m_s2: PositiveFloat
    deceleration_m_s2: PositiveFloat
    lag_s: NonNegativeFloat
    yaw_rate_rad_s: NonNegativeFloat = 0.0
    yaw_acceleration_rad_s2: NonNegativeFloat = 0.0
    steering_rad: NonNegativeFloat = 0.0
    steering_rate_rad_s: NonNegativeFloat = 0.0
    front_axle_m: NonNegativeFloat = 0.0
    rear_axle_m: NonNegativeFloat = 0.0
    mass_kg: NonNegativeFloat = 0.0
    inertia_kg_m2: NonNegativeFloat = 0.0
    height_m: NonNegativeFloat = 0.0
    friction: NonNegativeFloat = 0.0
    front_stiffness: NonNegativeFloat = 0.0
    rear_stiffness: NonNegativeFloat = 0.0

    def scattered(self, draws: Tensor, share: float) -> Tensor:
        """Parameters [N, P] with the `SCATTERED` ones scaled by 1 + `share` `draws`; `draws` [N, D] are in [-1, 1].

        Limits of commands do not vary: they are part of the contract.
        """
        values = torch.tensor(tuple(asdict(self).values()), device=draws.device).repeat(len(draws), 1)
        values[:, SCATTERED] *= 1.0 + share * draws
        return values


PARAMETERS = tuple(entry.name for entry in fields(Vehicle))
SCATTERED = [
    PARAMETERS.index(name)
    for name in (
        "acceleration_m_s2",
        "deceleration_m_s2",
        "lag_s",
        "yaw_acceleration_rad_s2",
        "steering_rate_rad_s",
        "mass_kg",
        "inertia_kg_m2",
        "friction",
        "front_stiffness",
        "rear_stiffness",
    )
]
"""Parameters varied by `randomisation`."""

JACKAL = Vehicle(
    length_m=0.508,
    width_m=0.430,
    lidar_x_m=0.0,
    speed_min_m_s=-0.3,
    speed_max_m_s=1.0,
    acceleration_m_s2=2.0,
    deceleration_m_s2=2.0,
    lag_s=0.1,
    yaw_rate_rad_s=1.5,
    yaw_acceleration_rad_s2=6.0,
)
"""Differential drive: outline of Clearpath's Jackal, half its highest speed, slowly backwards; typical lag and
accelerations.
"""
F1TENTH = Vehicle(
    length_m=0.58,
    width_m=0.31,
    lidar_x_m=0.275,
    speed_min_m_s=0.0,
    speed_max_m_s=8.0,
    acceleration_m_s2=9.51,
    deceleration_m_s2=9.51,
    lag_s=0.1,
    steering_rad=0.4189,
    steering_rate_rad_s=3.2,
    front_axle_m=0.15875,
    rear_axle_m=0.17145,
    mass_kg=3.74,
    inertia_kg_m2=0.04712,
    height_m=0.074,
    friction=1.0489,
    front_stiffness=4.718,
    rear_stiffness=5.4562,
)
"""A 1:10 race car: the parameters identified for the F1TENTH simulator (f1tenth.org); it could do 20 m/s."""
