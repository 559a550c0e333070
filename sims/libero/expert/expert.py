"""A scripted expert that places, drags, opens, closes and turns with privileged state.

It makes demonstrations and is an upper bound. It is closed-loop at every control step: reach above the grasp and down a
funnel, close, carry above the target and down another funnel or along a joint's path, open, leave. A body that moves
before the grasp gets a new plan; a lost body is grasped again.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from sims.libero.expert.planning import UP, Plan, Planner
from sims.libero.physics.simulation import Simulation
from sims.libero.scene.geometry import Array

Ids = NDArray[np.int64]

CLOSING_STEPS = 9
OPENING_STEPS = 12
LEAVING_STEPS = 30
REACH_STEPS = 60
CARRY_STEPS = 120
"""Numbers of steps after which a larger tolerance applies to reaching a goal."""
FUNNEL = 8.0
"""Slope of the funnel: height over the goal per distance from its axis."""
TURN_M = 0.06
"""Distance, m, equivalent to one rad of remaining rotation."""
GAIN = 1.6
TURN_GAIN = 1.2
"""Commanded displacement per desired displacement: slightly above one settles faster."""
ACTION_M = 0.05
ACTION_RAD = 0.5


class Phase(IntEnum):
    """Phases of moving one body."""

    PLAN = 0
    REACH = 1
    CLOSE = 2
    CARRY = 3
    OPEN = 4
    LEAVE = 5


class Expert:
    """Acts in all environments of `simulation`; call `reset` for environments in which an episode begins.

    `noise` is the standard deviation of smooth noise on the actions; 1 is full speed.
    """

    def __init__(self, simulation: Simulation, *, noise: float = 0.0, seed: int = 0) -> None:
        self.simulation = simulation
        self.noise = noise
        self.goals = simulation.goals  # those of the present episodes
        self._planners = {scene: Planner(scene) for scene in dict.fromkeys(simulation.scenes)}
        self._rng = np.random.default_rng(seed)
        pairs = list(zip(simulation.data, simulation.scenes, strict=True))
        # Views into MuJoCo's memory: they follow the state.
        self._hand = [data.site_xpos[scene.grip_site] for data, scene in pairs]
        self._matrix = [data.site_xmat[scene.grip_site].reshape(3, 3) for data, scene in pairs]
        n = simulation.num
        self._plans: list[Plan | None] = [None] * n
        self.phase = np.full(n, Phase.PLAN)
        self._timer = np.zeros(n, dtype=np.int64)
        self._planned = np.zeros((n, 3))
        self._grasp_offset = np.zeros((n, 3))
        self._smooth = np.zeros((n, 6))

    def reset(self, ids: Ids | None = None) -> None:
        """Forget the plans of environments `ids` (all if None)."""
        ids = np.arange(self.simulation.num) if ids is None else ids
        self.phase[ids] = Phase.PLAN
        self._smooth[ids] = 0.0

    def act(self, ids: Ids | None = None) -> Array:
        """Actions [n, 7] for environments `ids` (all if None) in their present state."""
        ids = np.arange(self.simulation.num) if ids is None else np.asarray(ids)
        motion = np.stack([self._motion(env) for env in ids])
        motion[:, :6] = np.clip(motion[:, :6] + self._noise(ids), -1.0, 1.0)
        return motion

    def distance(self, env: int) -> float:
        """Distance of the hand from its goal in the present phase of environment `env`, m."""
        return float(np.linalg.norm(self._goal(env, self._current(env))[0] - self._hand[env]))

    def turn(self, env: int) -> float:
        """Rotation that remains to the hand's orientation in the present phase of environment `env`, rad."""
        return float(np.linalg.norm(_turn(self._matrix[env], self._goal(env, self._current(env))[1])))

    def replan(self, env: int) -> None:
        """Reach for another grasp in environment `env`, if the hand has to turn less for it."""
        plan, turn = self._plans[env], self.turn(env)
        timer, planned = self._timer[env], self._planned[env].copy()
        self.phase[env] = Phase.PLAN
        if self.turn(env) > turn:  # the plan is kept, with what it began from
            self._plans[env], self._timer[env], self._planned[env] = plan, timer, planned

    def hold(self, env: int) -> None:
        """Go on carrying the body of the plan of environment `env`, which the hand already holds."""
        plan = self._current(env)
        if plan.drag or plan.joint is not None:
            return
        self.phase[env] = Phase.CARRY
        self._timer[env] = 0
        self._grasp_offset[env] = self._hand[env] - self.simulation.data[env].xpos[plan.body]

    def _motion(self, env: int) -> Array:
        """Action [7] without noise for one environment."""
        plan = self._current(env)
        hand = self._hand[env]
        position, matrix = self._goal(env, plan)
        turn = _turn(self._matrix[env], matrix)
        axis = plan.axis if plan.joint is not None or self.phase[env] not in (Phase.CARRY, Phase.OPEN) else UP
        motion = position - hand
        along = float(motion @ axis)
        aside = motion - along * axis
        away = float(np.linalg.norm(aside))
        rise = self._rise(env, plan, float(position @ axis), away, float(np.linalg.norm(turn)))
        if self._advance(env, plan, hand, along, away):
            plan = self._current(env)
        if self.phase[env] == Phase.OPEN:
            motion = np.zeros(3)
        else:
            along += rise
            # sideways only once high enough
            if plan.joint is None or self.phase[env] != Phase.CARRY:
                aside = aside * np.clip(1.5 - max(along, 0.0) / 0.04, 0.0, 1.0)
            motion = _limited(GAIN * aside / ACTION_M) + _limited(GAIN * along * axis / ACTION_M)
        closed = plan.drag or self.phase[env] in (Phase.CLOSE, Phase.CARRY)
        return np.concatenate((motion, _limited(TURN_GAIN * turn / ACTION_RAD), [1.0 if closed else -1.0]))

    def _current(self, env: int) -> Plan:
        """Plan of one environment; without one, a new plan for the next part of the goal."""
        if self.phase[env] == Phase.PLAN:
            planner = self._planners[self.simulation.scenes[env]]
            data = self.simulation.data[env]
            plan = self._plans[env] = planner.plan(data, planner.next(data, self.goals[env]))
            self._planned[env] = data.xpos[plan.body]
            self.phase[env] = Phase.REACH
            self._timer[env] = 0
        return self._plans[env]

    def _goal(self, env: int, plan: Plan) -> tuple[Array, Array]:
        """Desired position of the hand, and its orientation, in the present phase."""
        hand = self._hand[env]
        data = self.simulation.data[env]
        phase = self.phase[env]
        body_position = data.xpos[plan.body]
        if phase <= Phase.CLOSE:
            return body_position + plan.grasp, plan.matrix
        if phase == Phase.LEAVE:
            hover = plan.hover + (body_position - self._planned[env]) @ plan.axis
            return hand + (hover - hand @ plan.axis) * plan.axis, self._matrix[env]
        if plan.joint is not None:
            return plan.joint.hand(data, ahead=True)
        goal = hand + plan.target - body_position
        goal[2] = plan.release
        return goal, plan.matrix

    def _rise(self, env: int, plan: Plan, goal: float, away: float, angle: float) -> float:
        """Desired distance from the goal along the axis, m: on a funnel, up to the collision-free coordinate."""
        phase = self.phase[env]
        if phase in (Phase.CLOSE, Phase.LEAVE):
            return 0.0
        free = phase == Phase.REACH
        slack = 0.005 if self._timer[env] <= REACH_STEPS else 0.02
        outside = away + TURN_M * angle - slack if free else away - 0.01
        return min(FUNNEL * max(outside, 0.0), max((plan.hover if free else plan.carry) - goal, 0.0))

    def _advance(self, env: int, plan: Plan, hand: Array, along: float, away: float) -> bool:
        """Advance to the next phase where the present one is complete or has failed; returns whether it did."""
        self._timer[env] += 1
        phase = self.phase[env]
        timer = self._timer[env]
        data = self.simulation.data[env]
        body_position = data.xpos[plan.body]
        after = phase
        if phase == Phase.REACH:
            near = 0.007 if timer <= REACH_STEPS else 0.015
            if away < near and abs(along) < near:
                after = Phase.CARRY if plan.drag else Phase.CLOSE
            if np.linalg.norm(body_position - self._planned[env]) > 0.015:
                after = Phase.PLAN
        elif phase == Phase.CLOSE and timer >= CLOSING_STEPS:
            after = Phase.CARRY
        elif phase == Phase.CARRY:
            if self._carried(plan, env, along, away) or timer > CARRY_STEPS:
                after = Phase.OPEN
            if self._lost(plan, env):
                after = Phase.PLAN
        elif phase == Phase.OPEN and timer >= OPENING_STEPS:
            after = Phase.LEAVE
        elif phase == Phase.LEAVE and (along < 0.02 or timer >= LEAVING_STEPS):
            after = Phase.PLAN
        if after == Phase.CARRY != phase:
            self._grasp_offset[env] = hand - body_position
        self.phase[env] = after
        self._timer[env] = timer if after == phase else 0
        return after != phase

    def _carried(self, plan: Plan, env: int, along: float, away: float) -> bool:
        """Whether the held body is at its target."""
        if plan.joint is not None:
            return plan.joint.moved(self.simulation.data[env])
        return away < 0.012 and along > -0.012

    def _lost(self, plan: Plan, env: int) -> bool:
        """Whether the hand has lost the body."""
        hand = self._hand[env]
        data = self.simulation.data[env]
        if plan.joint is not None:
            return bool(np.linalg.norm(hand - plan.joint.hand(data, ahead=False)[0]) > 0.035)
        return bool(
            np.linalg.norm(hand - data.xpos[plan.body] - self._grasp_offset[env]) > (0.1 if plan.drag else 0.035)
        )

    def _noise(self, ids: Ids) -> Array:
        """Noise [n, 6] with a correlation time of about five steps, smaller on rotations."""
        # AR(1): x' = 0.8 x + 0.6 n keeps the variance, because 0.8^2 + 0.6^2 = 1.
        draws = self._rng.standard_normal((len(ids), 6)) * self.noise * (1.0, 1.0, 1.0, 0.3, 0.3, 0.3)
        self._smooth[ids] = 0.8 * self._smooth[ids] + 0.6 * draws
        return self._smooth[ids]


def _turn(matrix: Array, target: Array) -> Array:
    """Rotation vector [3] from the orientation `matrix` [3, 3] to `target`."""
    error = target @ matrix.T
    odd = (error - error.T) / 2
    vector = np.array((odd[2, 1], odd[0, 2], odd[1, 0]))  # axis times sine of the angle
    sine = np.linalg.norm(vector)
    angle = np.arctan2(sine, (np.trace(error) - 1.0) / 2)
    return vector * (angle / max(sine, 1e-9))


def _limited(motion: Array) -> Array:
    """Shorten `motion` to the limits of the action, keeping its direction."""
    return motion / max(np.abs(motion).max(), 1.0)
