"""The map that a simulated vehicle makes of its lidar."""

from __future__ import annotations

from typing import Any

from embodied.deployment.compiled_map import CompiledMap
from sims.vehicle.geometry import Lidar
from sims.vehicle.vehicles import Vehicle


def local_map(lidar: Lidar, vehicle: Vehicle, dt_s: float, **others: Any) -> CompiledMap:  # noqa: ANN401 - its fields
    """A map of `lidar` on `vehicle`; `others` are fields of `LocalMap`."""
    angles = tuple(lidar.angles().tolist())
    return CompiledMap(angles, lidar.range_m, dt_s, vehicle.lidar_x_m, **others)
