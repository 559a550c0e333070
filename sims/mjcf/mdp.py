"""Interface of a task on an MJCF model: plain functions of batched tensors, and their arguments.

Letters in shape comments: N worlds, M worlds that begin an episode, A action dimension.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

import sims.mdp
from embodied.errors import UserError
from embodied.seeding import derive
from sims.counter_rng import mix, uniform

if TYPE_CHECKING:
    import mujoco

STREAM = 1 << 16
"""Largest number of draws of one stream."""


class Draws:
    """Random numbers of M episodes, which depend on task, split, initial state and `counter` [M] only."""

    def __init__(self, key: Tensor, counter: Tensor, stream: int = 0) -> None:
        self._key = key
        self._counter = counter
        self._index = stream * STREAM

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        """The next numbers [M, *shape] of each episode, uniform in (`low`, `high`), float32."""
        count = int(torch.tensor(shape).prod())
        index = self._index + torch.arange(count, device=self._key.device)
        self._index += count
        numbers = uniform([word.unsqueeze(1) for word in self._key], self._counter.unsqueeze(1), index)
        return (low + (high - low) * numbers).float().view(-1, *shape)


def keys(task: str, split: str, starts: Tensor) -> Tensor:
    """Two words [2, M] int64 of the initial states `starts` [M] of a task's `split`."""
    salt = derive(0, "mjcf", task, split)
    first = mix(mix(starts) ^ salt)
    return torch.stack((first, mix(first ^ (starts >> 32) ^ (salt >> 32))))


@dataclass
class Start:
    """Initial values of M episodes by field; all other fields have the model's values.

    A task names the same fields in every episode.
    """

    state: dict[str, Tensor]  # [M, ...], state fields of MjData such as qpos, qvel, mocap_pos
    model: dict[str, Tensor] = field(default_factory=dict)  # [M, ...], fields of MjModel, such as geom_friction
    memory: dict[str, Tensor] = field(default_factory=dict)  # [M, ...], the task's memory of an episode


class Moment:
    """Present state of N worlds; fields of MjData are attributes, as tensors [N, ...] that the physics write.

    qpos, qvel, ctrl and sensordata are always available, other fields if the task's `READS` name them. Poses and
    velocities are current; readings of force and contact sensors are from the last physics step. `action` and
    `previous` are the last two actions [N, A] in half ranges around the middle, 0 before there were any. `steps` [N]
    counts control steps.
    """

    def __init__(self, model: mujoco.MjModel, fields: Mapping[str, Tensor], dt_s: float, limit: int) -> None:
        first = fields["qpos"]
        self.model = model
        self.fields = fields
        self.dt_s = dt_s
        self.limit = limit
        self.steps = torch.zeros(len(first), dtype=torch.int64, device=first.device)
        self.action = torch.zeros(len(first), model.nu, device=first.device)
        self.previous = self.action
        self.memory: dict[str, Tensor] = {}
        self.key = torch.zeros(2, len(first), dtype=torch.int64, device=first.device)

        self.__dict__.update(fields)

    def __getattr__(self, name: str) -> Tensor:
        raise AttributeError(f"{name!r} is not read; name fields of MjData in the task's READS")

    @cached_property
    def _sensors(self) -> dict[str, Tensor]:
        sensors = [self.model.sensor(i) for i in range(self.model.nsensor)]
        data = self.fields["sensordata"]
        return {each.name: data[:, int(each.adr[0]) : int(each.adr[0] + each.dim[0])] for each in sensors}

    def sensor(self, name: str) -> Tensor:
        """Readings [N, D] of a sensor."""
        return self._sensors[name]

    def draws(self, stream: int = 0) -> Draws:
        """Random numbers of this control step; every use in a task needs a separate `stream`, from 0 on."""
        return Draws(self.key, self.steps + 1, stream)


class Mdp(sims.mdp.Mdp):
    """A task on a model; its functions take the `Moment` of N worlds, tensors, and have no side effects."""

    MODEL: ClassVar[Path | str]
    """MJCF, as a path or as text; every actuator needs a ctrlrange.

    Relative paths of it and of its meshes start at the folder of the task's file.
    """
    SUBSTEPS: ClassVar[int]
    """Number of physics steps in a control step."""
    ACTION_UNIT: ClassVar[str] = ""
    READS: ClassVar[tuple[str, ...]] = ()
    """Fields of MjData beyond qpos, qvel and sensordata that the functions read."""
    CAMERA: ClassVar[str] = "film"
    CONTACTS: ClassVar[int | None] = None
    """Number of contacts for which mujoco_warp allocates memory in a world; estimated from the model if None."""

    def load(self) -> mujoco.MjModel:
        """Compile the model.

        Raises:
            UserError: if MuJoCo cannot read it.
        """
        from embodied.extras import needs_extra

        with needs_extra("mjcf"):
            import mujoco
        try:
            if isinstance(self.MODEL, Path) or "<" not in self.MODEL:
                return mujoco.MjModel.from_xml_path(str(self._folder() / self.MODEL))
            spec = mujoco.MjSpec.from_string(self.MODEL)
            if "file=" in self.MODEL:
                spec.modelfiledir = str(self._folder())
            return spec.compile()
        except ValueError as error:
            cause = " ".join(str(error).split())
            raise UserError(f"MuJoCo cannot read the model of {type(self).__name__}: {cause}") from error

    def _folder(self) -> Path:
        """Folder of the file that defines the model."""
        owner = next(each for each in type(self).__mro__ if "MODEL" in vars(each))
        return Path(inspect.getfile(owner)).resolve().parent

    def reset(self, model: mujoco.MjModel, draws: Draws) -> Start:
        """Initial values of M episodes, from the random numbers `draws`."""
        raise NotImplementedError

    def control(self, now: Moment, action: Tensor) -> Tensor:
        """Controls [N, nu] of an action [N, A] within the contract's limits."""
        return action

    def disturb(self, now: Moment) -> Tensor | None:
        """Change of qvel [N, nv] before a control step, or None."""
        return None

    def update(self, now: Moment) -> dict[str, Tensor]:
        """Entries of the memory that change after a control step."""
        return {}
