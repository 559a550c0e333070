"""Who steers a robot that a pilot or a failsafe may steer too: when it may be commanded, and when it is left alone.

A state machine without messages of its own: `ros_robot.py` tells it what was heard and commanded, and sends what is
due.
"""

from __future__ import annotations

import math
from enum import Enum

from real_robot.robots.robot import Clock
from real_robot.ros2.robots.tables import Behaviour, Condition, Table

QUIET_S = 3.0
"""Commands that come sooner after the node's activation come to one that was restarted, perhaps by no operator."""
ASK_S = 3.0
"""A request may be lost: it is repeated whenever a status shows no effect yet, and given up after this time."""
LEAVE_S = 1.0
"""Likewise the request to hold: without our heartbeat, a robot that did not hear it holds by itself."""
STOP_AGAIN_S = 0.05
"""An emergency stop is repeated without waiting for a status, until one confirms it."""


class Phase(Enum):
    """READY: the robot gets no commands. ASKING: it is asked to follow. FOLLOWED. LOST: until `Engagement.reset`."""

    READY = "ready"
    ASKING = "asking"
    FOLLOWED = "followed"
    LOST = "lost"


class Engagement:
    """Decides when the robot of `table`, which has a status, is commanded, asked to follow, and left alone.

    It is asked only if nobody else has steered it since commands began; otherwise its pilot hands it over. Whatever
    ends the robot's following is final: nothing is sent before `reset`, which an operator calls. `clock` is a steady
    one: a jump must not keep a heartbeat alive.
    """

    def __init__(self, table: Table, clock: Clock) -> None:
        assert table.status is not None
        assert table.heartbeat is not None
        self._table, self._status, self._heartbeat, self._clock = table, table.status, table.heartbeat, clock
        self.condition: Condition | None = None
        self._heard_s = self._commanded_s = -math.inf
        self.reset()

    def begin(self) -> None:
        """The node has begun: only a policy that is activated later is followed, or one that an operator resets."""
        self.reset()
        self._quiet_s = self._clock() + QUIET_S

    def reset(self) -> None:
        """An operator wants the robot to follow, from the next command on."""
        self.phase, self.reason = Phase.READY, ""
        self.stopped = False
        """Whether an emergency stop was confirmed by the robot."""
        self._stop_s = math.inf
        self._ours: bool | None = None  # whether nobody else has steered since commands began
        self._began_s = self._asked_s = self._leaving_s = -math.inf
        self._quiet_s = -math.inf
        self._sent: Behaviour | None = None
        self._sent_s = -math.inf
        self.objection = ""
        """Why it is not asked to follow, although commands come."""

    def hear(self, condition: Condition) -> None:
        """The robot has published its status."""
        left = self.phase is Phase.ASKING and self._follows and not condition.follows
        self.condition, self._heard_s = condition, self._clock()
        if left:  # by no request of ours
            self.lose(condition.fault)
        self.stopped |= condition.stopped and self._heard_s > self._stop_s
        if not condition.follows:
            self._leaving_s = -math.inf
        self._advance()

    def command(self, objection: str = "") -> None:
        """A valid command has come; an `objection` is why the robot should not be asked to follow yet."""
        self._advance()  # first, since a process that was stalled has missed the gap
        now_s = self._clock()
        if now_s < self._quiet_s and self.phase is Phase.READY:
            self.phase, self.reason = Phase.LOST, "commands came already when this node was activated"
        self.objection = objection if self.phase is Phase.READY else ""
        if not self._alive or self.objection:
            self._began_s = now_s
        self._commanded_s = now_s
        self._advance()

    def interrupt(self) -> None:
        """A command was not valid: before the robot is asked to follow, all have to be."""
        self._began_s = self._clock()

    def lose(self, reason: str) -> None:
        """End the robot's following; it holds if it still does. Does nothing before it was asked to follow."""
        if self.phase in (Phase.ASKING, Phase.FOLLOWED):
            self.phase, self.reason = Phase.LOST, reason
            self._leaving_s = self._clock() if self.condition and self.condition.follows else -math.inf

    def stop(self) -> None:
        """Begin an emergency stop, whoever steers."""
        if self._stop_s == math.inf:
            self.phase, self.reason, self._stop_s = Phase.LOST, "emergency stop", self._clock()
            self._sent_s = -math.inf

    @property
    def commands(self) -> bool:
        """Whether the robot may get commands: from when it was asked to follow, and does."""
        asked = self.phase is Phase.ASKING and self._sent is not None
        return self._follows and (asked or self.phase is Phase.FOLLOWED)

    @property
    def bridges(self) -> bool:
        """Whether a command is missing, but not yet for long enough to hold."""
        self._advance()
        return self._follows and self.phase is Phase.FOLLOWED

    @property
    def beats(self) -> bool:
        """Whether the robot gets the heartbeat: it must not follow, or return to following, without live commands."""
        self._advance()
        if self.phase is Phase.LOST or self.condition is None or not (self._alive and self._fresh):
            return False
        return self.phase is not Phase.READY or self.condition.beat

    @property
    def unconfirmed(self) -> bool:
        """Whether the robot should have confirmed an emergency stop by now, and has not."""
        return not self.stopped and self._clock() - self._stop_s > self._status.timeout_s

    @property
    def due(self) -> Behaviour | None:
        """What has to be sent now; None if nothing."""
        self._advance()
        now_s = self._clock()
        if self._stop_s < math.inf:
            if self.stopped or now_s - self._sent_s < STOP_AGAIN_S:
                return None
            self._sent_s = now_s
            return self._table.emergency
        if self.condition is None:
            return None
        news = self._heard_s > self._sent_s  # so that nobody who took over meanwhile is overruled by a repetition
        if self.phase is Phase.ASKING and self._ours and self.condition.request:
            return self._again(self.condition.request, news)
        if self.phase is Phase.LOST and now_s - self._leaving_s <= LEAVE_S:
            return self._again(self._table.hold, news)
        return None

    def _again(self, behaviour: Behaviour, again: bool) -> Behaviour | None:
        repeated = behaviour == self._sent
        if repeated and not again:
            return None
        self._sent, self._sent_s = behaviour, self._clock()
        return behaviour

    def _advance(self) -> None:
        if self.condition is None:
            return
        if not self._fresh:
            self.lose(f"nothing was heard on {self._status.name} for {self._status.timeout_s:g} s")
        elif self.phase is Phase.FOLLOWED and self.condition.fault:
            self.lose(self.condition.fault)
        elif not self._alive:
            self.lose(f"no valid command for {self._table.pause.longest_s:g} s")
        elif self.phase is Phase.READY:
            self._begin(self.condition)
        elif self.phase is Phase.ASKING:
            self._ask(self.condition)

    def _begin(self, condition: Condition) -> None:
        if self._ours is None:
            if not condition.fault:
                self.phase, self.reason = Phase.LOST, "it follows somebody else's commands already"
                return
            self._ours = True
        self._ours &= condition.request is not None
        now_s = self._clock()
        if now_s - self._began_s < self._heartbeat.before_s:
            return
        if self._ours:
            self.phase, self._asked_s = Phase.ASKING, now_s
        elif not condition.fault:  # its pilot has handed it over
            self.phase = Phase.FOLLOWED

    def _ask(self, condition: Condition) -> None:
        if not condition.fault and condition.request in (None, self._sent):
            self.phase = Phase.FOLLOWED
        elif condition.request is None:
            self.lose(condition.fault)
        elif self._clock() - self._asked_s > ASK_S:
            self.lose(f"it was asked for {ASK_S:g} s and does not follow: {condition.fault}")

    @property
    def _alive(self) -> bool:
        return self._clock() - self._commanded_s <= self._table.pause.longest_s

    @property
    def _fresh(self) -> bool:
        return self._clock() - self._heard_s <= self._status.timeout_s

    @property
    def _follows(self) -> bool:
        return self.condition is not None and self.condition.follows and self._fresh
