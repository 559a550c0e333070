"""N worlds of one MJCF model, stepped by MuJoCo's own batch on the CPU or by mujoco_warp.

`Worlds` of both kinds have the same functions: `fields` are tensors [N, ...] over MjData's by name, `begin`, `step`,
`save` and `restore`. Worlds that a call does not name stay as they are, bit for bit.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Mapping
from typing import Protocol

import mujoco
import mujoco.batch
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodied.errors import UserError

ALWAYS = ("qpos", "qvel", "ctrl", "sensordata")
SHOWN = ("qpos", "mocap_pos", "mocap_quat")
BROKEN = 1e10
"""Positions and velocities beyond it are broken, as in MuJoCo's own check."""


class Worlds(Protocol):
    """What steps N worlds."""

    fields: dict[str, Tensor]

    def begin(self, ids: Tensor, state: Mapping[str, Tensor], model: Mapping[str, Tensor]) -> None:
        """Put worlds `ids` [M] into the model's default state but for `state` [M, ...]; their models have `model`."""
        ...

    def step(self, active: Tensor, ctrl: Tensor, substeps: int) -> tuple[Tensor, Tensor]:
        """Make physics steps with `ctrl` [N, nu] where `active` [N]; returns broken worlds and overflows, [N] each.

        A world is broken whose numbers are none, or whose contacts or constraint rows had no room: the second are
        overflows. Broken worlds are put back to where they were, at rest.
        """
        ...

    def save(self) -> dict[str, Tensor]:
        """State and fields, copied."""
        ...

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `save` gave; models are those that the worlds began with."""
        ...

    def shown(self, row: int) -> dict[str, NDArray]:
        """What pictures of a world need: qpos, mocap_pos, mocap_quat."""
        ...


class MujocoWorlds:
    """Worlds of `mujoco.batch.Batch`, whose thread pool takes the cores that this process may use.

    Results do not depend on the number of threads.
    """

    def __init__(self, model: mujoco.MjModel, count: int, reads: tuple[str, ...], threads: int | None = None) -> None:
        cores = threads or len(os.sched_getaffinity(0))
        self.batch = mujoco.batch.Batch(without_autoreset(model), count, min(cores, count), persistent=True)
        try:
            self.fields = {name: _shared(self.batch.bind(name)) for name in dict.fromkeys((*ALWAYS, *reads))}
        except ValueError as error:
            raise UserError(f"READS: {error}") from error

    def begin(self, ids: Tensor, state: Mapping[str, Tensor], model: Mapping[str, Tensor]) -> None:
        """Write the rows, then compute everything that follows from them."""
        rows = ids.numpy().astype(np.int32)
        self.batch.reset(rows, stage=mujoco.mjtStage.mjSTAGE_NONE)
        for name, values in state.items():
            self.batch.bind(name)[rows] = values.numpy()
        for name, values in model.items():
            self.batch.expand(name)[rows] = values.numpy()
        if model.keys() & mujoco.MjModel._setconst_inputs:
            self.batch.set_const(rows)
        self.batch.forward(rows)

    def step(self, active: Tensor, ctrl: Tensor, substeps: int) -> tuple[Tensor, Tensor]:
        """One call of the batch; a world in which MuJoCo raises an error is broken, too. MuJoCo's arena grows."""
        broken = torch.zeros_like(active)
        if everyone := bool(active.all()):
            rows = None
            self.fields["ctrl"].copy_(ctrl)
        else:
            ids = active.nonzero().squeeze(1)
            rows = ids.numpy().astype(np.int32)
            self.fields["ctrl"][ids] = ctrl[ids].double()
        before = self.fields["qpos"].clone()
        try:
            if everyone or len(ids):
                self.batch.step(rows, substeps, mujoco.mjtStage.mjSTAGE_VEL)
        except mujoco.batch.SimulationError as error:
            broken[torch.from_numpy(np.asarray(error.ids)).long()] = True
        broken |= active & broken_rows(self.fields)
        if broken.any():
            ids = broken.nonzero().squeeze(1)
            mocap = {name: torch.from_numpy(self.batch.bind(name)[ids.numpy()]) for name in SHOWN[1:]}
            self.begin(ids, {"qpos": before[ids], **mocap}, {})
        return broken, torch.zeros_like(broken)

    def save(self) -> dict[str, Tensor]:
        """The batch's rows, and the fields that are not part of them."""
        return {"rows": torch.from_numpy(self.batch.state.copy())} | {k: v.clone() for k, v in self.fields.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """The rows decide what follows, the fields what is seen until then."""
        self.batch.state[:] = state["rows"].numpy()
        for name, field in self.fields.items():
            field.copy_(state[name])

    def shown(self, row: int) -> dict[str, NDArray]:
        """A world's poses."""
        return {name: self.batch.bind(name)[row] for name in SHOWN}


def without_autoreset(model: mujoco.MjModel) -> mujoco.MjModel:
    """A copy that keeps broken numbers, which MuJoCo would replace by a reset in the middle of an episode."""
    model = copy.copy(model)
    model.opt.disableflags |= int(mujoco.mjtDisableBit.mjDSBL_AUTORESET)
    return model


def broken_rows(fields: Mapping[str, Tensor]) -> Tensor:
    """Worlds [N] bool with positions or velocities that are none."""
    return ~(torch.cat((fields["qpos"], fields["qvel"]), 1).abs().amax(1) <= BROKEN)


def _shared(array: NDArray) -> Tensor:
    """A tensor over the same memory; fields that only the batch writes are read-only for numpy."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)
