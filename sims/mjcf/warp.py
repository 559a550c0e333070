"""N worlds of one MJCF model on mujoco_warp, in single precision: on CUDA as one captured graph, slowly on a CPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import mujoco
import numpy as np
import torch
import warp
from numpy.typing import NDArray
from torch import Tensor

from embodied.errors import UserError
from sims.mjcf.physics import ALWAYS, POSE_FIELDS, broken_rows
from sims.warp_order import captured, in_order, warp_device

# Before mujoco_warp is imported, which otherwise reports every kernel that it loads.
warp.config.log_level = warp.LOG_ERROR

import mujoco_warp  # noqa: E402

from sims.warp_capacity import OVERFLOW, capacity  # noqa: E402

STATE = ("time", "qpos", "qvel", "act", "qacc_warmstart", "ctrl", "mocap_pos", "mocap_quat")


class WarpWorlds:
    """Worlds of mujoco_warp on `device`; a call steps all worlds, and then restores those that it does not name."""

    def __init__(
        self,
        model: mujoco.MjModel,
        count: int,
        reads: tuple[str, ...],
        device: torch.device,
        contacts: int | None = None,
    ) -> None:
        self.mjm = model
        self.device = warp_device(device)
        self._default = mujoco.MjData(self.mjm)
        self._count = count
        self._graph: dict[int, warp.Graph] = {}
        with in_order(self.device):
            self.model = mujoco_warp.put_model(self.mjm)
            # The overflow bits are read instead: kernels would print a warning for every world.
            self.model.opt.warn_overflow = 0
            mujoco.mj_forward(self.mjm, resting := mujoco.MjData(self.mjm))
            room = capacity(self.mjm, self.model, contacts, resting.ncon)
            self.data = mujoco_warp.make_data(self.mjm, nworld=count, **room._asdict())
        self._overflow = warp.to_torch(self.data.overflow)  # [N] bits
        if missing := [name for name in reads if not hasattr(self.data, name) or not hasattr(self._default, name)]:
            raise UserError(f"READS: mujoco_warp has no field {missing[0]!r}")
        self.fields = {name: self._tensor(name) for name in dict.fromkeys((*ALWAYS, *reads))}
        self._fields = self.fields | {name: self._tensor(name) for name in STATE}

    def begin(self, ids: Tensor, state: Mapping[str, Tensor], model: Mapping[str, Tensor]) -> None:
        """Write the rows, then compute everything that follows from them."""
        for name, values in model.items():
            self._expanded(name)[ids] = values.to(self._expanded(name))
        mask = torch.zeros(self._count, dtype=torch.bool, device=ids.device).index_fill(0, ids, True)
        with self._only(mask):
            for name in STATE:
                default = torch.as_tensor(np.asarray(getattr(self._default, name)), device=ids.device)
                self._fields[name][ids] = state.get(name, default).to(self._fields[name])
            self._launch(0)

    def step(self, active: Tensor, ctrl: Tensor, substeps: int) -> tuple[Tensor, Tensor]:
        """Make physics steps, then recompute positions and velocities for the fields that are read."""
        before = self.fields["qpos"].clone()
        self._overflow.zero_()
        with self._only(active):
            self.fields["ctrl"].copy_(ctrl)
            self._launch(substeps)
        overflow = active & ((self._overflow & OVERFLOW) != 0)
        broken = overflow | active & broken_rows(self.fields)
        if bool(broken.any()):
            ids = broken.nonzero().squeeze(1)
            mocap = {name: self._fields[name][ids].clone() for name in POSE_FIELDS[1:]}
            self.begin(ids, {"qpos": before[ids], **mocap}, {})
        return broken, overflow

    def save(self) -> dict[str, Tensor]:
        """Copies of the state and the fields."""
        return {name: field.clone() for name, field in self._fields.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `save` returned; models are not restored."""
        for name, field in self._fields.items():
            field.copy_(state[name])

    def pose_fields(self, row: int) -> dict[str, NDArray]:
        """Fields that determine the poses of world `row`."""
        return {name: self._fields[name][row].cpu().numpy() for name in POSE_FIELDS}

    def _launch(self, substeps: int) -> None:
        with in_order(self.device):
            if not self.device.is_cuda:
                self._run(substeps)
            elif substeps not in self._graph:
                self._run(substeps)  # loads the kernels, which is not possible in a capture
                self._graph[substeps] = captured(self.device, lambda: self._run(substeps))
            else:
                warp.capture_launch(self._graph[substeps])

    def _run(self, substeps: int) -> None:
        """Make physics steps and compute the fields to read; with 0 steps, compute all fields from a new state."""
        if not substeps:
            mujoco_warp.forward(self.model, self.data)
            return
        for _ in range(substeps):
            mujoco_warp.step(self.model, self.data)
        mujoco_warp.step1(self.model, self.data)

    @contextmanager
    def _only(self, active: Tensor) -> Iterator[None]:
        """Restore the worlds that are not `active` [N] at the end of the context."""
        everyone = bool(active.all())
        before = {} if everyone else self.save()
        yield
        for name, values in before.items():
            field = self._fields[name]
            field.copy_(torch.where(active.view(-1, *[1] * (field.dim() - 1)), field, values))

    def _tensor(self, name: str) -> Tensor:
        """Tensor [N, ...] that shares memory with a field of the data, in MuJoCo's shape."""
        shape = np.asarray(getattr(self._default, name)).shape
        return warp.to_torch(getattr(self.data, name)).view(self._count, *shape)

    def _expanded(self, name: str) -> Tensor:
        """Tensor [N, ...] that shares memory with a field of the model; expands the field to one value per world."""
        if name in mujoco.MjModel._setconst_inputs or not isinstance(getattr(self.model, name, None), warp.array):
            raise UserError(f"sim=mjwarp cannot vary the model's {name}; use sim=mujoco")
        field = getattr(self.model, name)
        count = self._count
        if field.shape[0] != count or not field.strides[0]:
            with in_order(self.device):
                values = np.broadcast_to(field.numpy()[:1], (count, *field.numpy().shape[1:]))
                expanded = warp.array(np.ascontiguousarray(values), dtype=field.dtype, device=self.device)
            setattr(self.model, name, expanded)
            self._graph.clear()
        return warp.to_torch(getattr(self.model, name)).view(count, *np.asarray(getattr(self.mjm, name)).shape)
