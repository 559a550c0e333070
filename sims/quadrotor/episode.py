"""Episodes of a task as programs: begin, observe, and one control step with everything that happens in it.

Rows of the state: see `dynamics.step`. Rows of the bookkeeping: control steps, terminated, truncated (0 or 1), and the
sum of the error over the last `ERROR_STEPS` steps before the step limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

from sims.quadrotor import dynamics
from sims.quadrotor.airframes import PARAMETERS, Airframe, hover_speed
from sims.quadrotor.arithmetic import Rows, Value, where
from sims.quadrotor.dynamics import Body, Options
from sims.quadrotor.program import LANE, UNIFORM, WORD, Group, Program

ERROR_STEPS = 100
"""The last second, over which the position error of an episode is averaged."""
PHYSICAL_ROWS = 18
"""Observed of the body: position 3, rotation 9, velocity 3, angular velocity 3."""
PREVIOUS = slice(18, 22)
OBSERVATION_ROWS = 32
"""The above, the previous action 4, and privileged: force 3, torque 3, rotor speeds 4."""


class Mdp(Protocol):
    """What makes a task of the dynamics: neutral functions in a dataclass of numbers (`hover.Hover` is one)."""

    def initial(self, key: Sequence[Value], airframe: Airframe) -> Rows: ...  # noqa: D102 - see Hover
    def disturbance(self, key: Sequence[Value], airframe: Airframe) -> Rows: ...  # noqa: D102
    def observe(self, body: Body, key: Sequence[Value] | None, steps: Value) -> Rows: ...  # noqa: D102
    def reward(self, body: Body, action: Rows, previous: Rows, airframe: Airframe) -> Value: ...  # noqa: D102
    def terminated(self, body: Body) -> Value: ...  # noqa: D102
    def error(self, body: Body) -> Value: ...  # noqa: D102


@dataclass(frozen=True)
class Episode:
    """The programs of task `mdp`.

    Attributes:
        mdp: the task, a dataclass of numbers.
        options: effects of the dynamics.
        randomised: whether every environment has an airframe of its own ([P, N] parameters) or all share one.
        noise: whether observations are noisy.
    """

    mdp: Any  # an Mdp that is a dataclass; protocols cannot say that
    options: Options
    randomised: bool = False
    noise: bool = True

    def programs(self) -> tuple[Program, ...]:
        """`begin`, `observe` and `step`."""
        state = Group("state", self.options.state_rows, differentiable=True)
        record, action = Group("record", 4), Group("action", 4, differentiable=True)
        disturbance, key = Group("disturbance", self.options.disturbance_rows), Group("key", 2, WORD)
        airframe = Group("airframe", len(PARAMETERS), LANE if self.randomised else UNIFORM)
        settings = Group("settings", len(self.settings(0)), UNIFORM)
        constants = (disturbance, key, airframe, settings)
        observation = Group("observation", OBSERVATION_ROWS, differentiable=True)
        reward, executed = Group("reward", 1, differentiable=True), Group("executed", 1)
        return (
            Program("begin", (key, airframe, settings), (state, disturbance), self._begin),
            Program("observe", (state, record, *constants), (observation,), self._observe),
            Program(
                "step", (state, record, action, *constants), (state, record, observation, reward, executed), self._step
            ),
        )

    def settings(self, step_limit: int) -> list[float]:
        """Rows of the group "settings"."""
        return [float(step_limit), *(getattr(self.mdp, field.name) for field in fields(self.mdp))]

    def _task(self, settings: Rows) -> Mdp:
        """The task with the kernel's inputs in place of its numbers."""
        names = [field.name for field in fields(self.mdp)]
        return replace(self.mdp, **dict(zip(names, settings[1:], strict=True)))

    def _begin(self, key: Rows, airframe: Rows, settings: Rows) -> Mapping[str, Rows]:
        mdp, frame = self._task(settings), dynamics.parameters(airframe)
        body = mdp.initial(key, frame)
        hover = hover_speed(frame)
        commands = [2.0 * (excess + hover) - 1.0 for excess in body[-4:]]  # at which the rotors turn like that
        return {"state": body + commands * self.options.past_actions, "disturbance": mdp.disturbance(key, frame)}

    def _observe(
        self, state: Rows, record: Rows, disturbance: Rows, key: Rows, airframe: Rows, settings: Rows
    ) -> Mapping[str, Rows]:
        frame = dynamics.parameters(airframe)
        return {"observation": self._seen(self._task(settings), frame, state, record[0], disturbance, key)}

    def _seen(self, mdp: Mdp, frame: Airframe, state: Rows, steps: Value, disturbance: Rows, key: Rows) -> Rows:
        body = Body.of(state)
        physical = mdp.observe(body, key if self.noise else None, steps)
        previous = state[dynamics.BODY_ROWS : dynamics.BODY_ROWS + 4]
        speed = [excess + hover_speed(frame) for excess in body.rotor_speed]
        return [*physical, *previous, *disturbance[:6], *speed]

    def _step(
        self, state: Rows, record: Rows, action: Rows, disturbance: Rows, key: Rows, airframe: Rows, settings: Rows
    ) -> Mapping[str, Rows]:
        mdp, frame, limit = self._task(settings), dynamics.parameters(airframe), settings[0]
        steps, terminated, truncated, error = record
        frozen = terminated + truncated > 0.5
        moved = dynamics.step(state, action, disturbance, frame, self.options)
        body = Body.of(moved)
        count = steps + 1.0
        left, over = mdp.terminated(body), count >= limit
        reward = mdp.reward(body, action, state[dynamics.BODY_ROWS : dynamics.BODY_ROWS + 4], frame)
        recent = where(count > limit - float(ERROR_STEPS), mdp.error(body), 0.0)
        after = [
            *(count, where(left, 1.0, 0.0), where(left, 0.0, where(over, 1.0, 0.0))),
            error + recent,
        ]
        state = [where(frozen, old, new) for old, new in zip(state, moved, strict=True)]
        record = [where(frozen, old, new) for old, new in zip(record, after, strict=True)]
        return {
            "state": state,
            "record": record,
            "observation": self._seen(mdp, frame, state, record[0], disturbance, key),
            "reward": [where(frozen, 0.0, reward)],
            "executed": [where(frozen, 0.0, 1.0)],
        }
