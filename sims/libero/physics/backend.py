"""Which library computes the physics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from sims.backend import Sim

if TYPE_CHECKING:
    from sims.libero.physics.simulation import Simulation
    from sims.libero.physics.warp_simulation import WarpSimulation
    from sims.libero.scene.scene import Scene

Physics: TypeAlias = "Simulation | WarpSimulation"


def simulate(sim: Sim, scenes: Sequence[Scene], threads: int | None = None) -> Physics:
    """Simulations of `scenes`; `threads` are MuJoCo's, all cores if None."""
    if sim is Sim.mujoco:
        from sims.libero.physics.simulation import Simulation

        return Simulation(scenes, threads=threads)
    from sims.libero.physics.warp_simulation import WarpSimulation

    return WarpSimulation(scenes)
