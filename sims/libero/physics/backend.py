"""Choice of the physics library."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias

import torch

from embodied.errors import UserError

if TYPE_CHECKING:
    from sims.libero.physics.simulation import Simulation
    from sims.libero.physics.warp_simulation import WarpSimulation
    from sims.libero.scene.scene import Scene
    from sims.libero.stock.simulation import StockSimulation

Physics: TypeAlias = "Simulation | WarpSimulation | StockSimulation"


class LiberoSim(Enum):
    """MuJoCo on the CPU's cores, mujoco_warp, meant for a GPU, or stock LIBERO itself, only for evaluation."""

    mujoco = "mujoco"
    mjwarp = "mjwarp"
    stock = "stock"


def simulate(
    sim: LiberoSim,
    scenes: Sequence[Scene],
    threads: int | None = None,
    device: torch.device | str = "cpu",
    varied: Sequence[str] = (),
) -> Physics:
    """Simulations of `scenes`; `threads` are MuJoCo's, all cores if None, `device` is mujoco_warp's.

    `varied` are fields of the model that initial states draw.

    Raises:
        UserError: for `varied` fields in stock LIBERO.
    """
    if sim is LiberoSim.mujoco:
        from sims.libero.physics.simulation import Simulation

        return Simulation(scenes, threads=threads, varied=varied)
    if sim is LiberoSim.stock:
        if varied:
            raise UserError("stock LIBERO has no domain randomisation; set task.randomisation.evaluation=false")
        from sims.libero.stock.simulation import StockSimulation

        return StockSimulation(scenes)
    from sims.libero.physics.warp_simulation import WarpSimulation
    from sims.warp_order import warp_device

    return WarpSimulation(scenes, device=str(warp_device(device)), varied=varied)
