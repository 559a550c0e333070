"""Libraries for MuJoCo's physics."""

from __future__ import annotations

from enum import Enum


class Sim(Enum):
    """MuJoCo on the CPU's cores, or mujoco_warp, meant for a GPU."""

    mujoco = "mujoco"
    mjwarp = "mjwarp"
