"""Websocket between the robot's computer, which connects, and the learner, which listens; see `inbox.py`.

Without encryption, like the policy server: use a tunnel across networks that others use. A peer that does not answer
for `SILENCE_S` is gone.
"""

from __future__ import annotations

import hmac
import http
import logging
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

from embodied.errors import UserError
from embodied.extras import needs_extra
from real_robot.learning.remote.inbox import Inbox, Sent
from real_robot.learning.remote.messages import MESSAGE_BYTES, WEIGHTS_BYTES
from real_robot.learning.remote.outbox import Outbox
from real_robot.serving.credentials import sent_token
from real_robot.serving.policy_client import limit_sending
from real_robot.serving.policy_server import LOOPBACK
from real_robot.serving.wire import CLOSE_LATER, CLOSE_REFUSED

if TYPE_CHECKING:
    from websockets.http11 import Request, Response
    from websockets.sync.server import ServerConnection

log = logging.getLogger(__name__)
LIBRARY = logging.getLogger(f"{__name__}.websockets")
LIBRARY.setLevel(logging.WARNING)
"""Logger of the websockets library, whose errors are about broken handshakes."""
PING_S, SILENCE_S = 2.0, 6.0
"""Period of pings, and time after which a peer that answers none is gone."""
RETRY_S = 1.0
"""Pause before the actor tries to connect again."""
TICK_S = 0.5
"""Period at which a thread that has nothing to send looks whether its connection has ended."""
FRAGMENT_BYTES = 64 << 10
"""Size of the fragments of a message, between which pings and their answers are sent."""
BUFFER_BYTES = 256 << 10
"""Size of the system's buffer of what is to be sent, behind which a ping waits."""
QUEUED_FRAGMENTS = 2 * MESSAGE_BYTES // FRAGMENT_BYTES
"""Number of received fragments that may wait, while a message is stored, before pings wait as well."""
REASON_BYTES = 120
"""Largest size of a reason to close (RFC 6455)."""


def _on_one_line(record: logging.LogRecord) -> bool:
    """Shorten an error with a traceback to its reason."""
    if record.exc_info:
        record.msg, record.args = f"refused a connection: {record.getMessage()} ({record.exc_info[1]})", None
        record.exc_info = record.exc_text = None
    return True


LIBRARY.addFilter(_on_one_line)


def address(text: str) -> tuple[str, int]:
    """Host and port of HOST:PORT.

    Raises:
        UserError: for another text.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) >= 1 << 16:
        raise UserError(f"expected HOST:PORT, such as 192.168.1.5:8010, got {text!r}")
    return host.strip("[]"), int(port)


class LearnerServer:
    """Connects `inbox` with one actor at a time, which has the `token`; a context manager that serves in threads.

    Raises:
        OSError: if it cannot listen on `host` and `port`; 0 chooses a free port, which the attribute `port` then holds.
    """

    def __init__(self, inbox: Inbox, host: str, port: int, token: str) -> None:
        self.inbox = inbox
        self.host = host
        self.port = port
        self._token = token.encode()
        self._lock = threading.Lock()
        self._actor: ServerConnection | None = None
        self._closing = False

    def __enter__(self) -> Self:
        with needs_extra("robot"):
            from websockets.sync.server import serve
        self._server = serve(
            self._session,
            self.host,
            self.port,
            process_request=self._admit,
            compression=None,
            max_size=MESSAGE_BYTES,
            max_queue=QUEUED_FRAGMENTS,
            ping_interval=PING_S,
            ping_timeout=SILENCE_S - PING_S,
            close_timeout=TICK_S,
            server_header=None,
            logger=LIBRARY,
        )
        self.port = self._server.socket.getsockname()[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="learner", daemon=True)
        self._thread.start()
        if self.host not in LOOPBACK:
            log.warning(f"listening on {self.host} without encryption; use a tunnel across networks you do not trust")
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._closing = True
            actor = self._actor
        self._server.shutdown()
        if actor is not None:
            actor.close(CLOSE_LATER, "the learner's program has ended")
        self._thread.join()

    @property
    def connected(self) -> bool:
        """Whether there is an actor."""
        return self._actor is not None

    def _admit(self, connection: ServerConnection, request: Request) -> Response | None:
        """Refuse programs without the token, and a second actor."""
        if not hmac.compare_digest(sent_token(request.headers.get("Authorization", "")), self._token):
            return connection.respond(http.HTTPStatus.UNAUTHORIZED, "wrong or missing token\n")
        if self.connected or self._closing:
            return connection.respond(http.HTTPStatus.SERVICE_UNAVAILABLE, "another actor is connected\n")
        return None

    def _session(self, connection: ServerConnection) -> None:
        """Serve one actor until it leaves."""
        from websockets.exceptions import ConnectionClosed

        with self._lock:
            if self._actor is not None or self._closing:  # admitted at the same moment as another one
                return
            self._actor = connection
        peer = connection.remote_address[0]
        ended = threading.Event()
        sent = Sent()
        sender = threading.Thread(target=self._send, args=(connection, sent, ended), name="learner's sender")
        try:
            _prepare(connection.socket)
            assert connection.request is not None
            session = connection.request.path.strip("/")
            connection.send(self.inbox.greeting(session))
            log.info(f"the robot's computer {peer} is connected")
            sender.start()
            for data in connection:
                if (answer := self.inbox.receive(session, data)) is not None:
                    self.inbox.answer(sent, answer)
        except ConnectionClosed:
            pass
        except UserError as error:
            log.warning(f"refused a message of {peer}: {error}")
            connection.close(CLOSE_REFUSED, _short(error))
        except OSError as error:
            log.error(f"a rollout of {peer} is not stored ({error}); the robot keeps it and sends it again")
            connection.close(CLOSE_LATER, _short(error))
        finally:
            ended.set()
            if sender.ident:
                sender.join()
            with self._lock:
                self._actor = None
            if not self._closing:
                log.warning(f"the robot's computer {peer} is gone ({_closed(connection)}): waiting for it")

    def _send(self, connection: ServerConnection, sent: Sent, ended: threading.Event) -> None:
        """Send answers, orders and weights while the connection lasts."""
        with suppress(Exception):  # the connection has ended, which `_session` notices
            while not ended.is_set():
                if (message := self.inbox.next(sent, TICK_S)) is not None:
                    connection.send(_fragments(message, connection.socket))


class ActorLink:
    """Connects `outbox` with the learner at `learner`, HOST:PORT, again and again; a context manager with a thread."""

    def __init__(self, outbox: Outbox, learner: str, token: str) -> None:
        host, port = address(learner)
        self.outbox = outbox
        self._uri = f"ws://{f'[{host}]' if ':' in host else host}:{port}/{outbox.session}"
        self._token = token
        self._ended = threading.Event()
        self._connection: Any = None
        self._thread = threading.Thread(target=self._run, name="link to the learner", daemon=True)

    def __enter__(self) -> Self:
        with needs_extra("robot"):
            import websockets  # noqa: F401 - fails here, not in the thread
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if (connection := self._connection) is not None:
            connection.close()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.is_set() and not self.outbox.refusal:
            try:
                self._connect()
            except UserError as error:
                self.outbox.refuse(str(error))
                return
            except OSError as error:
                self.outbox.disconnect(" ".join(str(error).split()))
            except Exception as error:  # a mistake of ours must not end this thread, which the robot waits for
                log.exception("the link to the learner failed")
                self.outbox.disconnect(type(error).__name__)
            self._ended.wait(RETRY_S)

    def _connect(self) -> None:
        """Connect and exchange messages while the connection lasts.

        Raises:
            UserError: if the learner refuses for good.
            OSError: when the connection ends, or cannot be had.
        """
        from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
        from websockets.sync.client import connect

        try:
            connection = connect(
                self._uri,
                additional_headers={"Authorization": f"Api-Key {self._token}"},
                compression=None,
                max_size=WEIGHTS_BYTES,
                max_queue=QUEUED_FRAGMENTS,
                open_timeout=SILENCE_S,
                close_timeout=TICK_S,
                ping_interval=PING_S,
                ping_timeout=SILENCE_S - PING_S,
                proxy=None,
            )
        except InvalidStatus as error:
            reason = f"{error.response.status_code} {error.response.body.decode(errors='replace').strip()[:80]}"
            if error.response.status_code == http.HTTPStatus.UNAUTHORIZED:
                raise UserError(f"the learner refuses this program: {reason}; see token_file=") from error
            raise ConnectionRefusedError(reason) from error
        except (InvalidHandshake, ConnectionClosed) as error:
            raise ConnectionError(f"no learner listens there: {error}") from error
        ended = threading.Event()
        sender = threading.Thread(target=self._send, args=(connection, ended), name="actor's sender")
        self._connection = connection
        if self._ended.is_set():  # while it connected: `__exit__` found nothing to close
            connection.close()
        try:
            _prepare(connection.socket)
            self.outbox.connect(connection.recv(timeout=SILENCE_S))
            sender.start()
            for data in connection:
                self.outbox.receive(data)
        except ConnectionClosed:
            pass
        finally:
            ended.set()
            connection.close()
            self._connection = None
            if sender.ident:
                sender.join()
        if connection.close_code == CLOSE_REFUSED:
            raise UserError(f"the learner refuses: {connection.close_reason}")
        raise ConnectionError(_closed(connection))

    def _send(self, connection: Any, ended: threading.Event) -> None:  # noqa: ANN401 - a connection
        """Send rollouts and results while the connection lasts."""
        with suppress(Exception):  # the connection has ended, which `_connect` notices
            while not ended.is_set():
                if (message := self.outbox.next(TICK_S)) is not None:
                    connection.send(_fragments(message, connection.socket))


def _prepare(sock: socket.socket) -> None:
    """Let a send that the peer does not read fail, and no ping wait behind much of what is sent."""
    limit_sending(sock, SILENCE_S)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)


def _fragments(message: bytes, sock: socket.socket) -> Iterator[bytes]:
    """Parts of `message`, each once the system has room for it: a long message is no silence.

    A send that has to wait would keep the connection's lock, which pings and what is received need.
    """
    room = select.poll()
    room.register(sock, select.POLLOUT)
    for first in range(0, len(message), FRAGMENT_BYTES):
        room.poll(SILENCE_S * 1e3)
        yield message[first : first + FRAGMENT_BYTES]


def _closed(connection: Any) -> str:  # noqa: ANN401 - a connection
    """Reason why the connection has ended."""
    return connection.close_reason or f"the connection was lost, code {connection.close_code}"


def _short(error: Exception) -> str:
    """The error on one line that fits into a close frame."""
    text = " ".join(str(error).split()).encode()
    return text[:REASON_BYTES].decode(errors="ignore")
