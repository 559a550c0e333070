"""Decides when a robot is commanded that a pilot or a failsafe may steer, too, and when no commands may be sent.

The state machine sends no messages itself: `ros_robot.py` reports statuses and commands to it, and sends its requests.
"""

from __future__ import annotations

import math
from enum import Enum

from real_robot.robots.robot import Clock
from real_robot.ros2.robots.tables import Behaviour, Condition, Table

QUIET_S = 3.0
"""Commands that arrive earlier after the node's activation indicate a restarted node, maybe without an operator."""
ASK_S = 3.0
"""A request may be lost: it is repeated after every status that shows no effect, and abandoned after this time."""
LEAVE_S = 1.0
"""Likewise for the request to hold: without our heartbeat, a robot that did not receive it holds by itself."""
STOP_AGAIN_S = 0.05
"""An emergency stop is repeated without waiting for a status, until one confirms it."""


class Phase(Enum):
    """READY: no commands. ASKING: requests to follow. FOLLOWED: the robot follows. LOST: until `Engagement.reset`."""

    READY = "ready"
    ASKING = "asking"
    FOLLOWED = "followed"
    LOST = "lost"


class Engagement:
    """Decides when the robot of `table`, which has a status, is commanded, requested to follow, and not contacted.

    A request is sent only if nobody else has steered the robot since commands began; otherwise its pilot hands it over.
    The end of following is final: nothing is sent before `reset`, which an operator calls. `clock` is steady, so that a
    jump of time does not keep a heartbeat alive.
    """

    def __init__(self, table: Table, clock: Clock) -> None:
        assert table.status is not None
        assert table.heartbeat is not None
        self._table = table
        self._status = table.status
        self._heartbeat = table.heartbeat
        self._clock = clock
        self.condition: Condition | None = None
        self._status_s = self._commanded_s = -math.inf
        self.reset()

    def begin(self) -> None:
        """Start with the node: the robot follows only a policy that is activated later, or after `reset`."""
        self.reset()
        self._quiet_s = self._clock() + QUIET_S

    def reset(self) -> None:
        """Let the robot follow from the next command on, at an operator's request."""
        self.phase = Phase.READY
        self.reason = ""
        self.stopped = False
        """Whether an emergency stop was confirmed by the robot."""
        self._stop_s = math.inf
        self._ours: bool | None = None  # nobody else has steered since commands began
        self._began_s = self._requested_s = self._leaving_s = -math.inf
        self._quiet_s = -math.inf
        self._sent: Behaviour | None = None
        self._sent_s = -math.inf
        self.objection = ""
        """Reason for not requesting the robot to follow although commands arrive."""

    def hear(self, condition: Condition) -> None:
        """Process a status of the robot."""
        stopped_following = self.phase is Phase.ASKING and self._follows and not condition.follows
        self.condition, self._status_s = condition, self._clock()
        if stopped_following:  # without a request of ours
            self.lose(condition.fault)
        self.stopped |= condition.stopped and self._status_s > self._stop_s
        if not condition.follows:
            self._leaving_s = -math.inf
        self._advance()

    def command(self, objection: str = "") -> None:
        """Process a valid command; an `objection` is a reason not to request following yet."""
        self._advance()  # first, because a stalled process has missed the gap
        now_s = self._clock()
        if now_s < self._quiet_s and self.phase is Phase.READY:
            self.phase = Phase.LOST
            self.reason = "commands came already when this node was activated"
        self.objection = objection if self.phase is Phase.READY else ""
        if not self._alive or self.objection:
            self._began_s = now_s
        self._commanded_s = now_s
        self._advance()

    def interrupt(self) -> None:
        """Process an invalid command: following is requested only after valid commands without a gap."""
        self._began_s = self._clock()

    def lose(self, reason: str) -> None:
        """End following for `reason` and request a hold if the robot still follows; no-op before the first request."""
        if self.phase in (Phase.ASKING, Phase.FOLLOWED):
            self.phase = Phase.LOST
            self.reason = reason
            self._leaving_s = self._clock() if self.condition and self.condition.follows else -math.inf

    def stop(self) -> None:
        """Begin an emergency stop, no matter who steers."""
        if self._stop_s == math.inf:
            self.phase, self.reason, self._stop_s = Phase.LOST, "emergency stop", self._clock()
            self._sent_s = -math.inf

    @property
    def commands(self) -> bool:
        """Whether commands may be sent: the robot follows after a request, or after its pilot's handover."""
        requested = self.phase is Phase.ASKING and self._sent is not None
        return self._follows and (requested or self.phase is Phase.FOLLOWED)

    @property
    def bridges(self) -> bool:
        """Whether a gap of commands is still short enough to be bridged."""
        self._advance()
        return self._follows and self.phase is Phase.FOLLOWED

    @property
    def beats(self) -> bool:
        """Whether the heartbeat is sent: the robot must not follow, or resume following, without current commands."""
        self._advance()
        if self.phase is Phase.LOST or self.condition is None or not (self._alive and self._fresh):
            return False
        return self.phase is not Phase.READY or self.condition.beat

    @property
    def unconfirmed(self) -> bool:
        """Whether the robot's confirmation of an emergency stop is overdue."""
        return not self.stopped and self._clock() - self._stop_s > self._status.timeout_s

    @property
    def due(self) -> Behaviour | None:
        """The behaviour to send now; None if there is none."""
        self._advance()
        now_s = self._clock()
        if self._stop_s < math.inf:
            if self.stopped or now_s - self._sent_s < STOP_AGAIN_S:
                return None
            self._sent_s = now_s
            return self._table.emergency
        if self.condition is None:
            return None
        status_is_newer = self._status_s > self._sent_s  # so that a repetition overrules nobody who took over meanwhile
        if self.phase is Phase.ASKING and self._ours and self.condition.request:
            return self._again(self.condition.request, status_is_newer)
        if self.phase is Phase.LOST and now_s - self._leaving_s <= LEAVE_S:
            return self._again(self._table.hold, status_is_newer)
        return None

    def _again(self, behaviour: Behaviour, again: bool) -> Behaviour | None:
        """`behaviour` if it is new or may be repeated `again`; it then counts as sent."""
        repeated = behaviour == self._sent
        if repeated and not again:
            return None
        self._sent, self._sent_s = behaviour, self._clock()
        return behaviour

    def _advance(self) -> None:
        """Update the phase by the age of the last status and the last command."""
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
        """READY: request following, or accept the pilot's handover, after `Heartbeat.before_s` of valid commands."""
        if self._ours is None:
            if not condition.fault:
                self.phase = Phase.LOST
                self.reason = "it follows somebody else's commands already"
                return
            self._ours = True
        self._ours &= condition.request is not None
        now_s = self._clock()
        if now_s - self._began_s < self._heartbeat.before_s:
            return
        if self._ours:
            self.phase = Phase.ASKING
            self._requested_s = now_s
        elif not condition.fault:  # the pilot has handed it over
            self.phase = Phase.FOLLOWED

    def _ask(self, condition: Condition) -> None:
        """ASKING: detect success, refusal, or no answer within ASK_S."""
        if not condition.fault and condition.request in (None, self._sent):
            self.phase = Phase.FOLLOWED
        elif condition.request is None:
            self.lose(condition.fault)
        elif self._clock() - self._requested_s > ASK_S:
            self.lose(f"it was asked for {ASK_S:g} s and does not follow: {condition.fault}")

    @property
    def _alive(self) -> bool:
        return self._clock() - self._commanded_s <= self._table.pause.longest_s

    @property
    def _fresh(self) -> bool:
        return self._clock() - self._status_s <= self._status.timeout_s

    @property
    def _follows(self) -> bool:
        return self.condition is not None and self.condition.follows and self._fresh
