"""Episodes of a task as programs: begin, observe, and one complete control step.

Rows of the state: see `dynamics.step`; with `Options.senses`, the body's rows of one step ago and the states of the air
follow. Rows of the record: control steps, terminated, truncated (0 or 1), and the task's memory. Rows of the
disturbance: see `dynamics.step`; the task's plan of the episode follows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, ClassVar, TypeVar

from torch import Tensor

import sims.mdp
from embodied.configuration import Range, with_numbers
from sims.quadrotor.physics import air, dynamics
from sims.quadrotor.physics.airframes import PARAMETERS, Airframe, hover_speed
from sims.quadrotor.physics.dynamics import AIR_ROWS, BODY_ROWS, DT_S, SENSED_ROWS, Body, Options
from sims.quadrotor.physics.rotors import Rotors
from sims.tracer.arithmetic import Rows, Value, gaussians, sqrt, squares, where
from sims.tracer.program import LANE, UNIFORM, WORD, Group, Program

Reward = Annotated[Value, Range()]
Weight = Annotated[Value, Range(at_least=0)]
COUNTERS = 3
"""Number of rows of the record before the task's memory: control steps, terminated, truncated."""
PRIVILEGED_ROWS = 10
"""Force 3, torque 3, rotor speeds 4."""
FIRST_AIR = -4
GUSTS = 64
"""Counter of the draws of the initial air, and first index of the air's draws in each step, after the noise's."""


@dataclass
class Moment:
    """State of an episode after a control step, as rows.

    Attributes:
        body: the drone.
        steps: control steps executed.
        plan: rows drawn at the beginning of the episode (a reference to follow).
        memory: rows that the task carries from step to step.
        airframe: parameters of the drone.
        key: seed of the noise of observations; None without noise.
        limit: control steps after which the episode is truncated.
        action, previous: the last two actions, 4 rows each.
        before: the state one control step earlier; None when the episode begins.
    """

    body: Body
    steps: Value
    plan: Rows
    memory: Rows
    airframe: Airframe
    key: Sequence[Value] | None = None
    limit: Value = 0.0
    action: Rows = field(default_factory=list)
    previous: Rows = field(default_factory=list)
    before: Moment | None = None


@dataclass(frozen=True)
class Record:
    """Endings and memory [MEMORY, ...] of episodes as torch tensors [...], with the step `limit`."""

    terminated: Tensor
    truncated: Tensor
    memory: Tensor
    limit: int


class Mdp(sims.mdp.Mdp):
    """A task of the dynamics: functions of rows, such as `hover.Hover`.

    `success`, `failures` and `metrics` take a `Record` of torch tensors; all other functions take a `Moment` of rows,
    which are traced into compiled code. A memory is 0 when an episode begins.
    """

    PLAN: ClassVar[int] = 0
    """Number of rows of `plan`."""
    MEMORY: ClassVar[int]
    """Number of rows of the memory."""

    def plan(self, key: Sequence[Value]) -> Rows:
        """Rows of the episode of `key` that do not change."""
        return []

    def initial(self, key: Sequence[Value], airframe: Airframe, plan: Rows) -> Rows:
        """Rows of the body at the beginning of the episode of `key`."""
        raise NotImplementedError

    def commands(self, key: Sequence[Value], airframe: Airframe, rotors: Rows) -> Rows:
        """Last commands, 4 rows, before an episode that begins with the excess speeds `rotors`."""
        raise NotImplementedError

    def disturbance(self, key: Sequence[Value], airframe: Airframe) -> Rows:
        """Rows of the dynamics' disturbance in the episode of `key`."""
        raise NotImplementedError


M = TypeVar("M", bound=Any)


def weights(mdp: Any) -> dict[str, float]:  # noqa: ANN401 - a dataclass of numbers
    """The weights of the reward of `mdp`, by name."""
    names = [entry.name for entry in fields(mdp) if entry.name.startswith(("reward_", "weight_"))]
    return {name: getattr(mdp, name) for name in names}


def reweighted(mdp: M, reward: Mapping[str, float]) -> M:
    """`mdp` with other weights of its `reward`, by name.

    Raises:
        UserError: for an unknown weight, and for one out of range.
    """
    return with_numbers(mdp, reward, "task.reward", allowed=weights(mdp))


@dataclass(frozen=True)
class Episode:
    """Programs of the task `mdp`.

    Attributes:
        mdp: the task, a dataclass of numbers.
        options: effects of the dynamics.
        randomised: whether every environment has its own airframe ([P, N] parameters) or all share one.
        noise: whether observations are noisy.
    """

    mdp: Mdp
    options: Options
    randomised: bool = False
    noise: bool = True

    @property
    def physical_rows(self) -> int:
        """Number of observed rows that every policy reads, without previous actions."""
        return sum(spec.shape[0] for spec in self.mdp.OBSERVED.values())

    @property
    def previous(self) -> slice:
        """Rows of the previous action in the observation."""
        return slice(self.physical_rows, self.physical_rows + 4)

    @property
    def observation_rows(self) -> int:
        """Number of rows: physical ones, previous action 4, and privileged: force 3, torque 3, rotor speeds 4."""
        return self.physical_rows + 4 + PRIVILEGED_ROWS

    @property
    def record_rows(self) -> int:
        """Control steps, terminated, truncated, the task's memory."""
        return COUNTERS + self.mdp.MEMORY

    @property
    def disturbance_rows(self) -> int:
        """Rows of the dynamics' disturbance and of the task's plan."""
        return self.options.disturbance_rows + self.mdp.PLAN

    def programs(self) -> tuple[Program, ...]:
        """`begin`, `observe` and `step`."""
        state, record, action, constants, results = self._groups()
        _, key, airframe, settings = constants
        return (
            Program("begin", (key, airframe, settings), (state, constants[0]), self._begin),
            Program("observe", (state, record, *constants), (results[2],), self._observe),
            Program("step", (state, record, action, *constants), results, self._step),
        )

    def judge(self) -> Program:
        """Program of a control step with the dynamics of another simulator: "moved" is the state after it."""
        state, record, action, constants, results = self._groups()
        moved = Group("moved", self.options.state_rows)
        return Program("judge", (state, moved, record, action, *constants), results, self._judged)

    def _groups(self) -> tuple[Group, Group, Group, tuple[Group, ...], tuple[Group, ...]]:
        """Groups of rows: state, record, action, the constants of an episode, and the results of a step."""
        state = Group("state", self.options.state_rows, differentiable=True)
        record = Group("record", self.record_rows)
        action = Group("action", 4, differentiable=True)
        disturbance = Group("disturbance", self.disturbance_rows)
        key = Group("key", 2, WORD)
        airframe = Group("airframe", len(PARAMETERS), LANE if self.randomised else UNIFORM)
        settings = Group("settings", len(self.settings(0)), UNIFORM)
        observation = Group("observation", self.observation_rows, differentiable=True)
        reward = Group("reward", 1, differentiable=True)
        executed = Group("executed", 1)
        results = (state, record, observation, reward, executed)
        return state, record, action, (disturbance, key, airframe, settings), results

    def settings(self, step_limit: int) -> list[float]:
        """Rows of the group "settings"."""
        return [float(step_limit), *(getattr(self.mdp, field.name) for field in fields(self.mdp))]

    def _task(self, settings: Rows) -> Mdp:
        """The task with the kernel's inputs instead of its numbers."""
        names = [field.name for field in fields(self.mdp)]
        return replace(self.mdp, **dict(zip(names, settings[1:], strict=True)))

    def _begin(self, key: Rows, airframe: Rows, settings: Rows) -> Mapping[str, Rows]:
        mdp = self._task(settings)
        frame = dynamics.parameters(airframe)
        plan = mdp.plan(key)
        body = mdp.initial(key, frame, plan)
        commands = mdp.commands(key, frame, body[-4:])
        state = body + commands * self.options.past_actions + [0.0] * self.options.sag
        if self.options.many_rotors:
            state += Rotors.of(frame.rotors).mixed(body[-4:])
        if self.options.senses:
            state += body[:SENSED_ROWS] + air.begin(gaussians(key, FIRST_AIR, 0, AIR_ROWS))
        return {"state": state, "disturbance": mdp.disturbance(key, frame) + plan}

    def _observe(
        self, state: Rows, record: Rows, disturbance: Rows, key: Rows, airframe: Rows, settings: Rows
    ) -> Mapping[str, Rows]:
        frame = dynamics.parameters(airframe)
        return {"observation": self._observation(self._task(settings), frame, state, record, disturbance, key)}

    def _observation(self, mdp: Mdp, frame: Airframe, state: Rows, record: Rows, disturbance: Rows, key: Rows) -> Rows:
        now = self._moment(state, record[0], record, disturbance, frame)
        measured = replace(self._measured(now, state, frame), key=key if self.noise else None)
        physical = mdp.observe(measured)
        previous = state[BODY_ROWS : BODY_ROWS + 4]
        speed = [excess + hover_speed(frame) for excess in now.body.rotor_speed]
        return [*physical, *previous, *disturbance[:6], *speed]

    def _measured(self, now: Moment, state: Rows, frame: Airframe) -> Moment:
        """The moment as sensors measure it: interpolated between this step and the one before."""
        if not self.options.senses:
            return now
        earlier = state[self.options.dynamic_rows :]
        age = frame.observation_delay_s * (1.0 / DT_S)
        rows = now.body.rows()
        # x(t - delay) = x(t) + delay / dt (x(t - dt) - x(t)).
        delayed = [new + age * (old - new) for new, old in zip(rows, earlier[:SENSED_ROWS], strict=False)]
        body = Body.of([*delayed, *rows[SENSED_ROWS:]])
        scale = 1.0 / sqrt(squares(body.quaternion))
        body.quaternion = [q * scale for q in body.quaternion]
        return replace(now, body=body)

    def _moment(self, state: Rows, steps: Value, record: Rows, disturbance: Rows, frame: Airframe) -> Moment:
        return Moment(Body.of(state), steps, disturbance[self.options.disturbance_rows :], record[COUNTERS:], frame)

    def _step(
        self, state: Rows, record: Rows, action: Rows, disturbance: Rows, key: Rows, airframe: Rows, settings: Rows
    ) -> Mapping[str, Rows]:
        frame = dynamics.parameters(airframe)
        rows = self.options.dynamic_rows
        if self.options.senses:
            wind = disturbance[6:9]
            states = state[rows + SENSED_ROWS :]
            # The mean wind of the disturbance is replaced with the velocity of the turbulent air.
            blown = [*disturbance[:6], *air.velocity(states, wind), *disturbance[9:]]
            moved = dynamics.step(state[:rows], action, blown, frame, self.options) + state[:SENSED_ROWS]
            moved += air.after(states, wind, gaussians(key, record[0], GUSTS, 3))
        else:
            moved = dynamics.step(state, action, disturbance, frame, self.options)
        return self._judged(state, moved, record, action, disturbance, key, airframe, settings)

    def _judged(
        self,
        state: Rows,
        moved: Rows,
        record: Rows,
        action: Rows,
        disturbance: Rows,
        key: Rows,
        airframe: Rows,
        settings: Rows,
    ) -> Mapping[str, Rows]:
        """State, record, observation, reward and executed of an episode after the step from `state` to `moved`."""
        mdp = self._task(settings)
        frame = dynamics.parameters(airframe)
        limit = settings[0]
        frozen = record[1] + record[2] > 0.5  # an ended episode keeps its state until its reset
        sound = dynamics.sound(moved)  # an unsound state is discarded, and terminates the episode
        moved = [where(sound, new, old) for new, old in zip(moved, state, strict=True)]
        before = self._moment(state, record[0], record, disturbance, frame)
        now = self._moment(moved, record[0] + 1.0, record, disturbance, frame)
        now.before = before
        now.limit = limit
        now.action = action
        now.previous = state[BODY_ROWS : BODY_ROWS + 4]
        now.memory = mdp.update(now)
        terminated = mdp.terminated(now) | ~sound
        over = now.steps >= limit
        finished = mdp.finished(now)
        over = over if finished is None else over | finished
        reward = mdp.reward(now)
        ended = where(terminated, 1.0, 0.0), where(terminated, 0.0, where(over, 1.0, 0.0))
        state = [where(frozen, old, new) for old, new in zip(state, moved, strict=True)]
        record = [where(frozen, *pair) for pair in zip(record, (now.steps, *ended, *now.memory), strict=True)]
        return {
            "state": state,
            "record": record,
            "observation": self._observation(mdp, frame, state, record, disturbance, key),
            "reward": [where(frozen, 0.0, reward)],
            "executed": [where(frozen, 0.0, 1.0)],
        }
