"""What drives: dimensions, actuators and tyres, as numbers that every episode may vary."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from enum import IntEnum

import torch
from torch import Tensor


class Model(IntEnum):
    """Equations of motion; the numbers are those of native.c. See `dynamics.step`."""

    DIFFERENTIAL_DRIVE = 0
    KINEMATIC_BICYCLE = 1
    DYNAMIC_BICYCLE = 2


@dataclass(frozen=True)
class Vehicle:
    """One vehicle; its position is that of its centre of mass, which is also the middle of its rectangular outline.

    Attributes:
        length_m, width_m: outline.
        lidar_x_m: how far the lidar is mounted in front of the middle.
        speed_min_m_s, speed_max_m_s: limits of the commanded speed.
        acceleration_m_s2, deceleration_m_s2: of the speed, at most.
        lag_s: time constant with which speeds follow commands.
        yaw_rate_rad_s, yaw_acceleration_rad_s2: of a differential drive, at most.
        steering_rad, steering_rate_rad_s: of a bicycle, at most.
        front_axle_m, rear_axle_m: distances of the axles from the centre of mass.
        mass_kg, inertia_kg_m2, height_m: mass, moment about the vertical axis, height of the centre of mass.
        friction: between tyres and road.
        front_stiffness, rear_stiffness: cornering stiffness, 1/rad: side force over load and friction at little slip.
    """

    length_m: float
    width_m: float
    lidar_x_m: float
    speed_min_m_s: float
    speed_max_m_s: float
    acceleration_m_s2: float
    deceleration_m_s2: float
    lag_s: float
    yaw_rate_rad_s: float = 0.0
    yaw_acceleration_rad_s2: float = 0.0
    steering_rad: float = 0.0
    steering_rate_rad_s: float = 0.0
    front_axle_m: float = 0.0
    rear_axle_m: float = 0.0
    mass_kg: float = 0.0
    inertia_kg_m2: float = 0.0
    height_m: float = 0.0
    friction: float = 0.0
    front_stiffness: float = 0.0
    rear_stiffness: float = 0.0

    def scattered(self, draws: Tensor, share: float) -> Tensor:
        """Parameters [N, P], each off by `share` times a number in [-1, 1] of `draws` [N, D], but for the outline.

        Limits of commands stay as they are: the contract states them.
        """
        values = torch.tensor(tuple(asdict(self).values()), device=draws.device).repeat(len(draws), 1)
        values[:, SCATTERED] *= 1.0 + share * draws
        return values


PARAMETERS = tuple(entry.name for entry in fields(Vehicle))
SCATTERED = [
    PARAMETERS.index(name)
    for name in (
        "acceleration_m_s2", "deceleration_m_s2", "lag_s", "yaw_acceleration_rad_s2", "steering_rate_rad_s", "mass_kg",
        "inertia_kg_m2", "friction", "front_stiffness", "rear_stiffness",
    )
]  # fmt: skip
"""What `randomisation` varies."""

JACKAL = Vehicle(
    length_m=0.508, width_m=0.430, lidar_x_m=0.0, speed_min_m_s=0.0, speed_max_m_s=1.0, acceleration_m_s2=2.0,
    deceleration_m_s2=2.0, lag_s=0.1, yaw_rate_rad_s=1.5, yaw_acceleration_rad_s2=6.0,
)  # fmt: skip
"""A differential drive with the outline of Clearpath's Jackal, at half its highest speed; lag and accelerations are
round figures of the class."""
F1TENTH = Vehicle(
    length_m=0.58, width_m=0.31, lidar_x_m=0.275, speed_min_m_s=0.0, speed_max_m_s=8.0, acceleration_m_s2=9.51,
    deceleration_m_s2=9.51, lag_s=0.1, steering_rad=0.4189, steering_rate_rad_s=3.2, front_axle_m=0.15875,
    rear_axle_m=0.17145, mass_kg=3.74, inertia_kg_m2=0.04712, height_m=0.074, friction=1.0489,
    front_stiffness=4.718, rear_stiffness=5.4562,
)  # fmt: skip
"""A 1:10 race car: the parameters identified for the F1TENTH simulator (f1tenth.org); it could do 20 m/s."""
