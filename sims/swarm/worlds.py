"""Worlds of a swarm: obstacles, initial positions and goals, all from one random key.

Letters in shape comments: W worlds, M drones of a world, C cells of the grid.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from torch import Tensor

from sims.quadrotor.physics.airframes import GRAVITY, Airframe
from sims.quadrotor.physics.dynamics import BODY_ROWS, DT_S, Options
from sims.quadrotor.starts import draws
from sims.swarm.mdp import AWAY_M, CELLS, FLYING, GRID, HIGH_M, LOW_M, Swarm

LEGS = 3
"""Goals of a drone in an episode, in sequence."""
JITTER_M = 0.1
"""Largest initial offset of a drone from the middle of its cell, along each axis."""


@dataclass
class Worlds:
    """State of W worlds; everything else follows from it and the numbers of the task.

    Attributes:
        state: rows of the dynamics, [W, M, S].
        disturbance: force (N, world) and torque (N m, body) of each drone, [W, M, 6].
        key: random keys of the noise, [W, M, 2] int32.
        cylinders: middles of the obstacles, m, world, [W, C, 2]; absent ones are far away.
        goals: positions of the goals, m, world, [W, LEGS, M, 3].
        leg_s: duration of each goal except the last, [W].
        seen: obstacles that each drone has observed, [W, M, C] bool.
        steps: control steps that each drone has flown, [W, M] int64.
        fate: FLYING, or what it has hit, [W, M] int64.
        error: sum of the distance from the goal over the last second of the episode, m, [W, M].
    """

    state: Tensor
    disturbance: Tensor
    key: Tensor
    cylinders: Tensor
    goals: Tensor
    leg_s: Tensor
    seen: Tensor
    steps: Tensor
    fate: Tensor
    error: Tensor

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def at(self, worlds: Tensor) -> Self:
        """Copies of some `worlds` [V]."""
        return replace(self, **{name: values.detach()[worlds] for name, values in self.tensors().items()})

    def put(self, worlds: Tensor, others: Worlds) -> None:
        """Replace `worlds` [V] by V others."""
        for name, values in others.tensors().items():
            setattr(self, name, getattr(self, name).index_copy(0, worlds, values))

    def goal(self) -> Tensor:
        """Current goal of each drone, m, world, [W, M, 3]."""
        leg = (self.steps * DT_S / self.leg_s.unsqueeze(1)).long().clamp(max=LEGS - 1)
        W, M = leg.shape
        world = torch.arange(W, device=leg.device).unsqueeze(1)
        drone = torch.arange(M, device=leg.device)
        return self.goals[world, leg, drone]


def build(mdp: Swarm, airframe: Airframe, options: Options, key: Tensor, density: float) -> Worlds:
    """Worlds of the `key` [2, W] with obstacles in the share `density` of the cells.

    Each drone begins in its own cell without an obstacle; goals are in such cells too.
    """
    M = mdp.drones
    W = key.shape[1]
    u = _Draws(draws(key, 2 * CELLS + LEGS + 20 * M))
    order = u.take(CELLS).argsort(1)
    occupied = torch.zeros(W, CELLS, dtype=torch.bool).scatter(1, order[:, : round(density * CELLS)], True)
    free = (u.take(CELLS) + occupied).argsort(1)[:, :M]  # draws are below 1
    cylinders = torch.where(occupied.unsqueeze(-1), _middle(torch.arange(CELLS)), AWAY_M)
    begin = torch.cat((_middle(order[:, CELLS - M :]), torch.zeros(W, M, 1)), -1) + JITTER_M * u.around(M, 3)
    begin[..., 2] = LOW_M + (HIGH_M - LOW_M) * u.take(M)
    places = torch.cat((_middle(free), LOW_M + (HIGH_M - LOW_M) * u.take(M).unsqueeze(-1)), -1)
    leg_s = mdp.exchange_low_s + (mdp.exchange_high_s - mdp.exchange_low_s) * u.take(1)[:, 0]
    return Worlds(
        state=_state(mdp, airframe, options, begin, u),
        disturbance=_disturbance(mdp, airframe, u, M),
        key=_drone_keys(key, M),
        cylinders=cylinders,
        goals=_exchanged(places, u),
        leg_s=leg_s,
        seen=torch.zeros(W, M, CELLS, dtype=torch.bool),
        steps=torch.zeros(W, M, dtype=torch.int64),
        fate=torch.full((W, M), FLYING),
        error=torch.zeros(W, M),
    )


class _Draws:
    """Uniform numbers [count, W], each used once."""

    def __init__(self, numbers: Tensor) -> None:
        self.numbers = numbers.t()
        self.dealt = 0

    def take(self, count: int) -> Tensor:
        """The next numbers, [W, count] in (0, 1)."""
        self.dealt += count
        numbers = self.numbers[:, self.dealt - count : self.dealt]
        assert numbers.shape[1] == count, "more draws than were made"
        return numbers

    def around(self, *shape: int) -> Tensor:
        """The next numbers, [W, *shape] in (-1, 1)."""
        return (2.0 * self.take(torch.Size(shape).numel()) - 1.0).unflatten(1, shape)


def _middle(cell: Tensor) -> Tensor:
    """Middles of cells [...], m, world, [..., 2]."""
    return torch.stack((cell // GRID, cell % GRID), -1) - 0.5 * (GRID - 1)


def _state(mdp: Swarm, airframe: Airframe, options: Options, begin: Tensor, u: _Draws) -> Tensor:
    """Rows of the dynamics of drones at `begin` [W, M, 3], nearly level, with rotors at hover speed."""
    W, M = begin.shape[:2]
    tilt = 0.5 * mdp.initial_tilt * u.around(M, 3)
    quaternion = torch.nn.functional.normalize(torch.cat((torch.ones(W, M, 1), tilt), -1), dim=-1)
    velocity = mdp.initial_velocity_m_s * u.around(M, 3)
    turning = mdp.initial_angular_velocity_rad_s * u.around(M, 3)
    state = torch.zeros(W, M, options.state_rows)
    state[..., :13] = torch.cat((begin, quaternion, velocity, turning), -1)
    state[..., BODY_ROWS:] = airframe.hover_action
    return state


def _disturbance(mdp: Swarm, airframe: Airframe, u: _Draws, drones: int) -> Tensor:
    """Normally distributed forces and torques, [W, M, 6]."""
    scale = torch.tensor([mdp.force_scale] * 3 + [mdp.torque_scale] * 3)
    # Inverse of the normal distribution: sqrt(2) erfinv(u) for u uniform in (-1, 1).
    return airframe.mass_kg * GRAVITY * scale * 2.0**0.5 * torch.erfinv(u.around(drones, 6))


def _drone_keys(key: Tensor, drones: int) -> Tensor:
    """A separate key for each drone, [W, M, 2]."""
    return key.t().unsqueeze(1) + torch.arange(drones, dtype=torch.int32).view(1, -1, 1) * 0x01000193


def _exchanged(places: Tensor, u: _Draws) -> Tensor:
    """Goals [W, LEGS, M, 3]: each drone's own place, then twice that of another drone."""
    W, M = places.shape[:2]
    legs = [torch.arange(M).expand(W, M)]
    for _ in range(LEGS - 1):
        further = 1 + (u.take(1) * (M - 1)).long()  # all by the same shift, so that no drone keeps its place
        legs.append((legs[-1] + further) % M)
    world = torch.arange(W).view(-1, 1, 1)
    return places[world, torch.stack(legs, 1)]
