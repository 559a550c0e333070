"""Observations as a contract and as tensors, and the action history that policies observe."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from embodied.contract import Contract, TensorSpec
from embodied.errors import UserError
from sims.quadrotor.physics.dynamics import DT_S, ROTOR_NAMES

AXES = ("x", "y", "z")
ROTATION = TensorSpec((9,), unit="1", frame="world", names=tuple(a + b for a in AXES for b in AXES))
VELOCITY = TensorSpec((3,), unit="m/s", frame="world", names=AXES)
ANGULAR_VELOCITY = TensorSpec((3,), unit="rad/s", frame="body", names=AXES)
Specs = Mapping[str, TensorSpec]


def contract(observed: Specs, history: int = 1, executed: int = 1) -> Contract:
    """Contract of a task with the observations `observed`: chunks of K actions, all of which are executed.

    Policies observe the last `history` actions, too.

    Raises:
        UserError: if `history` is below 1.
    """
    if history < 1:
        raise UserError(f"expected at least one action of history, got history={history}")
    return Contract(observation_specs(observed, history), action_spec(), DT_S, horizon=executed, executed=executed)


def action_spec() -> TensorSpec:
    """Rotor set-points: -1 is standstill, 1 the highest speed, speed is linear between them."""
    return TensorSpec((4,), unit="1", names=ROTOR_NAMES, low=(-1.0,) * 4, high=(1.0,) * 4)


def observation_specs(observed: Specs, history: int) -> dict[str, TensorSpec]:
    """Specs of the task's `observed`, of the last `history` actions, and of privileged observations.

    Hover has 22 observed numbers with 1 action, 146 with 32.
    """
    specs = dict(observed)
    if history == 1:
        specs["previous_action"] = TensorSpec((4,), unit="1", names=ROTOR_NAMES)
    else:
        ages = range(history, 0, -1)
        names = tuple(f"{rotor}_{age}" for age in ages for rotor in ROTOR_NAMES)
        specs["action_history"] = TensorSpec((4 * history,), unit="1", names=names)
    return specs | {
        "force": TensorSpec((3,), unit="N", frame="world", names=AXES, privileged=True),
        "torque": TensorSpec((3,), unit="N m", frame="body", names=AXES, privileged=True),
        "rotor_speed": TensorSpec((4,), unit="1", names=ROTOR_NAMES, privileged=True),
    }


def split_rows(specs: Specs, rows: Tensor, history: Tensor | None) -> dict[str, Tensor]:
    """Observations by key of `specs` from the kernels' rows [O, ...].

    If more than one action is observed, they are `history` [4 history, ...]. The rows become the last axis; nothing is
    copied.
    """
    moved = rows.movedim(0, -1)
    row = 0
    observations: dict[str, Tensor] = {}
    for key, spec in specs.items():
        size = 4 if key == "action_history" else spec.shape[0]
        if key == "action_history" and history is not None:
            observations[key] = history.movedim(0, -1)
        else:
            observations[key] = moved[..., row : row + size]
        row += size
    return observations


class History:
    """The last `length` actions of each environment, oldest first: `rows` [4 * length, L].

    Empty for length 1, because the state of the dynamics has that action.
    """

    def __init__(self, length: int, lanes: int, device: torch.device) -> None:
        self.length = length
        self.rows = torch.zeros(4 * length if length > 1 else 0, lanes, device=device)

    def push(self, action: Tensor, executed: Tensor) -> None:
        """Append `action` [4, L], clipped, where `executed` [1, L]."""
        if self.length > 1:
            shifted = torch.cat((self.rows[4:], action.clamp(-1.0, 1.0)))
            self.rows = torch.where(executed > 0.5, shifted, self.rows)

    def restart(self, ids: Tensor, previous: Tensor) -> None:
        """Fill the history of environments `ids` [M] with `previous` [4, M or more]."""
        if self.length > 1:
            self.rows = self.rows.index_copy(1, ids, previous[:, : len(ids)].repeat(self.length, 1))

    def split_rows_input(self, num_envs: int) -> Tensor | None:
        """The history for `split_rows`, [4 * length, N]."""
        return self.rows[:, :num_envs] if self.length > 1 else None

    def detach(self) -> None:
        """Detach from earlier gradients."""
        self.rows = self.rows.detach()
