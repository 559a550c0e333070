"""Many LIBERO simulations: one call runs an action chunk in each, over a thread pool."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence

import mujoco
import numpy as np
from numpy.typing import ArrayLike, NDArray

from embodied.errors import UserError
from sims.libero.physics import controller, native
from sims.libero.physics.host import HostSimulation
from sims.libero.scene.predicates import Predicate, holds
from sims.libero.scene.scene import Scene

STATE = int(mujoco.mjtState.mjSTATE_INTEGRATION)
PLACES = ("body_pos", "body_quat")


class Simulation(HostSimulation):
    """N simulations; `scenes[i]` is the scene of simulation i; the same Scene may appear many times.

    `sleep` lets MuJoCo skip objects at rest (differences of about 5e-6 rad after 60 control steps). `threads` defaults
    to the cores available to this process; results do not depend on it. Poses in `data[i]` are, as in stock, from
    before the integration of the last physics step; `qpos` and `qvel` are from after it. Without the compiled library
    numpy gives the same numbers, more slowly, with one warning.

    `aim` gives a simulation another goal than its scene's.

    Simulations share the model of their scene. A simulation with other poses of fixtures, or other values of the fields
    `varied` of the model, has a copy of 3 MB.
    """

    def __init__(
        self, scenes: Sequence[Scene], *, threads: int | None = None, sleep: bool = True, varied: Sequence[str] = ()
    ) -> None:
        self._own = (*PLACES, *varied)
        self.scenes = list(scenes)
        self.num = len(self.scenes)
        self.goals = [scene.goal for scene in self.scenes]
        self._shared = {scene: _stepping_model(scene.model, sleep) for scene in dict.fromkeys(self.scenes)}
        self.models = [self._shared[scene] for scene in self.scenes]
        self.data = [mujoco.MjData(model) for model in self.models]
        self.memory = np.zeros(self.num, dtype=native.CONTROLLER)
        self._pool = self._native = None
        library = native.library()
        if library is not None:
            self._pool = native.Pool(library, threads or len(os.sched_getaffinity(0)))
            self._separations = np.zeros((self.num, library.native_separations_bytes()), dtype=np.uint8)
            self._native_scenes: dict[tuple[Scene, tuple[Predicate, ...]], native.NativeScene] = {}
            self._native = self._pointers()
        for i, data in enumerate(self.data):
            self.write(i, data.qpos, data.qvel)

    def write(
        self,
        i: int,
        qpos: ArrayLike,
        qvel: ArrayLike,
        *,
        body_pos: ArrayLike | None = None,
        body_quat: ArrayLike | None = None,
        model_fields: Mapping[str, ArrayLike] | None = None,
        initial_joint: ArrayLike | None = None,
    ) -> None:
        """Restart simulation `i` from `qpos` [nq], `qvel` [nv].

        `body_pos` [nbody, 3] m and `body_quat` [nbody, 4] place fixtures, `model_fields` are those `varied`;
        by default these are the scene's. The controller starts as in stock after a reset: its null-space posture, its
        goal orientation and the position from which the first action starts are those of the arm at `initial_joint` [7]
        rad (the scene's nominal joints if None), independently of `qpos`.
        """
        scene = self.scenes[i]
        data = self.data[i]
        model = self.models[i]
        qpos = _copied("qpos", qpos, model.nq)
        qvel = _copied("qvel", qvel, model.nv)
        posture = scene.initial_arm if initial_joint is None else np.asarray(initial_joint)
        fields = {"body_pos": body_pos, "body_quat": body_quat} | dict(model_fields or {})
        model = self._with(i, {name: values for name, values in fields.items() if values is not None})
        mujoco.mj_resetData(model, data)
        data.qpos[scene.arm_qposadr] = posture
        mujoco.mj_kinematics(model, data)
        self.memory[i] = (data.site_xmat[scene.grip_site].reshape(3, 3), posture, 0.0, 1.0)
        data.qpos[:] = qpos
        data.qvel[:] = qvel
        mujoco.mj_forward(model, data)

    def step(
        self, ids: ArrayLike, actions: ArrayLike, *, stop_on_success: bool = True
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.bool_]]:
        """Run the chunk `actions` [n, K, 7] in simulations `ids` [n]: (executed [n, K], success [n], diverged [n]).

        A simulation that reaches its goal freezes after that control step, unless `stop_on_success` is False; `success`
        is whether the goal holds after the last executed step. A simulation that diverges ends with that step, without
        success, and is reset to its state before the chunk, at rest.
        """
        ids = np.ascontiguousarray(ids, dtype=np.int32)
        actions = np.ascontiguousarray(actions, dtype=np.float64)
        self._check(ids, actions)
        before = [self.data[i].qpos.copy() for i in ids]
        run = self._step_numpy if self._pool is None else self._step_native
        executed, success, diverged = run(ids, actions, stop_on_success)
        for row in np.flatnonzero(diverged):
            self._rest(ids[row], before[row])
        return executed, success, diverged

    def aim(self, i: int, goal: tuple[Predicate, ...]) -> None:
        """Give simulation `i` another goal in its scene from now on."""
        self.goals[i] = goal
        if self._native is not None:
            self._native[i].scene = native.ctypes.pointer(self._native_scene(i))

    def kick(self, i: int, change: ArrayLike) -> None:
        """Add `change` [nv] to the velocities of simulation `i`, and wake up all of its bodies."""
        model = self.models[i]
        data = self.data[i]
        data.qvel[:] += change
        _set_asleep(model, data, np.full(model.ntree, -1, dtype=np.int32))

    def qpos(self, ids: NDArray[np.int64]) -> NDArray[np.float64]:
        """Positions [n, nq] of simulations `ids` [n] of one scene."""
        return np.stack([self.data[i].qpos for i in ids])

    def placed(self, ids: NDArray[np.int64], bodies: Sequence[int]) -> NDArray[np.float64]:
        """Positions and quaternions [n, bodies, 7] in which `bodies` are attached; `ids` are of one scene."""
        models = [self.models[i] for i in ids]
        bodies = list(bodies)
        return np.stack([np.hstack((model.body_pos[bodies], model.body_quat[bodies])) for model in models])

    def varied_fields(self, ids: NDArray[np.int64]) -> dict[str, NDArray[np.float64]]:
        """The fields `varied` of the models of simulations `ids` [n] of one scene: name -> [n, ...]."""
        names = self._own[len(PLACES) :]
        return {name: np.stack([getattr(self.models[i], name) for i in ids]) for name in names}

    def gripper(self) -> NDArray[np.float64]:
        """Commands [N, 2] of the fingers, normalised."""
        return self.memory["gripper"].copy()

    def satisfied(self, i: int) -> bool:
        """Whether simulation `i` satisfies its goal."""
        if self._pool is None:
            return all(self.achieved(i))
        return self._pool.satisfied(self._native, i)

    def achieved(self, i: int) -> list[bool]:
        """Whether simulation `i` satisfies each part of its goal, in their order."""
        scene = self.scenes[i]
        data = self.data[i]
        return [holds(part, scene.geom_owner, data) for part in self.goals[i]]

    def state_dict(self) -> dict[str, NDArray]:
        """State to continue bit for bit: arrays of the simulations' concatenated rows."""
        return {
            "physics": np.concatenate([_physics(m, d) for m, d in zip(self.models, self.data, strict=True)]),
            "asleep": np.concatenate([data.tree_asleep for data in self.data]),
            "memory": self.memory.view(np.float64).reshape(self.num, -1).copy(),
            **{name: np.concatenate([getattr(model, name) for model in self.models]) for name in self._own},
        }

    def load_state_dict(self, state: dict[str, NDArray]) -> None:
        """Continue from `state_dict` of simulations of the same scenes; UserError if the sizes differ."""
        sizes = {
            "physics": [mujoco.mj_stateSize(model, STATE) for model in self.models],
            "asleep": [model.ntree for model in self.models],
            "memory": [1] * self.num,
            **{name: [len(getattr(model, name)) for model in self.models] for name in self._own},
        }
        for name, expected in sizes.items():
            if len(state[name]) != sum(expected):
                raise UserError(f"{name}: expected {sum(expected)} rows for these scenes, got {len(state[name])}")
        parts = {name: np.split(np.asarray(state[name]), np.cumsum(rows)[:-1]) for name, rows in sizes.items()}
        for i, data in enumerate(self.data):
            model = self._with(i, {name: parts[name][i] for name in self._own})
            mujoco.mj_resetData(model, data)
            mujoco.mj_setState(model, data, np.ascontiguousarray(parts["physics"][i]), STATE)
            mujoco.mj_forward(model, data)  # sleeping bodies keep derived quantities from when they were awake
            _set_asleep(model, data, parts["asleep"][i])
        self.memory.view(np.float64).reshape(self.num, -1)[:] = state["memory"]

    def close(self) -> None:
        """Stop the threads; stepping afterwards uses numpy."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _check(self, ids: NDArray[np.int32], actions: NDArray[np.float64]) -> None:
        if actions.ndim != 3 or actions.shape[0] != len(ids) or actions.shape[2] != 7:
            raise ValueError(f"expected actions [{len(ids)}, K, 7], one chunk per id, got {list(actions.shape)}")
        if len(set(ids.tolist())) != len(ids) or (len(ids) and not 0 <= ids.min() <= ids.max() < self.num):
            raise ValueError(f"expected different ids in 0..{self.num - 1}, got {ids.tolist()}")
        if not np.isfinite(actions).all():
            raise ValueError("expected finite actions, got nan or infinity; check the policy's output")

    def _step_native(
        self, ids: NDArray[np.int32], actions: NDArray[np.float64], stop_on_success: bool
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.bool_]]:
        return self._pool.step(self._native, ids, actions, stop_on_success)

    def _step_numpy(
        self, ids: NDArray[np.int32], actions: NDArray[np.float64], stop_on_success: bool
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.bool_]]:
        executed = np.zeros(actions.shape[:2], dtype=np.bool_)
        success = np.zeros(len(ids), dtype=np.bool_)
        diverged = np.zeros_like(success)
        for row, i in enumerate(ids):
            model = self.models[i]
            data = self.data[i]
            scene = self.scenes[i]
            memory = self.memory[i]
            for k, action in enumerate(actions[row]):
                executed[row, k] = True
                diverged[row] = not controller.control_step(model, data, scene, memory, action)
                success[row] = not diverged[row] and self.satisfied(i)
                if diverged[row] or (success[row] and stop_on_success):
                    break
        return executed, success, diverged

    def _rest(self, i: int, qpos: NDArray[np.float64]) -> None:
        """Reset simulation `i` to `qpos`, at rest."""
        mujoco.mj_resetData(self.models[i], self.data[i])
        self.data[i].qpos[:] = qpos
        mujoco.mj_forward(self.models[i], self.data[i])

    def _with(self, i: int, changes: Mapping[str, ArrayLike]) -> mujoco.MjModel:
        """Model of simulation `i` with the fields of `changes`, else the scene's; a copy if they differ."""
        model = self.models[i]
        nominal = self.scenes[i].model
        values = {name: np.asarray(changes.get(name, getattr(nominal, name))) for name in self._own}
        if unknown := sorted(changes.keys() - values.keys()):
            raise ValueError(f"expected fields among {', '.join(self._own)}, got {', '.join(unknown)}")
        if all(np.array_equal(getattr(model, name), value) for name, value in values.items()):
            return model
        if model is self._shared[self.scenes[i]]:
            model = self.models[i] = copy.copy(model)
            if self._native is not None:
                self._native[i].model = model._address
        for name, value in values.items():
            getattr(model, name)[:] = value
        return model

    def _pointers(self) -> object:
        """Array of structs for native.c."""
        rows = (native.NativeSimulation * self.num)()
        for i in range(self.num):
            memory = self.memory.ctypes.data + i * self.memory.itemsize
            separations = self._separations[i].ctypes.data
            addresses = self.models[i]._address, self.data[i]._address
            rows[i] = (*addresses, native.ctypes.pointer(self._native_scene(i)), memory, separations)
        return rows

    def _native_scene(self, i: int) -> native.NativeScene:
        """Struct of the scene and goal of simulation `i`, which stays in memory."""
        key = self.scenes[i], self.goals[i]
        if key not in self._native_scenes:
            self._native_scenes[key] = native.NativeScene.of(*key)
        return self._native_scenes[key]


def _stepping_model(model: mujoco.MjModel, sleep: bool) -> mujoco.MjModel:
    """Copy of the model with the option `sleep` and without sensors, which are unused and take time."""
    # native_fluid.h computes the drag of still air on bodies, none on ellipsoids
    assert not model.geom_fluid.any()
    assert not model.opt.wind.any()
    result = copy.copy(model)
    result.opt.disableflags |= int(mujoco.mjtDisableBit.mjDSBL_SENSOR)
    if sleep:
        result.opt.enableflags |= int(mujoco.mjtEnableBit.mjENBL_SLEEP)
    return result


def _copied(name: str, values: ArrayLike, size: int) -> NDArray[np.float64]:
    copied = np.array(values, dtype=np.float64)
    if copied.shape != (size,):
        raise ValueError(f"expected {name} [{size}] of this simulation's scene, got {list(copied.shape)}")
    return copied


def _physics(model: mujoco.MjModel, data: mujoco.MjData) -> NDArray[np.float64]:
    state = np.empty(mujoco.mj_stateSize(model, STATE))
    mujoco.mj_getState(model, data, state, STATE)
    return state


def _set_asleep(model: mujoco.MjModel, data: mujoco.MjData, asleep: NDArray[np.int32]) -> None:
    """Set which trees sleep, and the arrays that MuJoCo derives from it; otherwise it would detect a change."""
    data.tree_asleep[:] = asleep
    data.tree_awake[:] = asleep < 0
    moving = model.body_treeid >= 0
    data.body_awake[moving] = data.tree_awake[model.body_treeid[moving]]
    bodies = np.flatnonzero(data.body_awake != 0)
    parents = 1 + np.flatnonzero(data.body_awake[model.body_parentid[1:]] != 0)
    dofs = np.flatnonzero(data.body_awake[model.dof_bodyid] == 1)
    data.body_awake_ind[: len(bodies)] = bodies
    data.parent_awake_ind[: len(parents)] = parents
    data.dof_awake_ind[: len(dofs)] = dofs
    data.ntree_awake, data.nbody_awake = int(data.tree_awake.sum()), len(bodies)
    data.nparent_awake, data.nv_awake = len(parents), len(dofs)
