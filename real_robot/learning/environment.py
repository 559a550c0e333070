"""A robot with a person as an `Environment` of one world: interventions, judged episodes, faults, resets.

Actions go through `Safety`, the only caller of `Robot.write`, once per control period. A transition has the actions that
were really written, by the policy or the person, as safety has limited them; a period in which the robot holds is no
step. Where a robot's commands are translated (`Station.translate`) the stored action is the one before translation.

A person takes over at any step of a chunk. When they hand back, the chunk is cut there: the rest of it was decided from an
old observation. A fault (no, old or invalid measurements, the robot's refusal or failure, a person's stop, a device that
is gone) holds the robot and truncates the episode; the next one begins once robot and person are ready again.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from tensordict import TensorDict

from embodied.contract import Contract
from embodied.environment import Transition
from embodied.errors import UserError
from embodied.interrupt import STOPPING
from real_robot.learning.homing import Homing
from real_robot.robots.control_loop import Controller
from real_robot.robots.intervention import Person
from real_robot.robots.robot import Array, Clock, Reading
from real_robot.robots.teleoperation import FIRST_READING_S, Driver, Station
from real_robot.safety.consistency import START_READINGS
from real_robot.safety.safety import EARLY, UNSETTLED, Safety, State, Verdict

log = logging.getLogger(__name__)
Success = Callable[[dict[str, Array]], float]
"""Probability, 0 to 1, that the task is solved where a robot measures these observations (arrays by key)."""
RETRY_S = 1.0
"""Pause, s, before robot and person are tried again after a fault."""
SLACK_S = 1e-6


@dataclass(frozen=True)
class Rules:
    """Rules by which episodes begin and end.

    An episode ends as a success or a failure by a person's buttons, as a success where `success` exceeds `threshold`
    (HIL-SERL, arXiv 2410.21845, has 0.85), and is truncated after `step_limit` control steps. With `waits` it begins
    when the person presses a button, after `homing`.
    """

    step_limit: int
    success: Success | None = None
    threshold: float = 0.85
    waits: bool = True
    homing: Homing = field(default_factory=Homing)


class _FaultError(Exception):
    """Raised when the robot cannot be moved: the message is the reason."""


class _StopRequestedError(Exception):
    """Raised while waiting, when a stop of the run is requested."""


class _Latest:
    """An executor of the action that `driver` has decided on."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver

    def reset(self) -> None:
        """No-op."""

    def observe(self, reading: Reading) -> None:
        """No-op: a chunk does not depend on later measurements."""

    def action(self, now_s: float) -> Array | None:
        """The decided action [A]."""
        return self.driver.proposed_action


class _Next:
    """An executor of the chunk's next action, which the environment sets."""

    next: Array | None = None

    def reset(self) -> None:
        """No-op."""

    def observe(self, reading: Reading) -> None:
        """No-op."""

    def action(self, now_s: float) -> Array | None:
        """The next action [A]."""
        return self.next


@dataclass
class _Steps:
    """Control steps of one chunk [K], as they were executed."""

    actions: list[Array] = field(default_factory=list)
    human: list[bool] = field(default_factory=list)
    takeovers: list[bool] = field(default_factory=list)
    limited: list[bool] = field(default_factory=list)
    solved: bool = False  # by the last of them


class RobotEnvironment:
    """The robot at `station` as an Environment with N = 1, whose chunks have the size of `contract`.

    The reward is 1 at the step at which the task is solved, else 0. Signals: "human" marks a person's actions,
    "takeovers" the first of each sequence of them, "limited" those that safety has changed. Events: "fault", and
    "stopped" by the person. In the split "eval" an episode in which a person takes over has failed.

    Args:
        station: the robot, its clock, and how an episode begins.
        safety: safety of the station's robot; it only writes.
        contract: contract of the policy.
        task: name of the task, and its instruction.
        rules: how episodes begin and end.
        open_person: opens the person's device; called again after it was lost. None: nobody is there.
        begins: called when an episode begins, with whether the policy trains in it.
        pace: clock by which control periods pass; None: the station's. Its `sleep` waits for them.
        close: releases the robot.

    Raises:
        UserError: if the contract differs from the station's.
    """

    real_time = True
    num_envs = 1

    def __init__(
        self,
        station: Station,
        safety: Safety,
        contract: Contract,
        task: tuple[str, str],
        rules: Rules,
        open_person: Callable[[], Person] | None = None,
        *,
        begins: Callable[[bool], None] = lambda training: None,
        pace: Clock | None = None,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        specs = {key: spec for key, spec in contract.observation.items() if not spec.privileged}
        self.contract = replace(contract, observation=specs)
        self.contract.check(replace(station.contract, horizon=contract.horizon, executed=contract.executed))
        self.device = torch.device("cpu")
        self.task_names, self.instructions = (task[0],), (task[1],)
        self.task_index = torch.zeros(1, dtype=torch.int64)
        self.rules = rules
        self._station = station
        self._safety = safety
        self._open_person = open_person
        self._begins = begins
        self._pace = pace or station.clock
        self._close = close
        self._period_s = contract.control_dt_s
        self._translated = station.contract.action != station.robot.contract.action
        self._chunk = _Next()
        self._meet(open_person() if open_person else _Nobody())
        self._training = True
        self._reading: Reading | None = None  # newest valid one
        self._deadline = -math.inf  # end of the running control period, s
        self._ready = False  # whether robot and person have once been ready
        self._reason = ""  # of the last fault, which the next episode waits for
        self._clear()
        self._ended = True

    def reset(self, mask: torch.Tensor | None = None) -> TensorDict:
        """Begin an episode once robot and person are ready; see `Environment.reset`.

        Raises:
            UserError: if they are not at the beginning of the run; later this waits for them.
        """
        if mask is None or bool(mask[0]):
            self._clear()
            try:
                self._begin()
            except BaseException:  # also where the run is interrupted
                self._settle("the program was interrupted")
                raise
        return self._observed()

    def step(self, actions: torch.Tensor) -> Transition:
        """Execute the chunk `actions` [1, K, A]; see `Environment.step`."""
        chunk = actions[0].detach().cpu().double().numpy()
        steps = _Steps()
        try:
            if not self._ended:
                self._execute(chunk, steps)
        except BaseException:  # also where the run is interrupted
            self._settle("the program was interrupted")
            self._ended = True
            raise
        return self._transition(chunk, steps)

    def switch(self, distribution: str, split: str) -> None:
        """See `SwitchableEnvironment`: the scene is the same, but in "eval" the policy has to act alone."""
        self._training = split != "eval"
        self._ended = True

    def close(self) -> None:
        """Hold the robot, and release it and the person's device."""
        self._settle("the run has ended")
        with suppress(OSError):
            self._driver.person.close()
        self._close()

    def _meet(self, person: Person) -> None:
        """Let `person` drive."""
        self._driver = Driver(person, self._chunk, self._safety.trip)
        executor = self._station.translate(_Latest(self._driver))
        self._controller = Controller(self._station.robot, executor, self._safety, self._station.clock)

    def _clear(self) -> None:
        """Forget the last episode."""
        self._steps = 0
        self._human = False  # whether a person has acted last
        self._pressed: frozenset[str] = frozenset()
        self._terminated = self._truncated = self._success = False
        self._events = {"fault": False, "stopped": False}
        self._ended = False

    # Beginning.

    def _begin(self) -> None:
        """Prepare robot and person, again and again after faults, until a stop of the run is requested."""
        problem = ""
        while True:
            try:
                self._prepare()
                self._ready = True
                return
            except _StopRequestedError:
                self._ended = True
                return
            except (UserError, OSError, _FaultError) as error:
                if not self._ready:
                    raise UserError(str(error)) from error
                if str(error) != problem:
                    problem = str(error)
                    log.warning(f"waiting for robot and person: {problem}")
                self._reason = self._reason or problem
                self._settle(problem)
                self._sleep_unless_stopped(RETRY_S)

    def _sleep_unless_stopped(self, seconds: float) -> None:
        with suppress(_StopRequestedError):  # the next attempt notices it
            self._pause(seconds)

    def _prepare(self) -> None:
        """Bring the robot to the beginning of an episode."""
        if STOPPING.is_set():
            raise _StopRequestedError
        if self._driver.lost and self._open_person:
            with suppress(OSError):
                self._driver.person.close()
            self._meet(self._open_person())
        if self._reason:
            self._wait_for_person(f"the robot stopped ({self._reason})")
        self._station.begin()
        self._await_measurements()
        self._safety.reset()
        if self.rules.homing.waypoints:
            if not self._ready:
                self._wait_for_person("the robot will move home")
            self._home()
        if self.rules.waits:
            self._wait_for_person("put the scene back")
            self._await_measurements()
        self._reason = ""
        self._deadline = -math.inf
        self._driver.reset()
        self._begins(self._training)

    def _wait_for_person(self, why: str) -> None:
        if not self._open_person:
            return
        log.info(f"{why}: success or go continues")
        try:
            self._driver.person.wait_for("success", "go", sleep=self._pause)
        except OSError as error:
            self._driver.lost = error
            raise

    def _pause(self, seconds: float) -> None:
        """Sleep, or end the waiting if a stop of the run is requested."""
        if STOPPING.is_set():
            raise _StopRequestedError
        self._station.sleep(seconds)

    def _await_measurements(self) -> None:
        """Wait for valid measurements: after a fault as many in a row as `recovery_s` asks for.

        Raises:
            UserError: without them, or without a subscriber of commands.
        """
        recovery = math.ceil(self._safety.limits.recovery_s / self._period_s)
        needed = max(START_READINGS, recovery) if self._reason else 1
        good = 0
        fault = ""
        for _ in range(math.ceil(FIRST_READING_S / self._period_s) + needed):
            reading = self._station.robot.read()
            fault = self._fault_of(reading)
            good = 0 if fault else good + 1
            if reading is not None and not fault:
                self._reading = reading
                self._safety.observe(reading)
                fault = "" if self._station.has_subscriber() else "nobody listens to its commands"
                if good >= needed and not fault:
                    return
            self._pause(self._period_s)
        raise UserError(f"the robot was not ready in {FIRST_READING_S:g} s: {fault or 'measurements fail now and then'}")

    def _home(self) -> None:
        """Move the robot home."""
        for waypoint, periods in self.rules.homing.commands(self._period_s):
            self._chunk.next = waypoint
            for _ in range(periods):
                if STOPPING.is_set():
                    raise _StopRequestedError
                self._decide()
                verdict = self._tick()
                if verdict.action is None:
                    raise _FaultError(verdict.reason)
                self._wait()
        self._settle("the robot is home")

    # Steps.

    def _execute(self, chunk: Array, steps: _Steps) -> None:
        """Execute `chunk` [K, A] until it or the episode ends, or until the person hands back."""
        for index, self._chunk.next in enumerate(chunk):
            if STOPPING.is_set():
                return self._end(truncated=True)
            self._decide()
            human = self._driver.human
            if human and not self._training:
                log.info("a person took over: the evaluated episode has failed")
                return self._end(truncated=True)
            if index and self._human and not human and self._safety.state is not State.STOPPED:
                self._human = False  # handed back: the next decision is from the present observation
                return None
            self._step(steps, human)
            if self._ended:
                return None
        return None

    def _decide(self) -> None:
        """Ask the person, whose action replaces the chunk's, and note their buttons."""
        self._driver.action(self._station.clock())
        self._pressed |= self._driver.person.pressed if self._driver.lost is None else frozenset()

    def _step(self, steps: _Steps, human: bool) -> None:
        """Take one control step, and judge what it led to."""
        verdict = self._tick()
        if verdict.state is not State.ACTIVE or verdict.action is None:
            return self._fault(verdict.reason)
        proposed = self._driver.proposed_action
        assert proposed is not None
        steps.actions.append(proposed if self._translated else verdict.action)
        steps.limited.append(verdict.limited)
        steps.human.append(human)
        steps.takeovers.append(human and not self._human)
        self._human = human
        self._steps += 1
        self._wait()
        steps.solved = self._judge()
        return None

    def _tick(self) -> Verdict:
        """Let safety write the decided action, in a later period if it is not due yet."""
        for _ in range(math.ceil(FIRST_READING_S / self._period_s)):
            self._station.alive()
            began = self._pace()
            try:
                verdict = self._controller.tick()
            except Exception as error:
                if self._safety.state is not State.STOPPED and not isinstance(error, OSError):
                    raise
                verdict = self._failed(error)
            if began - self._deadline > self._period_s:
                self._deadline = began  # the policy or the learner took longer than a period
            self._deadline += self._period_s
            if verdict.action is not None or verdict.reason not in (UNSETTLED, EARLY):
                return verdict
            self._wait()
        return verdict

    def _failed(self, error: Exception) -> Verdict:
        """Stop after an error of the robot's driver."""
        reason = self._safety.reason or f"the robot failed: {error}"
        with suppress(Exception):  # the driver may be gone
            self._safety.trip(reason)
        return Verdict(State.STOPPED, None, reason)

    def _wait(self) -> None:
        """Wait for the end of the control period."""
        while (remaining_s := self._deadline - self._pace()) > SLACK_S and not STOPPING.is_set():
            self._station.sleep(remaining_s)

    def _judge(self) -> bool:
        """End the episode if it is over; returns whether the task is solved."""
        reading = self._newest()
        fault = self._fault_of(reading)
        if not fault:
            self._reading = reading
        over = self._station.over()
        pressed, self._pressed = self._pressed, frozenset()
        solved = "success" in pressed or over is True or (not fault and self._looks_solved())
        if solved and "failure" not in pressed:
            self._end(terminated=True, success=True)
            return True
        if fault:
            self._fault(fault)
        elif "failure" in pressed or (over is False and not self._station.out_of_time()):
            self._end(terminated=True)
        elif over is False or self._steps >= self.rules.step_limit:
            self._end(truncated=True)
        return False

    def _newest(self) -> Reading | None:
        try:
            return self._station.robot.read()
        except OSError as error:
            self._failed(error)
            return None

    def _looks_solved(self) -> bool:
        assert self._reading is not None
        solves = self.rules.success
        return solves is not None and solves(self._reading.observation) >= self.rules.threshold

    def _fault_of(self, reading: Reading | None) -> str:
        """Why the robot cannot go on from `reading`; "" if it can."""
        if reading is None:
            return self._safety.reason or "no measurement"
        age_s = self._station.clock() - reading.stamp_s
        if age_s > self._safety.limits.observation_timeout_s:
            return f"the newest measurement is {age_s:.3g} s old"
        return reading.fault or reading.refusal

    # Ends.

    def _fault(self, reason: str) -> None:
        """End the episode because the robot or the person has stopped it."""
        self._reason = reason or "no reason"
        self._events["fault"] = True
        self._events["stopped"] = "stop" in self._driver.person.pressed and self._driver.lost is None
        log.warning(f"the episode ends after {self._steps} steps: {self._reason}")
        self._end(truncated=True)

    def _end(self, *, terminated: bool = False, truncated: bool = False, success: bool = False) -> None:
        """End the episode; the robot holds."""
        self._terminated, self._truncated, self._success = terminated, truncated, success
        self._ended = True
        self._settle(self._reason or "the episode is over")

    def _settle(self, reason: str) -> None:
        """Let the robot stop; an error of its driver is logged, as there is nothing to be done."""
        try:
            self._safety.settle(reason, self._station.sleep)
        except Exception as error:
            log.warning(f"the robot's driver failed while it was stopped: {error}")

    # Tensors.

    def _observed(self) -> TensorDict:
        """The newest valid measurement, [1]."""
        assert self._reading is not None, "expected a reset before the first step"
        arrays = self._reading.observation
        tensors = {
            key: torch.from_numpy(np.array(arrays[key])).to(getattr(torch, spec.dtype)).unsqueeze(0)
            for key, spec in self.contract.observation.items()
        }
        return TensorDict(tensors, batch_size=[1])

    def _transition(self, chunk: Array, steps: _Steps) -> Transition:
        count = len(chunk)
        taken = len(steps.actions)
        # what was not executed repeats the last executed action, as in chunks of recorded episodes
        rows = [*steps.actions, *([steps.actions[-1]] * (count - taken))] if taken else list(chunk)
        executed = torch.arange(count) < taken
        reward = torch.zeros(1, count)
        if steps.solved:
            reward[0, taken - 1] = 1.0

        def flags(values: list[bool]) -> torch.Tensor:
            return torch.tensor([*values, *([False] * (count - taken))]).unsqueeze(0)

        one = lambda value: torch.tensor([value])  # noqa: E731
        return Transition(
            self._observed(),
            reward,
            executed.unsqueeze(0),
            terminated=one(self._terminated),
            truncated=one(self._truncated),
            success=one(self._success),
            actions=torch.from_numpy(np.stack(rows)).float().unsqueeze(0),
            signals={
                "human": flags(steps.human),
                "takeovers": flags(steps.takeovers).float(),
                "limited": flags(steps.limited).float(),
            },
            events={name: one(happened) for name, happened in self._events.items()},
        )


class _Nobody:
    """No person: nothing is changed, and nothing is waited for."""

    pressed: frozenset[str] = frozenset()

    def action(self, proposed: Array | None) -> Array | None:
        """See `Person.action`."""
        return None

    def wait_for(self, *buttons: str, sleep: Callable[[float], None] = time.sleep) -> str:
        """See `Person.wait_for`: returns at once."""
        return buttons[0]

    def close(self) -> None:
        """No-op."""
