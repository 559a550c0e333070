"""N worlds of one MJCF model, stepped by MuJoCo's own batch on the CPU or by mujoco_warp.

Both kinds of `Worlds` have the same interface: `fields` are tensors [N, ...] that share memory with MjData's fields, by
name; `begin`, `step`, `save` and `restore` are functions. Worlds that a call does not name stay the same, bit for bit.
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
POSE_FIELDS = ("qpos", "mocap_pos", "mocap_quat")
BROKEN = 1e10
"""Largest valid position or velocity, as in MuJoCo's own check."""


class Worlds(Protocol):
    """A back end that steps N worlds."""

    fields: dict[str, Tensor]

    def begin(self, ids: Tensor, state: Mapping[str, Tensor], model: Mapping[str, Tensor]) -> None:
        """Reset worlds `ids` [M], with the fields `state` [M, ...] of their data and `model` of their models."""
        ...

    def step(self, active: Tensor, ctrl: Tensor, substeps: int) -> tuple[Tensor, Tensor]:
        """Make physics steps with `ctrl` [N, nu] where `active` [N]; returns broken worlds and overflows, [N] each.

        A world is broken if its numbers are NaN or too large, or if its contacts or constraint rows exceed the
        allocated memory (an overflow). Broken worlds return to their previous positions, at rest.
        """
        ...

    def save(self) -> dict[str, Tensor]:
        """Copies of the state and the fields."""
        ...

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `save` returned; models are not restored."""
        ...

    def pose_fields(self, row: int) -> dict[str, NDArray]:
        """Fields that determine the poses of world `row`: qpos, mocap_pos, mocap_quat."""
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
        """Step with one call of the batch.

        Worlds in which MuJoCo raises an error are broken, too. There is no overflow, because MuJoCo's arena grows.
        """
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
            mocap = {name: torch.from_numpy(self.batch.bind(name)[ids.numpy()]) for name in POSE_FIELDS[1:]}
            self.begin(ids, {"qpos": before[ids], **mocap}, {})
        return broken, torch.zeros_like(broken)

    def save(self) -> dict[str, Tensor]:
        """Copies of the batch's rows, and of the fields, of which some are not part of the rows."""
        return {"rows": torch.from_numpy(self.batch.state.copy())} | {k: v.clone() for k, v in self.fields.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore the rows, which determine later steps, and the fields, which are observed until then."""
        self.batch.state[:] = state["rows"].numpy()
        for name, field in self.fields.items():
            field.copy_(state[name])

    def pose_fields(self, row: int) -> dict[str, NDArray]:
        """Fields that determine the poses of world `row`."""
        return {name: self.batch.bind(name)[row] for name in POSE_FIELDS}


def without_autoreset(model: mujoco.MjModel) -> mujoco.MjModel:
    """Copy of the model without MuJoCo's automatic reset of diverged worlds in the middle of an episode."""
    model = copy.copy(model)
    model.opt.disableflags |= int(mujoco.mjtDisableBit.mjDSBL_AUTORESET)
    return model


def broken_rows(fields: Mapping[str, Tensor]) -> Tensor:
    """Whether worlds have invalid positions or velocities (NaN or above `BROKEN`), [N] bool."""
    # "not <=" instead of ">", because comparisons with NaN are False.
    return ~(torch.cat((fields["qpos"], fields["qvel"]), 1).abs().amax(1) <= BROKEN)


def _shared(array: NDArray) -> Tensor:
    """Tensor that shares the memory of `array`; numpy marks fields that only the batch writes as read-only."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)
