"""A robot as an Environment with N = 1, so that what learns in simulation learns on it too, with a person beside it.

Letters in shape comments: K executed actions of a chunk, A action dimension.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.environment import Transition
from embodied.errors import UserError
from real_robot.intervention import Operator
from real_robot.robot import Clock, Reading, Robot
from real_robot.safety import Safety, State

FIRST_READING_S = 5.0


class RobotEnvironment:
    """Implements `embodied.environment.StartEnvironment` as far as the world can: a person puts it into initial states.

    An episode ends with success or failure when `outcome` says so, and is truncated at the step limit, when the safety
    stops the robot, or when the person's device is gone. Rewards are 1 at success. A policy that is slow between chunks
    needs a `control_loop.Watchdog`, by which the robot holds meanwhile. What a person did instead of the policy is in
    the transition's `actions` and `human`. A measurement that is not finite is not observed: the one before it is.

    Args:
        robot: what moves.
        safety: of that robot; nothing else writes to it.
        ready: called with the task and the number of the initial state; returns once a person, or a script, has set the
            scene up and it is safe to move. It also says that a stopped robot may move again.
        outcome: called after every period with the measurement and the buttons that were pressed; True is success,
            False failure, None that the episode goes on. `buttons` is one.
        operator: the person's controls.
        task: what the robot is to do.
        executed: K, actions of a chunk, all of which are executed.
        step_limit: control periods after which an episode is truncated.
        clock: of the robot.
        sleep: waits, in the time of `clock`.
    """

    num_envs, num_starts = 1, None

    def __init__(
        self,
        robot: Robot,
        safety: Safety,
        *,
        ready: Callable[[str, int], None],
        outcome: Callable[[Reading, frozenset[str]], bool | None],
        operator: Operator | None = None,
        task: str = "task",
        executed: int = 1,
        step_limit: int = 500,
        clock: Clock = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if min(executed, step_limit) < 1:
            raise UserError(f"expected executed and step_limit of at least 1, got {executed} and {step_limit}")
        self.contract = replace(robot.contract, horizon=executed, executed=executed)
        self.device, self.task_names, self.step_limit = torch.device("cpu"), (task,), step_limit
        self.task_index = torch.zeros(1, dtype=torch.int64)
        self.start = torch.full((1,), -1)
        self.steps = torch.zeros(1, dtype=torch.int64)
        self._robot, self._safety, self._operator = robot, safety, operator
        self._ready, self._outcome, self._clock, self._sleep = ready, outcome, clock, sleep
        self._period_s = robot.contract.control_dt_s
        self._specs = {key: spec for key, spec in robot.contract.observation.items() if not spec.privileged}
        self._reading: Reading | None = None
        self._deadline = -math.inf
        self._ended: bool | None = None  # None while running or before the first reset; else whether terminated
        self._success, self._human_steps = False, 0

    def reset(self, mask: Tensor | None = None, seed: int | None = None, starts: Tensor | None = None) -> TensorDict:
        """As `StartEnvironment.reset`; blocks until `ready` returns. `seed` begins to count initial states anew.

        Raises:
            UserError: where the robot does not measure anything.
        """
        if seed is not None:
            self.start = torch.full((1,), -1)
        if mask is None or bool(mask[0]):
            self._robot.hold()
            self.start = self.start + 1 if starts is None else starts.clone()
            self._ready(self.task_names[0], int(self.start[0]))
            if self._safety.state is State.STOPPED:
                self._safety.reset()
            self.steps = torch.zeros(1, dtype=torch.int64)
            self._ended, self._success, self._human_steps = None, False, 0
            self._reading = self._first_reading()
        return self._observation()

    def step(self, actions: Tensor) -> Transition:
        """Execute the chunk `actions` [1, K, A] at the control rate; a finished episode stays frozen.

        Raises:
            ValueError: for another shape or an action that is not finite, and the robot holds; before the first reset.
        """
        K, A = self.contract.executed, self.contract.action.shape[-1]
        if actions.shape != (1, K, A) or not bool(actions.isfinite().all()):
            self._robot.hold()
            raise ValueError(f"expected finite actions {(1, K, A)}, got {tuple(actions.shape)}")
        if self._reading is None:
            raise ValueError("expected reset() before the first step")
        done, human, reward = (torch.zeros(1, K, dtype=kind) for kind in (torch.bool, torch.bool, torch.float32))
        taken = actions.detach().to("cpu", torch.float32).clone()
        for k in range(K):
            if self._ended is not None:
                break
            human[0, k] = self._period(taken[0, k])
            done[0, k], reward[0, k] = True, float(self._success)
        ended = torch.tensor([self._ended is not None])
        terminated = torch.tensor([bool(self._ended)])
        share = torch.tensor([self._human_steps / max(int(self.steps[0]), 1)])
        return Transition(
            self._observation(), reward, done, terminated, ended & ~terminated, torch.tensor([self._success]),
            {"human_share": share}, actions=taken, human=human,
        )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """How many episodes there were: a robot can't be put back to where it was."""
        return {"start": self.start.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> TensorDict:
        """Begin the episode anew that ran when `state_dict` was called."""
        return self.reset(starts=state["start"])

    def _period(self, action: Tensor) -> bool:
        """Command `action` [A], which becomes a person's where they take over; returns whether they did."""
        began_s, human, pressed = self._clock(), None, frozenset[str]()
        try:
            if self._operator is not None:
                human = self._operator.action(action.numpy())
                pressed = self._operator.pressed
        except OSError as error:
            self._safety.trip(f"the person's controls are gone: {error}")
        if "stop" in pressed:
            self._safety.trip("stopped by a person")
        if human is not None:
            action.copy_(torch.from_numpy(human))
        verdict = self._safety.command(action.numpy().astype(np.float64), self._robot.read())
        self._wait(began_s)
        reading = self._robot.read()
        self._reading = reading if reading is not None and not reading.fault else self._reading
        assert self._reading is not None
        self.steps += 1
        self._human_steps += human is not None
        outcome = self._outcome(self._reading, pressed)
        if outcome is not None:
            self._ended, self._success = True, outcome
        elif verdict.state is State.STOPPED or int(self.steps[0]) >= self.step_limit:
            self._ended = False
        if self._ended is not None:
            self._robot.hold()
        return human is not None

    def _wait(self, began_s: float) -> None:
        """Until the period is over; what comes late begins a new rhythm in place of a burst."""
        if began_s > self._deadline + 0.5 * self._period_s:
            self._deadline = began_s
        self._deadline += self._period_s
        remaining = self._deadline - self._clock()
        if remaining > 1e-9:  # simulated time has passed already
            self._sleep(remaining)

    def _first_reading(self) -> Reading:
        deadline = self._clock() + FIRST_READING_S
        while (reading := self._robot.read()) is None or reading.fault:
            if self._clock() > deadline:
                fault = reading.fault if reading else "is its driver running?"
                raise UserError(f"the robot measured nothing that can be used in {FIRST_READING_S:g} s: {fault}")
            self._sleep(self._period_s)
        return reading

    def _observation(self) -> TensorDict:
        if self._reading is None:
            raise ValueError("expected a reset of the robot before the first observation of it")
        arrays = {key: torch.from_numpy(np.array(self._reading.observation[key])) for key in self._specs}
        tensors = {key: value.to(getattr(torch, self._specs[key].dtype)).unsqueeze(0) for key, value in arrays.items()}
        return TensorDict(tensors, batch_size=[1])


def buttons(reading: Reading, pressed: frozenset[str]) -> bool | None:
    """The outcome as a person's buttons tell it: "success", "failure", or neither."""
    return True if "success" in pressed else False if "failure" in pressed else None
