"""Stock LIBERO's own simulations, with the interface of `physics.simulation`.

This runs under an interpreter that has robosuite 1.4.0; see `interpreter`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import mujoco
import numpy as np
from numpy.typing import ArrayLike, NDArray

from embodied.errors import UserError
from sims.libero.physics.host import HostSimulation
from sims.libero.scene.scene import Scene
from sims.libero.stock import adapted
from sims.libero.suite import WARM_UP

BROKEN = [int(getattr(mujoco.mjtWarning, f"mjWARN_BAD{name}")) for name in ("QPOS", "QVEL", "QACC")]


class StockSimulation(HostSimulation):
    """N of stock LIBERO's environments; `scenes[i]` is our scene of the same task, with the same addresses.

    Stock computes resets, controllers, physics and the goal. The controller of an episode's first action therefore uses
    the arm's state after the reset, not the initial state that is written afterwards.

    Raises:
        UserError: without LIBERO's official assets, or where the packages are not installed.
    """

    def __init__(self, scenes: Sequence[Scene]) -> None:
        self.scenes = list(scenes)
        self.num = len(scenes)
        root = scenes[0].assets.root
        assert root is not None
        try:
            adapted.adapt(root)
            self._stock = [adapted.make(str(scene.task.bddl)) for scene in self.scenes]
        except ImportError as error:
            raise UserError(
                f"{error.name} is not installed, which stock LIBERO needs; leave out task.python"
            ) from error
        for scene, stock in zip(self.scenes, self._stock, strict=True):
            names = [stock.sim.model.body_id2name(body) for body in range(stock.sim.model.nbody)]
            ours = [scene.model.body(body).name for body in range(scene.model.nbody)]
            if names != ours:
                raise AssertionError(f"{scene.task.name}: expected the bodies {ours}, got {names}")
            stock.step(WARM_UP[0])  # compiles robosuite's functions

    def write(
        self,
        i: int,
        qpos: ArrayLike,
        qvel: ArrayLike,
        *,
        body_pos: ArrayLike,
        body_quat: ArrayLike,
        model_fields: Mapping[str, ArrayLike] | None = None,
    ) -> None:
        """Reset environment `i`, set the poses of its fixtures, then write the initial state as stock does."""
        scene = self.scenes[i]
        stock = self._stock[i]
        stock.seed(0)
        stock.reset()
        rows = {scene.model.body(fixture.body).name: fixture.body for fixture in scene.fixtures}
        places = {name: (np.asarray(body_pos)[row], np.asarray(body_quat)[row]) for name, row in rows.items()}
        adapted.place(stock.sim.model, places)
        stock.set_init_state(np.concatenate(([0.0], np.asarray(qpos), np.asarray(qvel))))

    def step(
        self, ids: ArrayLike, actions: ArrayLike, *, stop_on_success: bool = True
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.bool_]]:
        """Run the chunk `actions` [n, K, 7] in environments `ids` [n]; see `Simulation.step`."""
        ids = np.asarray(ids)
        actions = np.asarray(actions, dtype=np.float64)
        executed = np.zeros(actions.shape[:2], dtype=np.bool_)
        success = np.zeros(len(ids), dtype=np.bool_)
        diverged = np.zeros_like(success)
        for row, i in enumerate(ids):
            for k, action in enumerate(actions[row]):
                executed[row, k] = True
                done = bool(self._stock[i].step(action)[2])
                diverged[row] = self._broken(i)
                success[row] = done and not diverged[row]
                if diverged[row] or (success[row] and stop_on_success):
                    break
        return executed, success, diverged

    def qpos(self, ids: NDArray[np.int64]) -> NDArray[np.float64]:
        """Positions [n, nq] of environments `ids` [n] of one scene."""
        return np.stack([self._stock[i].sim.data.qpos for i in ids])

    def placed(self, ids: NDArray[np.int64], bodies: Sequence[int]) -> NDArray[np.float64]:
        """Positions and quaternions [n, bodies, 7] in which `bodies` are attached, in environments `ids`."""
        models = [self._stock[i].sim.model for i in ids]
        bodies = list(bodies)
        return np.stack([np.hstack((model.body_pos[bodies], model.body_quat[bodies])) for model in models])

    def gripper(self) -> NDArray[np.float64]:
        """Commands [N, 2] of the fingers, normalised."""
        return np.stack([np.broadcast_to(stock.robots[0].gripper.current_action, 2) for stock in self._stock])

    def satisfied(self, i: int) -> bool:
        """Whether environment `i` satisfies its goal by stock's check."""
        return bool(self._stock[i].check_success())

    def achieved(self, i: int) -> list[bool]:
        """Whether environment `i` satisfies each part of its goal by stock's check, in their order."""
        problem = self._stock[i].env
        return [bool(problem._eval_predicate(part)) for part in problem.parsed_problem["goal_state"]]

    def state_dict(self) -> NoReturn:
        """Not supported: stock has no access to its whole state.

        Raises:
            UserError: always.
        """
        raise UserError("stock LIBERO's state, of which controllers keep a part, cannot be saved; only evaluate there")

    def load_state_dict(self, state: dict[str, Any]) -> NoReturn:
        """Not supported: stock cannot restore a state.

        Raises:
            UserError: always.
        """
        self.state_dict()

    def close(self) -> None:
        """Close stock's environments."""
        for stock in self._stock:
            stock.close()
        self._stock = []

    def _broken(self, i: int) -> bool:
        """Whether environment `i` has diverged since its reset; MuJoCo then resets it in the middle of the episode."""
        data = self._stock[i].sim.data
        return bool(np.any(data.warning.number[BROKEN])) or not np.isfinite(data.qpos).all()
