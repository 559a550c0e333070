"""A robot with a person as an `Environment` of one world: interventions, judged episodes, faults, resets.

Actions go through `Safety`, the only caller of `Robot.write`, once per control period. A transition has the actions
that were really written, by the policy or the person, as safety has limited them; a period in which the robot holds is
no step. Where a robot's commands are translated (`Station.translate`) the stored action is the one before translation.

A person takes over at any step of a chunk. When they hand back, the chunk is cut there: the rest of it was decided from
an old observation. A fault (no, old or invalid measurements, the robot's refusal or failure, a person's stop, a device
that is gone) holds the robot and truncates the episode; the next one begins once robot and person are ready again.

Under a delay of the contract (`embodied.environments.delay`) the last d actions of a chunk run in a thread between two
steps, while the policy computes the next chunk: it may change its weights meanwhile, but not these actions. Where a
person acts or hands back they are dropped, and the next chunk begins after d commands of zero.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
from tensordict import TensorDict

from embodied.contract import ACTION_PREFIX, Contract
from embodied.environment import Help, Transition
from embodied.errors import UserError
from embodied.runtime.interrupt import STOPPING
from real_robot.learning.ahead import Ahead, Steps
from real_robot.learning.consent import Consent
from real_robot.learning.control import Control, StopRequestedError
from real_robot.learning.homing import Homing
from real_robot.learning.judging import Judge, Judging
from real_robot.robots.robot import Array, Reading
from real_robot.robots.teleoperation import FIRST_READING_S
from real_robot.safety.consistency import START_READINGS
from real_robot.safety.safety import State

log = logging.getLogger(__name__)
RETRY_S = 1.0
"""Pause, s, before robot and person are tried again after a fault."""


@dataclass(frozen=True)
class Rules:
    """Rules by which episodes begin and end.

    An episode ends as a success or a failure by a person's buttons, as a success by the `judge`, without one by that of
    a simulated robot's task, and is truncated after `step_limit` control steps. With `waits` it begins when the person
    presses a button, after `homing`.
    """

    step_limit: int
    judge: Judge | None = None
    waits: bool = True
    homing: Homing = field(default_factory=Homing)


class SceneResets(Protocol):
    """Brings the scene back to a start between episodes, without a person; see `resetting.PolicyResets`."""

    task_steps: int
    """Control steps of episodes of the task so far."""

    def bring_back(self, training: bool) -> bool:
        """Bring the scene back; returns False where a person has to do it."""
        ...


class _FaultError(Exception):
    """Raised when the robot cannot be moved home: the message is the reason."""


class _NoConsentError(Exception):
    """Raised when the robot may not be prepared for an episode: the message is the reason."""


class RobotEnvironment:
    """The robot that `control` drives as an Environment with N = 1, whose chunks have the size of `contract`.

    The reward is 1 at the step at which the task is solved, else 0. Signals: "human" marks a person's actions,
    "takeovers" the first of each sequence of them, "limited" those that safety has changed. Events: "fault", and
    "stopped" by the person. In the split "eval" an episode in which a person takes over has failed.

    Args:
        control: drives the robot.
        contract: contract of the policy.
        task: name of the task, and its instruction.
        rules: how episodes begin and end.
        begins: called when an episode begins, with whether the policy trains in it; with False before it is prepared.
        resets: brings the scene back between episodes, for which a person is asked only where it fails; None: a person
            puts it back, if the rules wait for them.
        help: the scripted person, whose budget a resumed run goes on with; None: nobody has a budget.
        waits: whether the robot's time stands still between two steps, as a simulator's, so that no thread is needed.
        close: releases the robot.

    Raises:
        UserError: if the contract differs from the robot's.
    """

    real_time = True
    num_envs = 1

    def __init__(
        self,
        control: Control,
        contract: Contract,
        task: tuple[str, str],
        rules: Rules,
        *,
        begins: Callable[[bool], None] = lambda training: None,
        resets: SceneResets | None = None,
        help: Help | None = None,
        waits: bool = False,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        specs = {key: spec for key, spec in contract.observation.items() if not spec.privileged}
        self.contract = replace(contract, observation=specs)
        own = control.station.contract
        self.contract.check(replace(own, horizon=contract.horizon, executed=contract.executed).delayed(contract.delay))
        self.device = torch.device("cpu")
        self.task_names, self.instructions = (task[0],), (task[1],)
        self.task_index = torch.zeros(1, dtype=torch.int64)
        self.control = control
        self.rules = rules
        self.consent = Consent()
        """Asked before every episode, in every control period of homing, and before every step."""
        self.scene_resets = resets
        self.scripted_help = help
        self._begins = begins
        self._close = close
        self._training = True
        self._left_s = -math.inf  # time of the end of the last step
        self._reading: Reading | None = None  # newest valid one
        self._ready = False  # whether robot and person have once been ready
        self._asks = False  # whether a person puts the scene back before this episode
        self._judging = Judging(rules.judge)
        self._clear()
        self._ended = True
        self._waits = waits
        self._ahead = Ahead()
        self._steps_ahead = Steps()  # of the next transition, so far

    def reset(self, mask: torch.Tensor | None = None) -> TensorDict:
        """Begin an episode once robot and person are ready; see `Environment.reset`.

        Without an episode to begin, the robot is measured again if time has passed since the last step. Under a delay
        that is more than its last actions take, after which the next chunk begins at once, as after commands of zero.

        Raises:
            UserError: if they are not at the beginning of the run, or it is stopped then; later this waits for them.
        """
        if mask is None or bool(mask[0]):
            with self._held_after_error():
                self._abandon()
                self._asks = self._needs_person()
                self._clear()
                self._begin()
        elif self.control.station.clock() - self._left_s <= (1 + self.contract.delay) * self.control.period_s:
            return self._observation
        else:
            self._ahead.wait()
            self._prefix = np.zeros_like(self._prefix)
            reading, fault = self.control.measure()
            self._reading = self._reading if fault else reading  # the next step ends the episode by the fault
        return self._observed()

    def step(self, actions: torch.Tensor) -> Transition:
        """Execute the chunk `actions` [1, K, A], under a delay after the one before; see `Environment.step`."""
        chunk = actions[0].detach().cpu().double().numpy()
        decided = np.concatenate((self._prefix, chunk))
        with self._held_after_error():
            self._ahead.wait()
            steps, self._steps_ahead = self._steps_ahead, Steps()
            if not self._ended and not steps.cut:
                self._execute(decided[len(steps.actions) : len(chunk)], steps)
        # what was decided before a person acted is not executed
        following = decided[len(steps.actions) :][: self.contract.delay]
        self._prefix = np.zeros_like(following) if steps.cut or self._human else following
        if self.scene_resets:
            self.scene_resets.task_steps += len(steps.actions)
        self._left_s = self.control.station.clock()
        transition = self._transition(chunk, steps)
        if self.contract.delay and not self._waits and not self._ended:
            self._ahead.start(self._go_on)
        return transition

    def switch(self, distribution: str, split: str) -> None:
        """See `SwitchableEnvironment`: the scene is the same, but in "eval" the policy has to act alone."""
        self._abandon()
        self._training = split != "eval"

    @property
    def human(self) -> bool:
        """Whether the person drives the robot in a running episode."""
        return self._human and not self._ended

    def hold(self, reason: str) -> None:
        """Hold the robot in a running episode, which the next step goes on with."""
        self._ahead.wait()
        if not self._ended:
            self.control.settle(reason)

    def close(self) -> None:
        """Hold the robot, and release it and the person's device."""
        try:
            self._ahead.wait()
        finally:
            self.control.close()
            self._close()

    def _abandon(self) -> None:
        """Hold the robot if an episode runs, which nobody goes on with."""
        self._ahead.wait()
        if not self._ended:
            self._ended = True
            self.control.settle("the episode was abandoned")

    def _clear(self) -> None:
        """Forget the last episode."""
        self._steps = 0
        self._steps_ahead = Steps()
        self._prefix = np.zeros((self.contract.delay, *self.contract.action.shape))
        self._judging.begin()
        self._human = False  # whether a person has acted last
        self.control.pressed = frozenset()
        self._terminated = self._truncated = self._success = False
        self._events = {"fault": False, "stopped": False}
        self._ended = False

    # Beginning.

    def _needs_person(self) -> bool:
        """Bring the scene back, or return True where a person has to."""
        if self.scene_resets is None or not self._ready:  # who starts the run also prepares the first scene
            return self.rules.waits
        return not self.scene_resets.bring_back(self._training)

    def _begin(self) -> None:
        """Prepare robot and person, again and again after faults, until a stop of the run is requested."""
        problem = ""
        while True:
            try:
                self._prepare()
                self._ready = True
                return
            except StopRequestedError:
                self.control.settle("a stop of the run was requested")
                self._ended = True
                if self._reading is None:  # no step was taken
                    raise UserError("the run was stopped before the robot measured") from None
                return
            except (UserError, OSError, _FaultError, _NoConsentError) as error:
                if not self._ready and not isinstance(error, _NoConsentError):
                    raise UserError(str(error)) from error
                if str(error) != problem:
                    problem = str(error)
                    log.warning(f"waiting for robot and person: {problem}")
                self.control.fault = self.control.fault or problem
                self.control.settle(problem)
                with suppress(StopRequestedError):  # the next attempt notices it
                    self.control.pause(RETRY_S)

    def _prepare(self) -> None:
        """Bring the robot to the beginning of an episode."""
        control = self.control
        self._check_consent()
        self._begins(False)  # a scripted person does not help any more, least of all on the way home
        control.reopen_if_lost()
        if control.safety.state is State.STOPPED:  # also where it was stopped between two episodes
            self.control.fault = self.control.fault or control.safety.reason
        if self.control.fault:
            self._ask(f"the robot stopped ({self.control.fault})")
        control.station.begin()
        self._await_measurements()
        control.safety.reset()
        if self.rules.homing.waypoints:
            if not self._ready:
                self._ask("the robot will move home")
                self._await_measurements()  # those from before the wait are old
            self._home()
        if self._asks:
            self._ask("put the scene back")
            control.station.put_back()
        self._await_measurements()  # the first decision is from where the robot is now
        self._check_consent()
        self.control.fault = ""
        control.restart()
        self._begins(self._training)

    def _check_consent(self) -> None:
        """Check that the robot may move now, which it may not have to begin with, or not any more after a wait.

        Raises:
            _NoConsentError: if something beside the robot and the person does not consent.
            StopRequestedError: if a stop of the run is requested.
        """
        if STOPPING.is_set():
            raise StopRequestedError
        if reason := self.consent.begin():
            raise _NoConsentError(reason)

    def _ask(self, why: str) -> None:
        """Wait for the person's key, see `Control.wait_for_person`, and check consent, which may be lost meanwhile."""
        self.control.wait_for_person(why)
        self._check_consent()

    def _await_measurements(self) -> None:
        """Wait for valid measurements from which a motion may start: after a fault for `recovery_s` at least.

        Raises:
            UserError: without them, or without a subscriber of commands.
        """
        period_s = self.control.period_s
        recovery = math.ceil(self.control.safety.limits.recovery_s / period_s)
        needed = max(START_READINGS, recovery) if self.control.fault else 1
        good = 0
        fault = ""
        for _ in range(math.ceil(FIRST_READING_S / period_s) + needed):
            reading, fault = self.control.measure()
            good = 0 if fault else good + 1
            if reading is not None and not fault:
                self._reading = reading
                fault = "" if self.control.station.has_subscriber() else "nobody listens to its commands"
                if good >= needed and not fault and self.control.safety.settled:
                    return
            self.control.pause(period_s)
        raise UserError(
            f"the robot was not ready in {FIRST_READING_S:g} s: {fault or 'measurements fail or contradict each other'}"
        )

    def _home(self) -> None:
        """Move the robot home."""
        control = self.control
        control.restart()
        for waypoint, periods in self.rules.homing.commands(control.period_s):
            for _ in range(periods):
                self._check_consent()
                control.decide(waypoint)
                verdict = control.tick(self.consent.begin)
                if verdict.action is None:
                    self._check_consent()  # lost before the command was due
                    raise _FaultError(verdict.reason)
                control.wait()
        control.settle("the robot is home")

    # Steps.

    def _go_on(self) -> None:
        """Execute the last actions of a chunk, up to the next transition's K."""
        with self._held_after_error():
            self._execute(self._prefix[: self.contract.executed], self._steps_ahead)

    @contextmanager
    def _held_after_error(self) -> Iterator[None]:
        """Hold the robot after an error, also where the run is interrupted."""
        try:
            yield
        except BaseException:
            self.control.settle("the program was interrupted")
            self._ended = True
            raise

    def _execute(self, chunk: Array, steps: Steps) -> None:
        """Execute `chunk` [K, A] until it or the episode ends, or until the person hands back."""
        control = self.control
        for proposed in chunk:
            if STOPPING.is_set():
                return self._end(truncated=True)
            control.decide(proposed)
            if not self._steps:  # a press from before the first action judges no step of this episode
                control.pressed = frozenset()
            if control.human and not self._training:
                self.control.fault = "a person took over"  # a stick that is still held fails no other episode
                log.info("a person took over: the evaluated episode has failed")
                return self._end(truncated=True)
            if steps.actions and self._human and not control.human and control.safety.state is not State.STOPPED:
                self._human = False  # handed back: the next decision is from the present observation
                steps.cut = True
                return None
            if reason := self.consent.act(control.human):
                return self._fault(reason)
            self._step(steps)
            if self._ended:
                return None
        return None

    def _step(self, steps: Steps) -> None:
        """Take one control step, and judge what it led to."""
        control = self.control
        verdict = control.tick(self._refusal)
        if verdict.state is not State.ACTIVE or verdict.action is None:
            return self._fault(verdict.reason)
        steps.actions.append(control.executed(verdict))
        steps.limited.append(verdict.limited)
        steps.human.append(control.human)
        steps.takeovers.append(control.human and not self._human)
        self._human = control.human
        self._steps += 1
        control.wait()
        steps.solved = self._judge()
        return None

    def _refusal(self) -> str:
        """Reason why the decided action may not be written after a wait, in which the person may have taken over."""
        taken_over = self.control.human and not self._training
        return "a person took over" if taken_over else self.consent.act(self.control.human)

    def _judge(self) -> bool:
        """End the episode if it is over; returns whether the task is solved."""
        reading, fault = self.control.measure()
        self._reading = self._reading if fault else reading
        assert self._reading is not None
        pressed, self.control.pressed = self.control.pressed, frozenset()
        over = self._outcome()
        failed = "failure" in pressed
        solved = "success" in pressed or (not fault and self._judging.solved(self._reading))
        if not failed and (solved or (over is True and self.rules.judge is None)):
            self._end(terminated=True, success=True)
            return True
        if fault and not failed:
            self._fault(fault)
        elif failed or (over is False and not self.control.station.out_of_time()):
            self._end(terminated=True)
        elif over is not None or self._steps >= self.rules.step_limit:
            self._end(truncated=True)
        return False

    def _outcome(self) -> bool | None:
        """Outcome of an episode that has ended by itself, see `Station.over`."""
        return self.control.station.over()

    # Ends.

    def _fault(self, reason: str) -> None:
        """End the episode because the robot or the person has stopped it."""
        self.control.fault = reason or "no reason"
        self._events = {"fault": True, "stopped": self.control.stopped_by_person}
        log.warning(f"the episode ends after {self._steps} steps: {self.control.fault}")
        self._end(truncated=True)

    def _end(self, *, terminated: bool = False, truncated: bool = False, success: bool = False) -> None:
        """End the episode; the robot holds."""
        self._terminated, self._truncated, self._success = terminated, truncated, success
        self._ended = True
        self.control.settle(self.control.fault or "the episode is over")

    # Tensors.

    def _observed(self) -> TensorDict:
        """The newest valid measurement, [1], with the action prefix."""
        assert self._reading is not None, "expected a reset before the first step"
        arrays = self._reading.observation
        tensors = {
            key: torch.from_numpy(np.array(arrays[key])).to(getattr(torch, spec.dtype)).unsqueeze(0)
            for key, spec in self.contract.delayed(0).observation.items()
        }
        if self.contract.delay:
            tensors[ACTION_PREFIX] = torch.from_numpy(self._prefix).float().unsqueeze(0)
        self._observation = TensorDict(tensors, batch_size=[1])
        return self._observation

    def _transition(self, chunk: Array, steps: Steps) -> Transition:
        count = len(chunk)
        taken = len(steps.actions)
        # what was not executed repeats the last executed action, as in chunks of recorded episodes
        rows = [*steps.actions, *([steps.actions[-1]] * (count - taken))] if taken else list(chunk)
        if (delay := self.contract.delay) and taken:
            # those of this chunk; the last ones have yet to be executed, unless they were dropped
            dropped = taken < count or self._human
            rows = [*rows[delay:], *([rows[-1]] * count if dropped else chunk)[-min(delay, count) :]]
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
