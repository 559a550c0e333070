"""Many LIBERO simulations on mujoco_warp: like `Simulation`, but all worlds of a scene advance together on one device.

On CUDA a control step (25 substeps of controller and physics, then the goal) is one captured graph. On a CPU it is some
forty times slower than `Simulation` and serves for tests.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence

import mujoco
import numpy as np
import torch
import warp as wp
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from embodied.errors import UserError
from sims.libero.physics.controller import SUBSTEPS, arm_matrices
from sims.libero.scene.placement import InitialState
from sims.libero.scene.predicates import Predicate
from sims.libero.scene.scene import Scene

wp.config.log_level = wp.LOG_ERROR  # before mujoco_warp, which would report every kernel

import mujoco_warp  # noqa: E402

from sims.libero.physics import warp_kernels as kernels  # noqa: E402
from sims.warp_capacity import OVERFLOW, capacity  # noqa: E402
from sims.warp_order import captured, in_order  # noqa: E402

CACHED_STARTS = 1024
"""Number of starts of a scene that are stored on the device, about 20 kB each."""
KINDS = {"in": kernels.IN, "on_object": kernels.ON_OBJECT, "on_site": kernels.ON_SITE}
STATE = ("qpos", "qvel", "qacc_warmstart")  # of mujoco_warp's data
PLACES = ("body_pos", "body_quat")  # of its model, one per world
MEMORY = (
    "goal_orientation",
    "posture",
    "gripper",
    "fresh",
    "start_position",
    "start_orientation",
    "start_jacobian",
    "start_inertia",
)  # of the controller


class WarpSimulation:
    """N simulations; `scenes[i]` is the i-th one's scene. Worlds of one scene are stepped together on `device`.

    `device` is one of warp's ("cuda:0", "cpu"; CUDA where there is a GPU if None). Physics is in single precision and
    without MuJoCo's sleep. Finished worlds are restored to their last state. `begin`, `run` and `observed_state` take
    and return tensors on the device, without synchronisation within a chunk. `varied` are fields of the model, by name,
    that differ between starts.
    """

    def __init__(self, scenes: Sequence[Scene], *, device: str | None = None, varied: Sequence[str] = ()) -> None:
        self.scenes = list(scenes)
        self.num = len(self.scenes)
        self.overflow: Tensor | None = None  # [N] bool after `run`: worlds with more contacts than allocated
        self.device = wp.get_device(device)
        self.torch_device = torch.device(wp.device_to_torch(self.device))
        self.groups: list[Worlds] = []
        self._place = np.zeros((self.num, 2), dtype=np.int64)  # group, and row in it
        with in_order(self.device):
            for number, scene in enumerate(dict.fromkeys(self.scenes)):
                ids = np.array([i for i, other in enumerate(self.scenes) if other is scene])
                self._place[ids, 0] = number
                self._place[ids, 1] = np.arange(len(ids))
                self.groups.append(Worlds(scene, ids, self.device, tuple(varied)))

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
        """Restart simulation `i`; see `Simulation.write`."""
        group, row = self._place[i]
        model = self.scenes[i].model
        state = InitialState(
            np.asarray(qpos, dtype=np.float64),
            np.asarray(qvel, dtype=np.float64),
            model.body_pos if body_pos is None else np.asarray(body_pos),
            model.body_quat if body_quat is None else np.asarray(body_quat),
            {name: np.asarray(values) for name, values in (model_fields or {}).items()},
        )
        self.groups[group].write(int(row), state, initial_joint)

    def begin(self, ids: Tensor, starts: Tensor, initial: Callable[[int, int], InitialState]) -> None:
        """Restart simulations `ids` [M] at the numbered `starts` [M]; each `initial(i, start)` is computed once.

        The states of up to CACHED_STARTS starts of a scene stay on the device and are copied from there.
        """
        ids = ids.cpu().numpy()
        numbers = starts.cpu().numpy()
        for group, worlds in enumerate(self.groups):
            in_group = np.flatnonzero(self._place[ids, 0] == group)
            if len(in_group):
                worlds.begin(self._place[ids[in_group], 1], numbers[in_group].tolist(), initial)

    def run(
        self, actions: Tensor, remaining_steps: Tensor, *, stop_on_success: bool = True
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run the first `remaining_steps` [N] actions of the chunk `actions` [N, K, 7].

        Returns the tuple of `step` for all N simulations.
        """
        executed = torch.zeros(actions.shape[:2], dtype=torch.bool, device=self.torch_device)
        success, diverged, self.overflow = torch.zeros(3, self.num, dtype=torch.bool, device=self.torch_device)
        for worlds in self.groups:
            rows = worlds.rows
            result = worlds.step(actions[worlds.rows], remaining_steps[worlds.rows], stop_on_success)
            executed[rows], success[rows], diverged[rows] = result
            self.overflow[rows] = diverged[rows] & ((worlds.overflow & OVERFLOW) != 0)
        return executed, success, diverged

    def step(
        self, ids: ArrayLike, actions: ArrayLike, *, stop_on_success: bool = True
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.bool_]]:
        """Run the chunk `actions` [n, K, 7] in simulations `ids` [n]: (executed [n, K], success [n], diverged [n]).

        See `Simulation.step`.
        """
        ids = np.asarray(ids, dtype=np.int64)
        actions = np.asarray(actions, dtype=np.float64)
        chunk = np.zeros((self.num, *actions.shape[1:]))
        remaining_steps = np.zeros(self.num, dtype=np.int64)
        chunk[ids] = actions
        remaining_steps[ids] = actions.shape[1]
        chunk, remaining_steps = (torch.from_numpy(values).to(self.torch_device) for values in (chunk, remaining_steps))
        result = self.run(chunk, remaining_steps, stop_on_success=stop_on_success)
        return tuple(values.cpu().numpy()[ids] for values in result)

    def observed_state(self, ids: NDArray[np.int64], bodies: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """State that observations are computed from, of all simulations `ids` [W] of one scene, on the device.

        It is positions [W, nq], poses in which `bodies` are attached [W, bodies, 7], and commands of fingers [W, 2].
        """
        views = self.groups[self._place[ids[0], 0]].views
        placed = torch.cat([views[name][:, list(bodies)] for name in PLACES], -1)
        return views["qpos"].double(), placed.double(), views["gripper"]

    def kick(self, i: int, change: ArrayLike) -> None:
        """Add `change` [nv] to the velocities of simulation `i`."""
        group, row = self._place[i]
        velocity = self.groups[group].views["qvel"][row]
        velocity.add_(torch.as_tensor(np.asarray(change)).to(velocity))

    def qpos(self, ids: NDArray[np.int64]) -> NDArray[np.float64]:
        """Positions [n, nq] of simulations `ids` [n] of one scene."""
        return self._read("qpos", ids)

    def qvel(self, ids: NDArray[np.int64]) -> NDArray[np.float64]:
        """Velocities [n, nv] of simulations `ids` [n] of one scene."""
        return self._read("qvel", ids)

    def placed(self, ids: NDArray[np.int64], bodies: Sequence[int]) -> NDArray[np.float64]:
        """Positions and quaternions [n, bodies, 7] in which `bodies` are attached; `ids` are of one scene."""
        return np.concatenate([self._read(name, ids)[:, list(bodies)] for name in PLACES], -1)

    def varied_fields(self, ids: NDArray[np.int64]) -> dict[str, NDArray[np.float64]]:
        """The fields `varied` of the models of simulations `ids` [n] of one scene: name -> [n, ...]."""
        return {name: self._read(name, ids) for name in self.groups[self._place[ids[0], 0]].varied}

    def gripper(self) -> NDArray[np.float64]:
        """Commands [N, 2] of the fingers, normalised."""
        commands = np.empty((self.num, 2))
        for worlds in self.groups:
            commands[worlds.ids] = worlds.read("gripper")
        return commands

    def achieved(self, i: int) -> list[bool]:
        """Whether simulation `i` satisfied each part of its goal after its last control step, in their order."""
        group, row = self._place[i]
        return self.groups[group].achieved[row].bool().tolist()

    def state_dict(self) -> dict[str, NDArray]:
        """State to continue with the same numbers: "GROUP.FIELD" -> array over the group's worlds."""
        return {
            f"{number}.{name}": worlds.read(name) for number, worlds in enumerate(self.groups) for name in worlds.fields
        }

    def load_state_dict(self, state: dict[str, NDArray]) -> None:
        """Continue from `state_dict` of simulations of the same scenes; UserError when the sizes differ."""
        for number, worlds in enumerate(self.groups):
            for name in worlds.fields:
                expected = worlds.read(name).shape
                values = state.get(f"{number}.{name}")
                if values is None or values.shape != expected:
                    got = None if values is None else list(values.shape)
                    raise UserError(f"{number}.{name}: expected {list(expected)} for these scenes, got {got}")
        for number, worlds in enumerate(self.groups):
            worlds.load({name: state[f"{number}.{name}"] for name in worlds.fields})

    def close(self) -> None:
        """No-op: there are no threads or processes to stop."""

    def _read(self, name: str, ids: NDArray[np.int64]) -> NDArray[np.float64]:
        group = self._place[ids[0], 0]
        return self.groups[group].read(name)[self._place[ids, 1]]


class Worlds:
    """The W worlds of one scene; `rows` [W] are their simulations, `views` warp's arrays of `fields` as tensors."""

    def __init__(self, scene: Scene, ids: NDArray[np.int64], device: wp.Device, varied: tuple[str, ...]) -> None:
        self.scene = scene
        self.ids = ids
        self.count = len(ids)
        self.varied = varied
        model = copy.copy(scene.model)
        model.opt.disableflags |= int(mujoco.mjtDisableBit.mjDSBL_SENSOR)
        self._host = model
        self._scratch = mujoco.MjData(model)
        self.model = mujoco_warp.put_model(model, batch_sizes=dict.fromkeys((*PLACES, *varied), self.count))
        self.model.opt.warn_overflow = 0  # overflows count as diverged
        room = capacity(model, self.model)
        self.data = mujoco_warp.make_data(model, nworld=self.count, **room._asdict())
        self.overflow = wp.to_torch(self.data.overflow)  # [W] bits, of the last `step`
        self._arm = _arm(scene, model)
        self._goal = _goal(scene)
        self._memory = _memory(self.count)
        self._saved = {name: wp.clone(getattr(self.data, name)) for name in STATE}
        self._touches, self._achieved = (wp.zeros((self.count, len(scene.goal)), dtype=int) for _ in range(2))
        self.achieved = wp.to_torch(self._achieved)  # [W, P], see `kernels.judge`
        self._action = wp.zeros((self.count, 7), dtype=wp.float64)
        flags = ("remaining_steps", "active", "executed", "success", "diverged")
        self._flags = {name: wp.zeros(self.count, dtype=int) for name in flags}
        self._graphs: dict[bool, wp.Graph] = {}
        self._device = device
        self.fields = (*STATE, *PLACES, *varied, *MEMORY)
        self.views = {name: wp.to_torch(self._array(name)) for name in self.fields}
        self.rows = torch.from_numpy(ids).to(self.views["qpos"].device)
        self._slots: dict[int, int] = {}  # number of a start -> its row in `_starts`
        self._starts: dict[str, Tensor] = {}
        nominal = InitialState(model.qpos0.copy(), np.zeros(model.nv), scene.model.body_pos, scene.model.body_quat)
        for name, values in self._tensors([self._fresh(nominal)]).items():
            self.views[name].copy_(values.expand_as(self.views[name]))

    def write(self, row: int, state: InitialState, posture: ArrayLike | None) -> None:
        """Restart world `row` from `state`, with the initial controller of an arm at `posture` [7]."""
        self._put(np.array([row]), self._tensors([self._fresh(state, posture)]))

    def begin(
        self, rows: NDArray[np.int64], numbers: Sequence[int], initial: Callable[[int, int], InitialState]
    ) -> None:
        """Restart worlds `rows` at the starts `numbers`."""
        new = {number: row for number, row in zip(numbers, rows, strict=True) if number not in self._slots}
        if len(self._slots) + len(new) > CACHED_STARTS:
            self._slots = {}
            self._starts = {}
            new = dict(zip(numbers, rows, strict=True))
        if new:
            states = self._tensors([self._fresh(initial(int(self.ids[row]), number)) for number, row in new.items()])
            old = self._starts
            self._starts = {name: torch.cat([old[name], values]) if old else values for name, values in states.items()}
            self._slots |= {number: len(self._slots) + i for i, number in enumerate(new)}
        slots = torch.tensor([self._slots[number] for number in numbers], device=self.rows.device)
        self._put(rows, {name: values[slots] for name, values in self._starts.items()})

    def _fresh(self, state: InitialState, posture: ArrayLike | None = None) -> dict[str, ArrayLike]:
        """Values of `fields` at the beginning of an episode."""
        data = self._scratch
        model = self._host
        scene = self.scene
        posture = scene.initial_arm if posture is None else np.asarray(posture)
        model.body_pos[:] = state.body_pos
        model.body_quat[:] = state.body_quat
        data.qpos[:] = state.qpos
        data.qpos[scene.arm_qposadr] = posture
        mujoco.mj_kinematics(model, data)
        mujoco.mj_comPos(model, data)
        mujoco.mj_makeM(model, data)
        jacobian, inertia = arm_matrices(model, data, scene)
        orientation = data.site_xmat[scene.grip_site].reshape(3, 3).copy()
        nominal = {name: getattr(scene.model, name) for name in self.varied}
        return (
            state._asdict()
            | nominal
            | dict(state.model_fields or {})
            | {
                "qacc_warmstart": np.zeros(model.nv),
                "posture": posture,
                "gripper": np.zeros(2),
                "fresh": 1,
                "start_position": data.site_xpos[scene.grip_site].copy(),
                "start_orientation": orientation,
                "goal_orientation": orientation,
                "start_jacobian": jacobian,
                "start_inertia": inertia,
            }
        )

    def _tensors(self, states: Sequence[dict[str, ArrayLike]]) -> dict[str, Tensor]:
        """The `states` [n] as tensors [n, ...] on the device."""
        return {
            name: torch.from_numpy(np.stack([np.asarray(state[name]) for state in states])).to(view)
            for name, view in self.views.items()
        }

    def _put(self, rows: NDArray[np.int64], values: dict[str, Tensor]) -> None:
        """Write `values` [n, ...] to worlds `rows` [n]."""
        index = torch.from_numpy(rows).to(self.rows.device)
        for name, view in self.views.items():
            view.index_copy_(0, index, values[name])

    def step(self, actions: Tensor, remaining_steps: Tensor, stop_on_success: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Run the first `remaining_steps` [W] of `actions` [W, K, 7]: (executed [W, K], success, diverged [W])."""
        flags = {name: wp.to_torch(array) for name, array in self._flags.items()}
        flags["remaining_steps"].copy_(remaining_steps)
        flags["active"].copy_(remaining_steps > 0)
        for name in ("executed", "success", "diverged"):
            flags[name].zero_()
        self.data.overflow.zero_()
        before = self.views["qpos"].clone()
        action = wp.to_torch(self._action)
        with in_order(self._device):
            for name in STATE:
                wp.copy(self._saved[name], getattr(self.data, name))
        for k in range(actions.shape[1]):
            action.copy_(actions[:, k])
            with in_order(self._device):
                self._control_step(stop_on_success)
        diverged = flags["diverged"].bool()
        self._rest(diverged[:, None], before)
        executed = torch.arange(actions.shape[1], device=remaining_steps.device) < flags["executed"][:, None]
        return executed, flags["success"].bool() & ~diverged, diverged

    def read(self, name: str) -> NDArray[np.float64]:
        """One of `fields`, e.g. "qpos" [W, nq]."""
        return self.views[name].cpu().numpy().astype(np.float64)

    def load(self, state: dict[str, NDArray]) -> None:
        """Load the `fields` of a state."""
        for name, values in state.items():
            self.views[name].copy_(torch.from_numpy(values))

    def _control_step(self, stop_on_success: bool) -> None:
        if not self._device.is_cuda:
            self._launch(stop_on_success)
            return
        if stop_on_success not in self._graphs:
            self._launch(stop_on_success)  # compiles the kernels, which a capture cannot
            self._graphs[stop_on_success] = captured(self._device, lambda: self._launch(stop_on_success))
            return
        wp.capture_launch(self._graphs[stop_on_success])

    def _launch(self, stop_on_success: bool) -> None:
        """Run the substeps of controller and physics, then evaluate the result of every world."""
        model = self.model
        data = self.data
        flags = self._flags
        for substep in range(SUBSTEPS):
            mujoco_warp.step1(model, data)
            wp.launch(
                kernels.control,
                self.count,
                [
                    int(substep == 0),
                    self._arm,
                    self._memory,
                    flags["active"],
                    self._action,
                    data.qpos,
                    data.qvel,
                    data.site_xpos,
                    data.site_xmat,
                    data.subtree_com,
                    data.cdof,
                    data.M,
                    model.M_rowadr,
                    model.M_rownnz,
                    model.M_colind,
                    data.qfrc_bias,
                    model.actuator_ctrlrange,
                ],
                [data.ctrl],
            )
            mujoco_warp.step2(model, data)
        for name in STATE:
            state = getattr(data, name)
            wp.launch(kernels.carry, state.shape, [flags["active"], state, self._saved[name]])
        self._touches.zero_()
        contacts = [self._goal, data.nacon, data.contact.geom, data.contact.worldid]
        wp.launch(kernels.find_touches, data.naconmax, contacts, [self._touches])
        wp.launch(
            kernels.judge,
            self.count,
            [
                self._goal,
                int(stop_on_success),
                data.qpos,
                data.qvel,
                data.xpos,
                data.site_xpos,
                data.site_xmat,
                self._touches,
                data.overflow,
                flags["remaining_steps"],
                flags["active"],
            ],
            [flags["executed"], flags["success"], flags["diverged"], self._achieved],
        )

    def _rest(self, blown: Tensor, before: Tensor) -> None:
        """Restore diverged worlds `blown` [W, 1] to their qpos `before` [W, nq], at rest; only the physics changes."""
        for name in STATE:
            view = self.views[name]
            view.copy_(torch.where(blown, before if name == "qpos" else torch.zeros_like(view), view))

    def _array(self, name: str) -> wp.array:
        return getattr(self.data if name in STATE else self._memory if name in MEMORY else self.model, name)


def _arm(scene: Scene, model: mujoco.MjModel) -> kernels.Arm:
    arm = kernels.Arm()
    arm.qpos, arm.dof, arm.actuator, arm.fingers = (
        wp.array(addresses, dtype=int)
        for addresses in (scene.arm_qposadr, scene.arm_dofadr, scene.arm_actuator, scene.gripper_actuator)
    )
    arm.site = scene.grip_site
    arm.root = int(model.body_rootid[model.site_bodyid[scene.grip_site]])
    return arm


def _goal(scene: Scene) -> kernels.Goal:
    goal = kernels.Goal()
    predicates = scene.goal
    goal.kind = wp.array([_kind(predicate) for predicate in predicates], dtype=int)
    for name in ("a", "b", "owner_a", "owner_b"):
        setattr(goal, name, wp.array([getattr(predicate, name) for predicate in predicates], dtype=int))
    goal.size = wp.array([predicate.size for predicate in predicates], dtype=wp.vec3)
    for name in ("sign", "threshold"):
        setattr(goal, name, wp.array([getattr(predicate, name) for predicate in predicates], dtype=float))
    addresses = np.full((len(predicates), max(1, *(len(predicate.addresses) for predicate in predicates), 1)), -1)
    for row, predicate in zip(addresses, predicates, strict=True):
        row[: len(predicate.addresses)] = predicate.addresses
    goal.addresses = wp.array(addresses, dtype=int)
    goal.geom_owner = wp.array(scene.geom_owner, dtype=int)
    return goal


def _kind(predicate: Predicate) -> int:
    if predicate.kind == "joint":
        return kernels.JOINT_ANY if predicate.any_joint else kernels.JOINT_ALL
    return KINDS[predicate.kind]


def _memory(count: int) -> kernels.Controller:
    memory = kernels.Controller()
    for name in ("goal_position", "start_position"):
        setattr(memory, name, wp.zeros(count, dtype=wp.vec3d))
    for name in ("goal_orientation", "start_orientation"):
        setattr(memory, name, wp.zeros(count, dtype=wp.mat33d))
    shapes = {"posture": (7,), "gripper": (2,), "start_jacobian": (6, 7), "start_inertia": (7, 7)}
    for name, shape in shapes.items():
        setattr(memory, name, wp.zeros((count, *shape), dtype=wp.float64))
    memory.fresh = wp.zeros(count, dtype=int)
    return memory
