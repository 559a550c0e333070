"""Maps and drive parameters of a simulated vehicle and its lidar, for planners."""

from __future__ import annotations

from typing import Any

from embodied.navigation.compiled_map import CompiledMap
from embodied.navigation.dynamic_window import Drive
from sims.vehicle.geometry import Lidar
from sims.vehicle.vehicles import Vehicle


def local_map(lidar: Lidar, vehicle: Vehicle, dt_s: float, **others: Any) -> CompiledMap:  # noqa: ANN401 - its fields
    """A map of `lidar` on `vehicle`; `others` are fields of `LocalMap`."""
    angles = tuple(lidar.angles().tolist())
    return CompiledMap(angles, lidar.range_m, dt_s, vehicle.lidar_x_m, **others)


def drive_of(vehicle: Vehicle, lidar: Lidar) -> Drive:
    """Parameters of a differential drive `vehicle` with `lidar` for the dynamic window."""
    return Drive(
        vehicle.length_m,
        vehicle.width_m,
        vehicle.acceleration_m_s2,
        vehicle.deceleration_m_s2,
        vehicle.yaw_acceleration_rad_s2,
        vehicle.lag_s,
        tuple(lidar.angles().tolist()),
        lidar.range_m,
        vehicle.lidar_x_m,
    )
