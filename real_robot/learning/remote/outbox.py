"""State of an actor's connection: the learner's orders and weights, and rollouts that it has not stored yet.

Rollout n is learned from in update n, so that weights of version v are n - v updates old there. The policy may act
while that is at most `max_staleness`. Without a connection, an episode goes on as long as this allows, and none begins.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

from embodied.errors import UserError
from embodied.rollout.rollout import Cancelled
from real_robot.learning.consent import Consent
from real_robot.learning.remote.messages import MESSAGE_BYTES, entry, packed, unpacked

log = logging.getLogger(__name__)
BACKLOG_BYTES = 512 << 20
"""Largest size of the rollouts that wait in memory for the learner; beyond it the robot holds, whoever drives it."""


class Outbox(Consent):
    """Rollouts for the learner called `learner`, in memory until it has stored them, and its newest messages.

    Rollouts are numbered by this `session`; those that a lost connection may have swallowed are sent again. All methods
    may be called from any thread.
    """

    def __init__(self, learner: str) -> None:
        self.learner = learner
        self.session = secrets.token_hex(8)
        self.greeting: dict[str, Any] | None = None
        """The first greeting."""
        self.version: int | None = None
        """Version of the weights by which the policy acts; None before the first."""
        self.refusal = ""
        """Reason why the learner accepts nothing more from this actor; "" if there is none."""
        self.running = ""
        """Id of the order that is being carried out."""
        self.exempt = False
        """Whether the robot acts on an order that brings its own weights: their age does not matter."""
        self.changed = threading.Condition()
        self._lost = "it was not reached yet"  # reason why there is no connection; "" if there is one
        self._total = 0  # number of rollouts that the learner has stored, of all sessions
        self._waiting: deque[tuple[int, bytes]] = deque()  # not stored yet, with their sequence
        self._added = 0  # sequence of the next rollout
        self._sent = 0  # sequence of the next rollout to send
        self._order: dict[str, Any] | None = None
        self._answer = "", b""  # id of the last order that was carried out, and its result
        self._answers = False  # whether the result is to be sent
        self._weights: tuple[int, dict[str, Any]] | None = None  # newest ones, until they are taken

    # Connection.

    def connect(self, data: bytes | str) -> None:
        """Begin a connection with the learner's greeting; what it has not stored will be sent again.

        Raises:
            UserError: for another message, and for a learner of another task than before.
        """
        greeting = unpacked(data)
        stored, total = (entry(greeting, name, int) for name in ("stored", "total"))
        entry(greeting, "max_staleness", int)
        with self.changed:
            if self.greeting is not None and greeting.get("contract") != self.greeting.get("contract"):
                raise UserError(f"the learner at {self.learner} has another task than before; start this program again")
            first, self.greeting = self.greeting is None, self.greeting or greeting
            if not self._first <= stored <= self._added:
                raise UserError(
                    f"the learner at {self.learner} has {stored} rollouts of this program, which has made"
                    f" {self._added}: it is another run, or rollouts/ was deleted; start this program again"
                )
            self._total = 0
            self._store(stored, total)
            self._sent = self._first
            lost, self._lost = self._lost, ""
            self.changed.notify_all()
        log.info(f"connected to the learner at {self.learner}" if first else f"the learner is back (before: {lost})")

    def disconnect(self, reason: str) -> None:
        """End the connection, or note why there is none."""
        with self.changed:
            if not self._lost or (self.greeting is None and reason != self._lost):
                log.warning(
                    f"no learner at {self.learner} ({reason}): trying again; the robot holds after this episode, or"
                    " once its weights are too old"
                )
            self._lost = reason
            self.changed.notify_all()

    def refuse(self, reason: str) -> None:
        """Note that the learner will never accept this actor."""
        with self.changed:
            self.refusal = self._lost = reason
            self.changed.notify_all()

    def receive(self, data: bytes | str) -> None:
        """Take a message of the learner.

        Raises:
            UserError: for anything else.
        """
        message = unpacked(data)
        kind = message["kind"]
        with self.changed:
            if kind == "stored":
                self._store(entry(message, "stored", int), entry(message, "total", int))
            elif kind == "weights":
                self._weights = entry(message, "version", int), entry(message, "weights", dict)
            elif kind == "order":
                entry(message, "id", str)
                entry(message, "do", str)
                self._order = message
                self._answers = message["id"] == self._answer[0]  # it did not get the result
            else:
                raise UserError(f"a message of the unknown kind {kind!r:.40}")
            self.changed.notify_all()

    def next(self, timeout_s: float) -> bytes | None:
        """The next message to send; None if there is none within `timeout_s`."""
        with self.changed:
            self.changed.wait_for(lambda: self._answers or self._sent < self._added, timeout_s)
            if self._answers:
                self._answers = False
                return self._answer[1]
            for sequence, data in self._waiting:
                if sequence == self._sent:
                    self._sent += 1
                    return data
        return None

    @property
    def _first(self) -> int:
        """Sequence of the first rollout that is not known to be stored."""
        return self._added - len(self._waiting)

    def _store(self, stored: int, total: int) -> None:
        """Forget the rollouts of this session before `stored`, which the learner has, of `total` in all."""
        if total < self._total:  # an old message
            return
        while self._waiting and self._waiting[0][0] < stored:
            self._waiting.popleft()
        self._total = total

    # The robot's program.

    @property
    def connected(self) -> bool:
        """Whether there is a connection."""
        return not self._lost

    @property
    def unstored(self) -> int:
        """Number of rollouts that the learner has not stored, as far as is known."""
        return len(self._waiting)

    @property
    def stale(self) -> bool:
        """Whether the policy may not act by its weights."""
        with self.changed:
            return self._is_stale(self.version)

    def _is_stale(self, version: int | None) -> bool:
        """Whether the weights of `version` are too old for the present rollout."""
        staleness = self._staleness(version)
        return staleness is None or self.greeting is None or staleness > self.greeting["max_staleness"]

    def _staleness(self, version: int | None) -> int | None:
        """Updates by which the weights of `version` will be old when the present rollout is learned from."""
        return None if version is None else self._total + len(self._waiting) - version

    def begin(self) -> str:
        """See `Consent`: a learner has to be there, and to have learned from all but the latest rollouts.

        Raises:
            Cancelled: if there is another order now, or the learner will never accept this actor.
        """
        with self.changed:
            if self.refusal or self.superseded:
                raise Cancelled
            if self._lost:
                return f"no learner at {self.learner}"
            # the first decision takes the newest; a learner that was killed sends older ones until it has caught up
            versions = [each for each in (self.version, self._weights and self._weights[0]) if each is not None]
            version = max(versions, default=None)
            late = not self.exempt and self._is_stale(version)
            return self.full or (f"the learner is {self._staleness(version)} rollouts behind" if late else "")

    def act(self, human: bool) -> str:
        """See `Consent`: the person may always act, unless there is no memory left for what they do."""
        with self.changed:
            if human or self.exempt or not self._is_stale(self.version):
                return self.full
            learner = "there is no learner" if self._lost else "the learner is slow"
            return f"the policy's weights are {self._staleness(self.version)} updates old, as {learner}"

    @property
    def full(self) -> str:
        """Reason why there is no memory for more rollouts; "" if there is."""
        with self.changed:
            size = sum(len(data) for _, data in self._waiting)
        return f"{BACKLOG_BYTES >> 20} MB of rollouts wait for the learner" if size > BACKLOG_BYTES else ""

    def take_weights(self) -> dict[str, Any] | None:
        """The newest weights, if they are newer than those by which the policy acts, and act by them from now on."""
        with self.changed:
            taken, self._weights = self._weights, None
            if taken is None or (self.version is not None and taken[0] <= self.version):
                return None
            self.version = taken[0]
            return taken[1]

    @property
    def superseded(self) -> bool:
        """Whether there is another order than the one that is being carried out."""
        with self.changed:
            return self._order is None or self._order["id"] != self.running

    def order(self) -> dict[str, Any] | None:
        """Order of the learner to carry out now; None if there is none."""
        with self.changed:
            order = self._order
            return None if order is None or order["id"] == self._answer[0] else order

    def finish(self, order: Mapping[str, Any], result: Mapping[str, Any], used: Mapping[str, int]) -> None:
        """Send the `result` of an order, again whenever the learner gives this order again.

        The learner returns the `used` part of the budget of a scripted person, {} without, to the next actor.

        Raises:
            UserError: if it is too large.
        """
        data = _checked_size(packed({"kind": "result", "id": order["id"], "result": result, "help": dict(used)}))
        with self.changed:
            self._answer = order["id"], data
            self._answers = True
            self.changed.notify_all()

    def add(self, rollout: Mapping[str, Any], used: Mapping[str, int]) -> None:
        """Send the entries of a `rollout`, until the learner has stored them, with the `used` budget as in `finish`.

        Raises:
            UserError: if they are too large.
        """
        message = {"kind": "rollout", "sequence": self._added, "rollout": rollout, "help": dict(used)}
        data = _checked_size(packed(message))
        with self.changed:
            self._waiting.append((self._added, data))
            self._added += 1
            self.changed.notify_all()


def _checked_size(data: bytes) -> bytes:
    if len(data) > MESSAGE_BYTES:
        raise UserError(
            f"a rollout of {len(data) >> 20} MB is more than the learner takes, {MESSAGE_BYTES >> 20} MB; use a smaller"
            " algorithm.rollout_length or task.image_size"
        )
    return data
