"""A robot as an Environment with N = 1, so that simulation's learners also work on it, with human intervention.

Letters in shape comments: K executed actions of a chunk, A action dimension.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.engine import EpisodeEngine, Outcome
from embodied.environment import Transition
from embodied.errors import UserError
from real_robot.robots.intervention import Operator
from real_robot.robots.robot import Clock, Reading, Robot
from real_robot.safety.safety import Safety, State

FIRST_READING_S = 5.0


class RobotEnvironment(EpisodeEngine):
    """N = 1, and a person puts it into initial states; nothing can put it back to where it was in the middle of one.

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
        if executed < 1:
            raise UserError(f"expected executed of at least 1, got {executed}")
        contract = replace(robot.contract, horizon=executed, executed=executed)
        super().__init__(contract, 1, step_limit, task_names=(task,))
        self._robot, self._safety, self._operator = robot, safety, operator
        self._ready, self._outcome, self._clock, self._sleep = ready, outcome, clock, sleep
        self._period_s = robot.contract.control_dt_s
        self._specs = {key: spec for key, spec in robot.contract.observation.items() if not spec.privileged}
        self._reading: Reading | None = None
        self._deadline = -math.inf
        self._human_steps = self._periods = 0  # of the episode

    def next_starts(self, ids: Tensor) -> Tensor:
        """Starts in order."""
        return self.start[ids] + 1

    def begin(self, ids: Tensor, starts: Tensor) -> None:
        """Hold, and wait until `ready` returns.

        Raises:
            UserError: if the robot gives no measurement.
        """
        self._safety.settle("between episodes", self._sleep)
        self._ready(self.task_names[0], int(starts[0]))
        if self._safety.state is State.STOPPED:
            self._safety.reset()
        self._human_steps = self._periods = 0
        self._reading = first_reading(self._robot, self._clock, self._sleep)

    def step(self, actions: Tensor) -> Transition:
        """Step as every engine does, at the control rate; the robot holds if `actions` are refused."""
        try:
            return super().step(actions)
        except ValueError:
            self._safety.settle("actions that were refused", self._sleep)
            raise

    def advance(self, actions: Tensor, left: Tensor) -> Outcome:
        """Command the remaining actions until the episode ends."""
        taken = actions.detach().float().clone()
        executed, human, reward = (torch.zeros(taken.shape[:2], dtype=kind) for kind in (bool, bool, torch.float32))
        ended: bool | None = None  # as what the episode has: True with an outcome, False as stopped
        success = False
        for k in range(int(left[0])):
            human[0, k], outcome, stopped = self._period(taken[0, k])
            executed[0, k], success = True, bool(outcome)
            reward[0, k] = float(success)
            ended = True if outcome is not None else False if stopped else None
            if ended is not None:
                break
        if ended is not None or self._periods >= self.step_limit:
            self._safety.settle("the episode is over", self._sleep)
        share = torch.tensor([self._human_steps / max(self._periods, 1)])
        return Outcome(
            reward, executed, torch.tensor([bool(ended)]), torch.tensor([success]), torch.tensor([ended is False]),
            metrics={"human_share": share}, actions=taken, human=human,
        )  # fmt: skip

    def observe(self) -> TensorDict:
        """The newest valid measurement.

        Raises:
            ValueError: before the first reset.
        """
        if self._reading is None:
            raise ValueError("expected a reset of the robot before the first observation of it")
        arrays = {key: torch.from_numpy(np.array(self._reading.observation[key])) for key in self._specs}
        tensors = {key: value.to(getattr(torch, self._specs[key].dtype)).unsqueeze(0) for key, value in arrays.items()}
        return TensorDict(tensors, batch_size=[1])

    def _period(self, action: Tensor) -> tuple[bool, bool | None, bool]:
        """Command `action` [A], replaced by a person's action when they take over.

        Returns whether they did, the outcome, and whether safety has stopped the robot.
        """
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
        self._periods += 1
        self._human_steps += human is not None
        return human is not None, self._outcome(self._reading, pressed), verdict.state is State.STOPPED

    def _wait(self, began_s: float) -> None:
        """Wait until the period is over; after a late period timing restarts instead of catching up."""
        if began_s > self._deadline + 0.5 * self._period_s:
            self._deadline = began_s
        self._deadline += self._period_s
        remaining = self._deadline - self._clock()
        if remaining > 1e-9:  # simulated time has passed already
            self._sleep(remaining)


def first_reading(robot: Robot, clock: Clock, sleep: Callable[[float], None]) -> Reading:
    """The first valid measurement of `robot`.

    Raises:
        UserError: if there is none in `FIRST_READING_S`.
    """
    deadline = clock() + FIRST_READING_S
    while (reading := robot.read()) is None or reading.fault:
        if clock() > deadline:
            fault = reading.fault if reading else "is its driver running?"
            raise UserError(f"the robot gave no valid measurement in {FIRST_READING_S:g} s: {fault}")
        sleep(robot.contract.control_dt_s)
    return reading


def buttons(reading: Reading, pressed: frozenset[str]) -> bool | None:
    """The outcome by a person's buttons: "success" (True), "failure" (False), or neither."""
    return True if "success" in pressed else False if "failure" in pressed else None
