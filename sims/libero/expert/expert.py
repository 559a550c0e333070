"""A scripted expert that picks and places with privileged state, for demonstrations and as an upper bound.

It is closed-loop at every control step: reach above the grasp and down a funnel, close, lift, carry above the target
and down another funnel, open. Objects that move before the grasp are planned for again, lost ones are grasped again.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from embodied.errors import UserError
from sims.libero.expert.planning import Planner, target_position
from sims.libero.physics.simulation import Simulation
from sims.libero.scene.geometry import Array
from sims.libero.scene.predicates import holds

Ids = NDArray[np.int64]

PLACES = ("in", "on_object", "on_site")
CLOSING_STEPS, OPENING_STEPS = 9, 12
REACH_STEPS, CARRY_STEPS = 60, 120
"""Steps after which a larger tolerance applies to reaching a goal."""
FUNNEL = 8.0
"""Slope of the funnel: height over the goal per distance from its axis."""
TURN_M = 0.06
"""Distance, m, equivalent to one rad of remaining rotation."""
GAIN, TURN_GAIN = 1.6, 1.2
"""Commanded displacement per desired displacement: slightly above one settles faster."""
ACTION_M, ACTION_RAD = 0.05, 0.5


class Phase(IntEnum):
    """Phases of a pick and place."""

    PLAN = 0
    REACH = 1
    CLOSE = 2
    CARRY = 3
    OPEN = 4


class Expert:
    """Acts in all environments of `simulation`; call `reset` for environments in which an episode begins.

    `noise` is the standard deviation of smooth noise on the actions; 1 is full speed.

    Raises:
        UserError: for a task that is not pick and place.
    """

    def __init__(self, simulation: Simulation, *, noise: float = 0.0, seed: int = 0) -> None:
        self.simulation, self.noise = simulation, noise
        self._planners = {scene: Planner(scene) for scene in dict.fromkeys(simulation.scenes)}
        for scene in self._planners:
            other = next((goal.kind for goal in scene.goal if goal.kind not in PLACES), None)
            if other is not None:
                raise UserError(
                    f"no scripted expert for {scene.task.name}: expected pick-and-place goals, got {other!r}; "
                    "choose tasks that it can do, task.tasks=[...]"
                )
        self._rng = np.random.default_rng(seed)
        pairs = list(zip(simulation.data, simulation.scenes, strict=True))
        # Views into MuJoCo's memory: they follow the state.
        self._hand = [data.site_xpos[scene.grip_site] for data, scene in pairs]
        self._matrix = [data.site_xmat[scene.grip_site] for data, scene in pairs]
        self._object, self._target = list(self._hand), list(self._hand)
        n = simulation.num
        self.phase, self._timer = np.full(n, Phase.PLAN), np.zeros(n, dtype=np.int64)
        self._grasp, self._planned, self._smooth = np.zeros((n, 3)), np.zeros((n, 3)), np.zeros((n, 6))
        self._yaw, self._hover, self._carry, self._release = np.zeros((4, n))

    def reset(self, ids: Ids | None = None) -> None:
        """Forget the plans of environments `ids` (all if None)."""
        ids = np.arange(self.simulation.num) if ids is None else ids
        self.phase[ids], self._smooth[ids] = Phase.PLAN, 0.0

    def act(self, ids: Ids | None = None) -> Array:
        """Actions [n, 7] for environments `ids` (all if None) in their present state."""
        ids = np.arange(self.simulation.num) if ids is None else np.asarray(ids)
        self._plan(ids)
        hand, held, target = (_gather(views, ids) for views in (self._hand, self._object, self._target))
        turn = _turn(_gather(self._matrix, ids).reshape(-1, 3, 3), self._yaw[ids])
        free = self.phase[ids] <= Phase.CLOSE
        goal = np.where(free[:, None], held + self._grasp[ids], hand + target - held)
        goal[~free, 2] = self._release[ids][~free]
        away = np.linalg.norm(goal[:, :2] - hand[:, :2], axis=1)
        height = self._height(ids, goal[:, 2], away, np.linalg.norm(turn, axis=1))
        self._advance(ids, hand, held, goal, away)
        self._plan(ids)
        way = np.column_stack((goal[:, :2], height)) - hand
        # sideways only once high enough
        way[:, :2] *= np.clip(1.5 - np.maximum(way[:, 2:], 0.0) / 0.04, 0.0, 1.0)
        way[self.phase[ids] == Phase.OPEN] = 0.0
        motion = [_limited(GAIN * way[:, :2] / ACTION_M), _limited(GAIN * way[:, 2:] / ACTION_M)]
        motion.append(_limited(TURN_GAIN * turn / ACTION_RAD))
        holding = np.isin(self.phase[ids], (Phase.CLOSE, Phase.CARRY))
        moved = np.clip(np.column_stack(motion) + self._noise(ids), -1.0, 1.0)
        return np.column_stack((moved, np.where(holding, 1.0, -1.0)))

    def _height(self, ids: Ids, goal: Array, away: Array, angle: Array) -> Array:
        """Desired height [n]: down a funnel around the goal's axis, from the collision-free height `away`."""
        phase = self.phase[ids]
        free = phase <= Phase.CLOSE
        outside = np.where(free, away + TURN_M * angle - 0.005, away - 0.01)
        outside[phase == Phase.CLOSE] = 0.0
        top = np.where(free, self._hover[ids], self._carry[ids])
        return np.minimum(goal + FUNNEL * np.maximum(outside, 0.0), np.maximum(top, goal))

    def _advance(self, ids: Ids, hand: Array, held: Array, goal: Array, away: Array) -> None:
        """Advance to the next phase where the present one is complete or has failed."""
        self._timer[ids] += 1
        phase, timer = self.phase[ids], self._timer[ids]
        there = (away < 0.007) & (np.abs(goal[:, 2] - hand[:, 2]) < 0.007) | (away < 0.015) & (timer > REACH_STEPS)
        moved = np.linalg.norm(held - self._planned[ids], axis=1) > 0.015
        over = (away < 0.012) & (goal[:, 2] > hand[:, 2] - 0.012) | (timer > CARRY_STEPS)
        lost = np.linalg.norm(hand - held - self._grasp[ids], axis=1) > 0.035
        after = phase.copy()
        after[(phase == Phase.REACH) & there] = Phase.CLOSE
        after[(phase == Phase.REACH) & moved] = Phase.PLAN
        after[(phase == Phase.CLOSE) & (timer >= CLOSING_STEPS)] = Phase.CARRY
        after[(phase == Phase.CARRY) & over] = Phase.OPEN
        after[(phase == Phase.CARRY) & lost] = Phase.PLAN
        after[(phase == Phase.OPEN) & (timer >= OPENING_STEPS)] = Phase.PLAN
        self.phase[ids], self._timer[ids] = after, np.where(after == phase, timer, 0)

    def _plan(self, ids: Ids) -> None:
        """Plan for those of `ids` without a plan, for the first unsatisfied part of the goal."""
        for env in ids[self.phase[ids] == Phase.PLAN]:
            scene, data = self.simulation.scenes[env], self.simulation.data[env]
            goal = next((goal for goal in scene.goal if not holds(goal, scene.geom_owner, data)), scene.goal[0])
            plan = self._planners[scene].plan(data, goal)
            self._object[env], self._target[env] = data.xpos[goal.a], target_position(data, goal)
            self._grasp[env], self._planned[env], self._yaw[env] = plan.grasp, data.xpos[goal.a], plan.yaw
            self._hover[env], self._carry[env], self._release[env] = plan.hover, plan.carry, plan.release
            self.phase[env], self._timer[env] = Phase.REACH, 0

    def _noise(self, ids: Ids) -> Array:
        """Noise [n, 6] with a correlation time of about five steps, smaller on rotations."""
        fresh = self._rng.standard_normal((len(ids), 6)) * self.noise * (1.0, 1.0, 1.0, 0.3, 0.3, 0.3)
        self._smooth[ids] = 0.8 * self._smooth[ids] + 0.6 * fresh
        return self._smooth[ids]


def _gather(views: list[Array], ids: Ids) -> Array:
    return np.stack([views[env] for env in ids])


def _turn(matrix: Array, yaw: Array) -> Array:
    """Rotation vectors [n, 3] from hand orientations [n, 3, 3] to pointing down with the closing direction at `yaw`."""
    cosine, sine, zero = np.cos(yaw), np.sin(yaw), np.zeros_like(yaw)
    columns = ((cosine, sine, zero), (sine, -cosine, zero), (zero, zero, zero - 1.0))
    wanted = np.stack([np.stack(column, -1) for column in columns], -1)
    error = wanted @ matrix.transpose(0, 2, 1)
    odd = (error - error.transpose(0, 2, 1)) / 2
    vector = np.stack((odd[:, 2, 1], odd[:, 0, 2], odd[:, 1, 0]), -1)  # axis times sine of the angle
    sine = np.linalg.norm(vector, axis=1)
    angle = np.arctan2(sine, (np.trace(error, axis1=1, axis2=2) - 1.0) / 2)
    return vector * (angle / np.maximum(sine, 1e-9))[:, None]


def _limited(motion: Array) -> Array:
    """Shorten rows to the limits of the action, keeping their direction."""
    return motion / np.maximum(np.abs(motion).max(1, keepdims=True), 1.0)
