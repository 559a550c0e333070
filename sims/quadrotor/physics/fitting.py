"""The dynamics for system identification: rows of airframes that differ, and the measurements of a flight."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from embodied.errors import UserError
from sims.quadrotor.physics import dynamics
from sims.quadrotor.physics.airframes import PARAMETERS, SCATTERED, Airframe, hover_speed
from sims.quadrotor.physics.dynamics import Body, Options

KEYS = ("position", "rotation", "velocity", "angular_velocity")
"""Compared observations, 18 numbers."""
STATE = 17
"""Numbers of the initial state that is guessed from them."""


class FlightModel:
    """Flights of `airframe` with free parameters `names`, in float64 torch; `options` are its effects.

    Letters: B flights of T steps, D = `past` actions before them.

    Raises:
        UserError: for an unknown parameter.
    """

    def __init__(self, airframe: Airframe, names: Sequence[str], options: Options) -> None:
        if unknown := [name for name in names if name not in SCATTERED]:
            raise UserError(f"unknown parameters {', '.join(unknown)}; expected some of {', '.join(SCATTERED)}")
        self.airframe = airframe
        self.names = list(names)
        self.options = options
        self.past = options.past_actions

    def simulate(self, theta: Tensor, start: Tensor, actions: Tensor) -> Tensor:
        """Measurements [B, T+1, 18] from parameters [B, P], `start` [B, STATE] and actions [B, D+T, 4].

        `start` is the body's state with rotor speeds as fractions of the highest, without subtracting the hover speed,
        which depends on the parameters.
        """
        values = dict(zip(PARAMETERS, self.airframe.values(), strict=True))
        rows = [torch.full_like(theta[:, 0], values[name]) for name in PARAMETERS]
        for column, name in enumerate(self.names):
            rows[PARAMETERS.index(name)] = theta[:, column]
        airframe = dynamics.parameters(rows)
        excess = start[:, 13:] - hover_speed(airframe).unsqueeze(1)
        newest_first = actions[:, : self.past].flip(1).flatten(1)
        state = list(torch.cat((start[:, :13], excess, newest_first), 1).T)
        disturbance = [torch.zeros_like(state[0])] * self.options.disturbance_rows
        measurements = [_measured(state)]
        for action in actions[:, self.past :].unbind(1):
            state = dynamics.step(state, list(action.T), disturbance, airframe, self.options)
            measurements.append(_measured(state))
        return torch.stack(measurements, 1)

    def guess(self, measured: Tensor, actions: Tensor) -> Tensor:
        """Initial states [B, STATE] from `measured` [B, T+1, 18]; rotors run at their last command."""
        position, rotation, rates = measured[:, 0].split((3, 9, 6), 1)
        speed = (actions[:, self.past - 1].clamp(-1.0, 1.0) + 1.0) / 2.0
        return torch.cat((position, _quaternion(rotation.view(-1, 3, 3)), rates, speed), 1)


def _measured(state: Sequence[Tensor]) -> Tensor:
    body = Body.of(state)
    return torch.stack([*body.position, *body.rotation(), *body.velocity, *body.angular_velocity], 1)


def _quaternion(rotation: Tensor) -> Tensor:
    """Unit quaternions (w, x, y, z) [B, 4] of noisy rotation matrices: the largest eigenvector of Bar-Itzhack 2000.

    J. Guid. Control Dyn. 23(6).
    """
    # K = [[tr R, s'], [s, R + R' - tr(R) I]] with the skew part s of R; K q = 3 q for an exact rotation.
    R = rotation
    skew = torch.stack((R[:, 2, 1] - R[:, 1, 2], R[:, 0, 2] - R[:, 2, 0], R[:, 1, 0] - R[:, 0, 1]), 1)
    trace = R.diagonal(dim1=1, dim2=2).sum(1)
    K = torch.zeros(len(R), 4, 4, dtype=R.dtype)
    K[:, 0, 0] = trace
    K[:, 0, 1:] = skew
    K[:, 1:, 0] = skew
    K[:, 1:, 1:] = R + R.mT - trace.view(-1, 1, 1) * torch.eye(3, dtype=R.dtype)
    vector = torch.linalg.eigh(K).eigenvectors[..., -1]
    return vector * vector[:, :1].sign()
