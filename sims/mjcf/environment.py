"""N worlds of an MJCF model as a vectorised Environment.

Letters in shape comments: N environments, K executed actions of a chunk, M environments that begin an episode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mujoco
import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor

from embodied.contract import Contract, TensorSpec, with_privileged
from embodied.environments.engine import Outcome, RestorableEngine
from embodied.errors import UserError
from sims.backend import Sim
from sims.mjcf.cameras import Cameras, check_fields, picture_specs
from sims.mjcf.mdp import Draws, Mdp, Moment, keys
from sims.mjcf.physics import MujocoWorlds, Worlds
from sims.mjcf.viewing import MjcfView


class MjcfEnvironment(RestorableEngine):
    """N worlds, each in an episode of its own. Actions are clipped to their limits.

    An episode is terminated by the task or where the simulation diverges, and truncated at the step limit. Initial
    state `start` depends on task, split and number alone.

    Args:
        num_envs: N.
        mdp: the task.
        split: "train" or "eval", with disjoint initial states.
        executed: K, actions of a chunk that are executed, of the H = `horizon` that a policy predicts (K if None).
        step_limit: control steps after which an episode is truncated; the task's if None.
        images: cameras of the model whose pictures are observed, of `image_size` pixels a side, drawn once a chunk.
        privileged: observations that only critics read, besides those that the task marks.
        seed: selects the initial states of a reset without starts.
        device: device of mujoco_warp; MuJoCo runs on the CPU only.
        sim: mujoco (double precision, its own thread pool) or mjwarp (single precision).
        threads: number of threads of MuJoCo's batch; if None, the number of cores that this process may use.
    """

    def __init__(
        self,
        num_envs: int,
        *,
        mdp: Mdp,
        split: str = "train",
        executed: int = 1,
        horizon: int | None = None,
        step_limit: int | None = None,
        images: Sequence[str] = (),
        image_size: int = 128,
        privileged: Sequence[str] = (),
        seed: int = 0,
        device: torch.device | str = "cpu",
        sim: Sim = Sim.mujoco,
        threads: int | None = None,
    ) -> None:
        if split not in ("train", "eval"):
            raise ValueError(f"unknown split {split!r}; expected one of train, eval")
        self.mdp = mdp
        self.split = split
        self.model = mdp.load()
        name = type(mdp).__name__.lower()
        super().__init__(
            contract(mdp, self.model, executed, horizon, images, image_size, privileged),
            num_envs,
            mdp.STEP_LIMIT if step_limit is None else step_limit,
            task_names=(name,),
            instructions=(mdp.INSTRUCTION,),
            seed=seed,
            device=device if sim is Sim.mjwarp else "cpu",
        )
        self.worlds = make_worlds(sim, mdp, self.model, num_envs, self.device, threads)
        self.now = Moment(self.model, self.worlds.fields, self.contract.control_dt_s, self.step_limit)
        action = self.contract.action
        self._low, self._high = (torch.tensor(each, device=self.device) for each in (action.low, action.high))
        self._middle, self._half = 0.5 * (self._low + self._high), 0.5 * (self._high - self._low)
        self._cameras = Cameras(self.model, images, image_size) if images else None
        self._pictures = {
            name: torch.zeros(num_envs, *spec.shape, dtype=torch.uint8)
            for name, spec in self.contract.observation.items()
            if spec.is_picture
        }
        self._varied: dict[str, NDArray] = {}  # model fields [N, ...] that differ between worlds
        self._moved = torch.zeros(num_envs, dtype=torch.bool)  # worlds that changed after their last picture

    def view(self) -> MjcfView:
        """View of the worlds for the viewer."""
        return MjcfView(self.model, self.worlds, self.mdp.CAMERA)

    def begin(self, ids: Tensor, starts: Tensor) -> None:
        """Begin episodes in worlds `ids` [M] with the states that the task draws from the numbers `starts` [M]."""
        now = self.now
        key = keys(self.task_names[0], self.split, starts)
        start = self.mdp.reset(self.model, Draws(key, torch.zeros_like(starts)))
        self.worlds.begin(ids, start.state, start.model)
        if self._cameras:
            self._vary(ids, start.model)
        self._moved[ids.cpu()] = True
        for name, values in start.memory.items():
            if name not in now.memory:
                now.memory[name] = values.new_zeros(self.num_envs, *values.shape[1:])
            now.memory[name] = now.memory[name].index_copy(0, ids, values)
        now.key, now.steps = now.key.index_copy(1, ids, key), now.steps.index_fill(0, ids, 0)
        now.action, now.previous = now.action.index_fill(0, ids, 0.0), now.previous.index_fill(0, ids, 0.0)

    def advance(self, actions: Tensor, remaining_steps: Tensor) -> Outcome:
        """Execute the chunk, with one call of the physics per action; an episode that ends executes no more."""
        rewards = []
        executions = []
        self._moved |= remaining_steps.cpu() > 0
        none = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        ended = finished = succeeded = broken = overflow = none
        for k, action in enumerate(actions.float().unbind(1)):
            active = (remaining_steps > k) & ~(ended | finished | broken)
            diverged, crowded = self._move(action.clamp(self._low, self._high), active)
            sound = active & ~diverged
            terminated = sound & self.mdp.terminated(self.now)
            over = self.mdp.finished(self.now)
            over = none if over is None else sound & over
            limit = over | sound & (self.now.steps >= self.step_limit)
            ended = ended | terminated
            finished = finished | over
            broken = broken | diverged
            overflow = overflow | crowded
            if bool((terminated | limit).any()):
                succeeded = succeeded | ((terminated | limit) & self.mdp.success(self.now))
            rewards.append(torch.where(sound, self.mdp.reward(self.now), 0.0).float())
            executions.append(active)
        metrics = {name: values.float() for name, values in self.mdp.metrics(self.now).items()}
        return Outcome(
            torch.stack(rewards, 1),
            torch.stack(executions, 1),
            ended,
            succeeded,
            finished,
            diverged=broken,
            metrics=metrics,
            failures=self.mdp.failures(self.now),
            overflow=overflow,
        )

    def observe(self) -> TensorDict:
        """Observations of the task, in single precision, and pictures."""
        observation = self.mdp.observe(self.now)
        numbers = {name: part.to(torch.float32, copy=True) for name, part in observation.items()}
        return TensorDict(numbers | self._draw(), [self.num_envs])

    def save(self) -> dict[str, Any]:
        """State of the physics and the task's memory, without models, which the numbers of starts determine."""
        now = self.now
        counters = {name: getattr(now, name).clone() for name in ("steps", "action", "previous", "key")}
        return {"worlds": self.worlds.save(), "memory": {k: v.clone() for k, v in now.memory.items()}, **counters}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what `save` returned, and the models from the numbers of starts."""
        started = (self.start >= 0).nonzero().squeeze(1)
        if len(started):
            self.begin(started, self.start[started])
        self.worlds.restore(state["worlds"])
        self.now.memory = {name: values.to(self.device, copy=True) for name, values in state["memory"].items()}
        for name in ("steps", "action", "previous", "key"):
            setattr(self.now, name, state[name].to(self.device, copy=True))
        self._moved[started.cpu()] = True

    def _draw(self) -> dict[str, Tensor]:
        """Pictures [N, height, width, 3] by name; only worlds that have changed are drawn."""
        if self._cameras and bool(self._moved.any()):
            rows = self._moved.nonzero().squeeze(1)
            poses = [
                self._cameras.poses(
                    self.worlds.pose_fields(row), {name: values[row] for name, values in self._varied.items()}
                )
                for row in rows.tolist()
            ]
            drawn = torch.from_numpy(self._cameras.draw(poses)).unbind(1)
            for pictures, new_pictures in zip(self._pictures.values(), drawn, strict=True):
                pictures[rows] = new_pictures
        self._moved.fill_(False)
        return {name: pictures.to(self.device, copy=True) for name, pictures in self._pictures.items()}

    def _vary(self, ids: Tensor, fields: Mapping[str, Tensor]) -> None:
        """Keep the model `fields` [M, ...] of worlds `ids` [M] for their pictures."""
        check_fields(fields)
        for name, values in fields.items():
            if name not in self._varied:
                self._varied[name] = np.repeat(getattr(self.model, name)[None], self.num_envs, 0)
            self._varied[name][ids.cpu().numpy()] = values.cpu().numpy()

    def _move(self, action: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        """One control step of `active` worlds; returns broken worlds and overflows, see `Worlds.step`."""
        now = self.now
        mdp = self.mdp
        push = mdp.disturb(now)
        if push is not None:
            now.qvel.add_(torch.where(active.unsqueeze(1), push, 0.0))
        broken, overflow = self.worlds.step(active, mdp.control(now, action), mdp.SUBSTEPS)
        scaled = (action - self._middle) / self._half
        active_rows = active.unsqueeze(1)
        now.previous = torch.where(active_rows, now.action, now.previous)
        now.action = torch.where(active_rows, scaled, now.action)
        now.steps = now.steps + active
        for name, values in mdp.update(now).items():
            rows = active.view(-1, *[1] * (values.dim() - 1))
            now.memory[name] = torch.where(rows, values, now.memory[name]).to(now.memory[name].dtype)
        return broken, overflow


def contract(
    mdp: Mdp,
    model: mujoco.MjModel,
    executed: int = 1,
    horizon: int | None = None,
    images: Sequence[str] = (),
    image_size: int = 128,
    privileged: Sequence[str] = (),
) -> Contract:
    """Contract derived from the task's observations and the model's cameras and actuators, with their control ranges.

    Raises:
        UserError: for an actuator without a ctrlrange, an unknown camera, and unknown `privileged` observations.
    """
    names = tuple(model.actuator(i).name or f"actuator_{i}" for i in range(model.nu))
    if unlimited := [name for name, limited in zip(names, model.actuator_ctrllimited, strict=True) if not limited]:
        raise UserError(f"actuator {unlimited[0]} has no ctrlrange; policies need limits: give it one in the MJCF")
    low, high = (tuple(float(value) for value in each) for each in model.actuator_ctrlrange.T)
    action = TensorSpec((model.nu,), unit=mdp.ACTION_UNIT, names=names, low=low, high=high)
    dt_s = round(mdp.SUBSTEPS * float(model.opt.timestep), 9)
    specs = with_privileged(dict(mdp.OBSERVED), privileged) | picture_specs(model, images, image_size)
    return Contract(specs, action, dt_s, horizon=executed if horizon is None else horizon, executed=executed)


def make_worlds(
    sim: Sim, mdp: Mdp, model: mujoco.MjModel, count: int, device: torch.device, threads: int | None
) -> Worlds:
    """Worlds of the back end `sim`."""
    if sim is Sim.mujoco:
        return MujocoWorlds(model, count, mdp.READS, threads)
    from sims.mjcf.warp import WarpWorlds  # slow to import

    return WarpWorlds(model, count, mdp.READS, device, mdp.CONTACTS)
