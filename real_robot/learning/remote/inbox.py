"""Messages between a learner and the robot's computer, independent of the network.

    greeting    stored, total: number of rollouts of this session, and of all, that are stored; help: used part of the
                budget of a scripted person; max_staleness; and the run's config, contract, distribution and seed
    order       id, do: "play" (seed), "collect" (decisions), "evaluate" (episodes, weights)
    weights     version, weights
    stored      stored, total, after every rollout
    rollout     sequence, rollout: the next one of this session; help: used part of the budget after it
    result      id, result: of an order; help: used part of the budget after it

A rollout is acknowledged by "stored" once it is on disk; one that comes twice is acknowledged again and stored once.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from embodied.contract import Contract
from embodied.errors import UserError
from embodied.rollout.rollout import Rollout
from embodied.runtime.interrupt import STOPPING, Abandoned
from real_robot.learning.remote.journal import SESSION, Journal
from real_robot.learning.remote.messages import entry, help_of, packed, rollout_of, unpacked

log = logging.getLogger(__name__)
PATIENCE_S = 0.2
"""Period at which a waiting learner looks whether it has to stop, s."""
FULL_S = 1.0, 30.0
"""Shortest and longest pause, s, before a rollout is stored again that could not be stored, as on a full disk."""


@dataclass
class Sent:
    """Messages of one connection: id of the sent order, version of the sent weights, and `answers` to send."""

    order: str = ""
    version: int = -1
    answers: deque[bytes] = field(default_factory=deque)


class Inbox:
    """Rollouts of the `journal`, checked against `contract`; `description` is part of the greeting.

    All methods may be called from any thread.
    """

    def __init__(self, journal: Journal, contract: Contract, description: Mapping[str, Any]) -> None:
        self.journal = journal
        self.contract = contract
        self.description = description
        self.changed = threading.Condition()
        self._order: tuple[str, bytes] | None = None  # id and message
        self._weights: tuple[int, bytes] | None = None  # version and message
        self._results: dict[str, Any] = {}  # result of the present order by its id
        self._unstored: tuple[str, int, bytes, dict[str, int]] | None = None  # arguments of a `_store` that failed
        self._pause_s, self._retry_s = 0.0, 0.0  # before it is stored again, and when
        self._help = self._stored_help()

    # Network.

    def greeting(self, session: str) -> bytes:
        """Message with which a connection to `session` begins.

        Raises:
            UserError: for an impossible name of a session.
        """
        if not SESSION.fullmatch(session):
            raise UserError("expected the name of a session in the address")
        with self.changed:
            return packed({"kind": "greeting", **self.description, "help": self._help, **self._stored(session)})

    def next(self, sent: Sent, timeout_s: float) -> bytes | None:
        """The next message for a connection in which `sent` was sent; None if there is none within `timeout_s`."""
        with self.changed:
            self.changed.wait_for(lambda: sent.answers or self._is_new(sent), timeout_s)
            if sent.answers:
                return sent.answers.popleft()
            if self._order and self._order[0] != sent.order:
                sent.order = self._order[0]
                return self._order[1]
            if self._weights and self._weights[0] != sent.version:
                sent.version = self._weights[0]
                return self._weights[1]
        return None

    def _is_new(self, sent: Sent) -> bool:
        order = self._order is not None and self._order[0] != sent.order
        return order or (self._weights is not None and self._weights[0] != sent.version)

    def answer(self, sent: Sent, message: bytes) -> None:
        """Let `next` return `message` for the connection of `sent`."""
        with self.changed:
            sent.answers.append(message)
            self.changed.notify_all()

    def receive(self, session: str, data: bytes | str) -> bytes | None:
        """Take a message of `session` and return the answer, if it needs one.

        Raises:
            UserError: in one line, for anything else than the messages above.
            ConnectionError: for a rollout that is not the next one.
            OSError: for a rollout that cannot be stored, such as on a full disk; `obstacle` tries again.
        """
        message = unpacked(data)
        if message["kind"] == "result":
            self._receive_result(entry(message, "id", str), message.get("result"), help_of(message))
            return None
        if message["kind"] != "rollout":
            raise UserError(f"a message of the unknown kind {message['kind']!r:.40}")
        sequence = entry(message, "sequence", int)
        with self.changed:
            stored = self.journal.stored(session)
            if sequence > stored:
                raise ConnectionError(f"expected rollout {stored} of session {session}, got {sequence}")
            if sequence == stored:
                assert isinstance(data, bytes)
                rollout_of(entry(message, "rollout", dict), self.contract)
                self._store(session, sequence, data, help_of(message))
            return packed({"kind": "stored", **self._stored(session)})

    def obstacle(self) -> str:
        """Reason why rollouts cannot be stored now, such as a full disk; "" if they can be.

        The rollout that could not be stored is tried again, after pauses that grow.
        """
        with self.changed:
            if self._unstored is None:
                return ""
            if time.monotonic() >= self._retry_s:
                with suppress(OSError):
                    self._store(*self._unstored)
                    log.info("rollouts can be stored again")
                    return ""
            return "the learner's disk is full, or fails"

    def _store(self, session: str, sequence: int, data: bytes, used: dict[str, int]) -> None:
        """Store the next rollout of `session`, see `Journal.add`, after which that part of the budget is `used`."""
        try:
            self.journal.add(session, sequence, data)
        except OSError:
            self._unstored = session, sequence, data, used
            self._pause_s = min(max(2.0 * self._pause_s, FULL_S[0]), FULL_S[1])
            self._retry_s = time.monotonic() + self._pause_s
            raise
        self._unstored, self._pause_s = None, 0.0
        self._use(used)
        self.changed.notify_all()

    def _receive_result(self, order: str, result: object, used: dict[str, int]) -> None:
        with self.changed:
            if self._order and self._order[0] == order:
                self._results = {order: result}
                self._use(used)
                self.changed.notify_all()

    def _use(self, used: dict[str, int]) -> None:
        """Note the `used` part of the budget, which never shrinks: a result overtakes rollouts that wait to be sent."""
        self._help |= {name: max(count, self._help.get(name, 0)) for name, count in used.items()}

    def _stored_help(self) -> dict[str, int]:
        """Used part of the budget after the newest rollout; {} for those of earlier releases."""
        newest = unpacked(self.journal.read(self.journal.total - 1)) if self.journal.total else {}
        return help_of(newest) if "help" in newest else {}

    def _stored(self, session: str) -> dict[str, int]:
        return {"stored": self.journal.stored(session), "total": self.journal.total}

    # Learner.

    def order(self, **content: Any) -> str:  # noqa: ANN401 - entries of a message
        """Order "do" with its further entries; returns its id, which is the same for the same content."""
        number = hashlib.sha256(packed(content)).hexdigest()[:16]
        with self.changed:
            if self._order is None or self._order[0] != number:
                self._order = number, packed({"kind": "order", "id": number, **content})
                self._results = {}
                self.changed.notify_all()
        return number

    def publish(self, version: int, weights: Mapping[str, Any]) -> None:
        """Send the `weights` of `version`, in place of those that are not sent yet."""
        data = packed({"kind": "weights", "version": version, "weights": dict(weights)})
        with self.changed:
            self._weights = version, data
            self.changed.notify_all()

    def result(self, order: str) -> Any:  # noqa: ANN401 - what an actor sends
        """Wait for the result of the present `order`.

        Raises:
            Abandoned: if a stop of the run is requested meanwhile.
        """
        with self.changed:
            while order not in self._results:
                self._wait()
            return self._results[order]

    def rollout(self, number: int) -> Rollout:
        """Wait for rollout `number`.

        Raises:
            Abandoned: if a stop of the run is requested meanwhile.
            UserError: if it is missing on disk.
        """
        with self.changed:
            while number >= self.journal.total:
                self._wait()
        return rollout_of(entry(unpacked(self.journal.read(number)), "rollout", dict), self.contract)

    def prune(self, first: int) -> None:
        """Delete the rollouts before number `first`, which nobody needs any more, see `Journal.prune`."""
        with self.changed:
            self.journal.prune(first)

    def _wait(self) -> None:
        if STOPPING.is_set():
            raise Abandoned
        self.changed.wait(PATIENCE_S)
