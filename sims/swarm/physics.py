"""Motion and observations of a swarm: the dynamics' kernels, with interactions between drones in torch.

Letters in shape comments: W worlds of M drones, N = W M, S rows of a state, O observations, L lanes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from sims.quadrotor import episode
from sims.quadrotor.physics import dynamics
from sims.quadrotor.physics.airframes import GRAVITY, PARAMETERS, Airframe
from sims.quadrotor.physics.dynamics import BODY_ROWS, Body, Options
from sims.quadrotor.tasks.hover import Hover
from sims.swarm.mdp import Moment, Swarm, around, carrot, downwash, tokens
from sims.swarm.ways import Ways
from sims.swarm.worlds import Worlds
from sims.tracer.arithmetic import Rows
from sims.tracer.kernels import Kernels, pad
from sims.tracer.program import UNIFORM, WORD, Group, Program


class Sight(NamedTuple):
    """Observations of all drones, [W, M, O], and their true states and surroundings."""

    observations: Tensor
    now: Moment


class Physics:
    """Moves and observes the drones of `mdp` with this `airframe`, optionally with `noise`."""

    def __init__(self, mdp: Swarm, airframe: Airframe, options: Options, noise: bool) -> None:
        self.mdp = mdp
        self.airframe = airframe
        self.options = options
        self.noise = noise
        self._kernels = Kernels(self._programs(), torch.device("cpu"))
        self._parameters = torch.tensor(airframe.values()).unsqueeze(1)

    def advance(self, worlds: Worlds, action: Tensor, flying: Tensor) -> Tensor:
        """States [W, M, S] after a control step with `action` [W, M, 4]; drones `flying` [W, M] cause downwash."""
        with torch.no_grad():
            force = worlds.disturbance.clone()
            weight = self.airframe.mass_kg * GRAVITY
            force[..., 2] -= weight * downwash(worlds.state[..., :3], flying)
        inputs = {"state": _rows(worlds.state), "action": _rows(action), "force": _rows(force)}
        return _unrolled(self._kernels("fly", inputs | {"airframe": self._parameters})["state"], worlds)

    def look(self, worlds: Worlds, ways: Ways, flying: Tensor, change: Tensor | None = None) -> Sight:
        """Observations of all drones, with neighbours among those `flying`, and their true states.

        `change` [W, M, 4] is the change of their actions.
        """
        inputs = {"state": _rows(worlds.state), "key": _rows(worlds.key)}
        inputs["steps"] = _rows(worlds.steps.unsqueeze(-1).float())
        readings = self._kernels("sense", inputs)
        measured, true = (_unrolled(readings[name], worlds) for name in ("sensed", "true"))
        goal = worlds.goal()
        position = true[..., :3]
        with torch.no_grad():
            near = around(self.mdp, position, flying, worlds.cylinders)
            ways.update(worlds, position)
        neighbours, obstacles = tokens(self.mdp, measured[..., :3], measured[..., 12:15], worlds.cylinders, near)
        way = ways.along(goal - measured[..., :3], measured[..., :3])
        observation = (
            carrot(self.mdp, way),
            measured[..., 3:],
            measured[..., 2:3],
            neighbours.flatten(2),
            obstacles.flatten(2),
            worlds.state[..., BODY_ROWS : BODY_ROWS + 4],
            worlds.disturbance,
            worlds.state[..., BODY_ROWS - 4 : BODY_ROWS] + self.airframe.hover_speed,
        )
        change = torch.zeros_like(position) if change is None else change
        to_goal = goal - position
        way = ways.along(to_goal, position)
        motion = position, true[..., 3:12], true[..., 12:15], true[..., 15:]
        return Sight(torch.cat(observation, -1), Moment(*motion, to_goal, way, change, worlds.cylinders, near))

    def _programs(self) -> tuple[Program, Program]:
        state = Group("state", self.options.state_rows, differentiable=True)
        action = Group("action", 4, differentiable=True)
        force = Group("force", self.options.disturbance_rows)
        airframe = Group("airframe", len(PARAMETERS), UNIFORM)
        steps = Group("steps", 1)
        key = Group("key", 2, WORD)
        sensed = Group("sensed", 18, differentiable=True)
        true = Group("true", 18, differentiable=True)
        return (
            Program("fly", (state, action, force, airframe), (state,), self._fly),
            Program("sense", (state, steps, key), (sensed, true), self._sense),
        )

    def _fly(self, state: Rows, action: Rows, force: Rows, airframe: Rows) -> dict[str, Rows]:
        return {"state": dynamics.step(state, action, force, dynamics.parameters(airframe), self.options)}

    def _sense(self, state: Rows, steps: Rows, key: Rows) -> dict[str, Rows]:
        """Position, rotation, velocity and angular velocity, with hover's sensor noise and without."""
        sensors = Hover()
        now = episode.Moment(Body.of(state), steps[0], [], [], self.airframe)
        noisy = replace(now, key=key if self.noise else None)
        return {"sensed": sensors.observe(noisy), "true": sensors.observe(now)}


def _rows(values: Tensor) -> Tensor:
    """Values [W, M, R] in the kernels' layout, [R, L]; lanes beyond N repeat the first, which keeps them finite."""
    flat = values.flatten(0, 1)
    missing = pad(len(flat)) - len(flat)
    if missing:
        flat = torch.cat((flat, flat[:1].detach().expand(missing, -1)))
    return flat.t().contiguous()


def _unrolled(rows: Tensor, worlds: Worlds) -> Tensor:
    """Values [W, M, R] from the kernels' layout [R, L]; the inverse of `_rows`."""
    W, M = worlds.fate.shape
    return rows.t()[: W * M].view(W, M, -1)
