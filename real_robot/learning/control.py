"""Control periods of a robot that a policy and a person drive: decide, let safety write, wait, measure."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress

from embodied.runtime.interrupt import STOPPING
from real_robot.robots.control_loop import Controller
from real_robot.robots.intervention import Person
from real_robot.robots.robot import Array, Clock, Reading
from real_robot.robots.teleoperation import FIRST_READING_S, Driver, Station
from real_robot.safety.safety import EARLY, UNSETTLED, Safety, State, Verdict

log = logging.getLogger(__name__)
SLACK_S = 1e-6


class StopRequestedError(Exception):
    """Raised while waiting, when a stop of the run is requested."""


class Control:
    """Drives the robot at `station`, one control period after another.

    Only `safety` writes. `open_person` opens the person's device, again after it was lost; None: nobody is there.
    Control periods pass by the clock `pace`, None: the station's, while the station's `sleep` waits for them.
    """

    def __init__(
        self, station: Station, safety: Safety, open_person: Callable[[], Person] | None, pace: Clock | None = None
    ) -> None:
        self.station = station
        self.safety = safety
        self.has_person = open_person is not None
        self.period_s = station.contract.control_dt_s
        self.pressed: frozenset[str] = frozenset()
        """Buttons that the person has pressed since this was cleared."""
        self.fault = ""
        """Reason of the last fault, which the next episode waits for."""
        self._open_person = open_person or Nobody
        self._pace = pace or station.steady or station.clock
        self._translated = station.contract.action != station.robot.contract.action
        self._next = _Constant()
        self._meet()
        self.restart()

    @property
    def person(self) -> Person:
        """Who drives the robot when they intervene."""
        return self._driver.person

    @property
    def human(self) -> bool:
        """Whether the decided action is the person's."""
        return self._driver.human

    @property
    def stopped_by_person(self) -> bool:
        """Whether the person presses stop."""
        return self._driver.lost is None and "stop" in self.person.pressed

    def restart(self) -> None:
        """Begin with a control period that no other one precedes."""
        self._deadline = -math.inf

    def decide(self, proposed: Array | None) -> None:
        """Ask the person, whose action replaces the `proposed` one [A], and note their buttons.

        Safety stops the robot if they press stop or if their device is gone.
        """
        self._next.value = proposed
        self._driver.action(self.station.clock())
        if self._driver.lost is None:
            self.pressed |= self.person.pressed

    def tick(self, refusal: Callable[[], str] = lambda: "") -> Verdict:
        """Let safety write the decided action, in a later period if it is not due yet.

        `refusal` returns the reason why nothing may be written after such a wait; "" if it may. After a wait for
        measurements, which may be long, the person is asked again, too.
        """
        for _ in range(math.ceil(FIRST_READING_S / self.period_s)):
            self.station.alive()
            verdict = self._tick()
            if verdict.action is not None or verdict.reason not in (UNSETTLED, EARLY):
                return verdict
            self.wait()
            if verdict.reason == UNSETTLED:
                self.decide(self._next.value)
            if reason := refusal():
                return Verdict(self.safety.state, None, reason)
        return verdict

    def executed(self, verdict: Verdict) -> Array:
        """The written action [A]; where commands are translated, the decided one."""
        action = self._driver.proposed_action if self._translated else verdict.action
        assert action is not None
        return action

    def wait(self) -> None:
        """Wait for the end of the control period, also before a requested stop: its first command is the next one."""
        while (remaining_s := self._deadline - self._pace()) > SLACK_S:
            if remaining_s > self.period_s + SLACK_S:  # the clock went back
                self._deadline -= remaining_s - self.period_s
                remaining_s = self.period_s
            self.station.sleep(remaining_s)
            if STOPPING.is_set():  # a clock that stands still keeps nobody
                return

    def pause(self, seconds: float) -> None:
        """Sleep; StopRequestedError ends the waiting when a stop of the run is requested."""
        if STOPPING.is_set():
            raise StopRequestedError
        self.station.sleep(seconds)

    def measure(self) -> tuple[Reading | None, str]:
        """The newest measurement that contradicts none before, and why the robot cannot go on from it; "" if it can."""
        try:
            reading = self.station.robot.read()
        except OSError as error:
            return None, self._failed(error).reason
        if reading is None:
            return None, self.safety.reason or "no measurement"
        accepted, fault = self.safety.observe(reading)
        reading = accepted or reading
        age_s = self.station.clock() - reading.stamp_s
        if age_s > self.safety.limits.observation_timeout_s:
            return reading, f"the newest measurement is {age_s:.3g} s old"
        return reading, fault or reading.refusal

    def settle(self, reason: str) -> None:
        """Let the robot stop; an error of its driver is logged, as there is nothing to be done."""
        try:
            self.safety.settle(reason, self.station.sleep)
        except Exception as error:
            log.warning(f"the robot's driver failed while it was stopped: {error}")

    def wait_for_person(self, why: str) -> None:
        """Wait until the person presses a button, if there is one; what they have pressed before only stops the robot.

        Raises:
            OSError: if their device is gone.
        """
        if not self.has_person:
            return
        self._driver.action(self.station.clock())  # reads what was pressed before
        if self._driver.lost:
            raise self._driver.lost
        log.info(f"{why}: success or go continues")
        try:
            self.person.wait_for("success", "go", sleep=self.pause)
        except OSError as error:
            self._driver.lost = error
            raise

    def reopen_if_lost(self) -> None:
        """Open the person's device again if it is gone.

        Raises:
            UserError: if it is still missing.
        """
        if self._driver.lost:
            with suppress(OSError):
                self.person.close()
            self._meet()

    def close(self) -> None:
        """Hold the robot, and release the person's device."""
        self.settle("the run has ended")
        with suppress(OSError):
            self.person.close()

    def _meet(self) -> None:
        self._driver = Driver(self._open_person(), self._next, self.safety.trip)
        executor = self.station.translate(_Decided(self._driver))
        self._executor = executor
        self._controller = Controller(self.station.robot, executor, self.safety, self.station.clock)

    def _tick(self) -> Verdict:
        began = self._pace()
        if self.safety.state is not State.ACTIVE:
            self._executor.reset()  # translated commands begin at rest
        try:
            verdict = self._controller.tick()
        except Exception as error:
            if self.safety.state is not State.STOPPED and not isinstance(error, OSError):
                raise
            verdict = self._failed(error)
        if began - self._deadline > self.period_s:
            self._deadline = began  # the policy or the learner took longer than a period
        self._deadline += self.period_s
        return verdict

    def _failed(self, error: Exception) -> Verdict:
        """Stop after an error of the robot's driver."""
        reason = self.safety.reason or f"the robot failed: {error}"
        with suppress(Exception):  # the driver may be gone
            self.safety.trip(reason)
        return Verdict(State.STOPPED, None, reason)


class _Constant:
    """An executor of one action, which does not depend on measurements."""

    value: Array | None = None

    def reset(self) -> None:
        """No-op."""

    def observe(self, reading: Reading) -> None:
        """No-op."""

    def action(self, now_s: float) -> Array | None:
        """The action [A]."""
        return self.value


class _Decided(_Constant):
    """An executor of the action on which `driver` has decided."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def action(self, now_s: float) -> Array | None:
        """The decided action [A]."""
        return self._driver.proposed_action


class Nobody:
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
