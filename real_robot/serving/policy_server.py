"""Serves a policy over a websocket, to our client, openpi's (see `wire.py`) and vla-eval's (see `vla_eval.py`).

The server keeps no state of our and openpi's clients between requests: the memory of a recurrent policy travels with
the observation, so sessions cannot affect each other. Invalid requests are refused individually while other clients are
served.
"""

from __future__ import annotations

import asyncio
import hmac
import http
import logging
import math
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from embodied.errors import UserError
from embodied.extras import needs_extra
from embodied.policy import Policy
from embodied.task import Convention
from real_robot.serving import vla_eval
from real_robot.serving.answerer import Answerer
from real_robot.serving.answerer import log as answerer_log
from real_robot.serving.credentials import sent_token
from real_robot.serving.wire import CLOSE_LATER, CLOSE_REFUSED

if TYPE_CHECKING:
    from websockets.asyncio.server import ServerConnection
    from websockets.http11 import Request, Response

log = logging.getLogger(__name__)
LIBRARY = logging.getLogger(f"{__name__}.websockets")
LIBRARY.setLevel(logging.WARNING)
"""Logger of the websockets library, whose warnings are about broken handshakes."""
LOOPBACK = "127.0.0.1", "::1", "localhost"


@dataclass(frozen=True)
class ServerLimits:
    """Limits per server: simultaneous connections, and seconds for handshakes, for sending, and between requests.

    If all connections are in use, a new client replaces the one that has been idle longest, if that is at least
    `spare_s`. Warnings of the same kind are logged at most once per `log_s`.
    """

    clients: int = 8
    handshake_s: float = 5.0
    send_s: float = 5.0
    idle_s: float = 300.0
    spare_s: float = 10.0
    log_s: float = 10.0


class PolicyServer:
    """Serves `policy`, on `device`, to clients with `token`; a context manager that serves in a background thread.

    Without encryption: use a tunnel across machines. The policy does not compute for a client that has left, or for a
    request whose deadline has passed; nor, while others wait, for one whose answer would come after its deadline.

    Args:
        policy: answers requests one at a time.
        token: sent by clients as `Authorization: Bearer TOKEN`, `Api-Key TOKEN`, or as the password of an address.
        host: address to listen on.
        port: port to listen on; 0 chooses a free one, which the attribute `port` then holds.
        device: device of the policy.
        limits: limits of connections and times.
        convention: returns the convention of the policy's benchmark, in which vla-eval's observations are.

    Raises:
        UserError: for an invalid token or port, or without the packages of the extra "robot".
        OSError: if it cannot listen on the address.
    """

    def __init__(
        self,
        policy: Policy,
        token: str,
        *,
        host: str = "127.0.0.1",
        port: int = 8000,
        device: torch.device | str = "cpu",
        limits: ServerLimits | None = None,
        convention: Callable[[], Convention | None] = lambda: None,
    ) -> None:
        if len(token) < 16:
            raise UserError(f"expected a token of at least 16 characters, got {len(token)}")
        if not 0 <= port < 2**16:
            raise UserError(f"expected a port of 0 (a free one) to 65535, got {port}")
        self.host = host
        self.port = port
        self._answerer = Answerer(policy, device)
        self._convention = cache(convention)
        self._token = token.encode()
        self._limits = limits or ServerLimits()
        self._idle_since: dict[ServerConnection, float] = {}  # of every client, in monotonic time; inf: being answered
        self._closing: set[asyncio.Task[None]] = set()
        self._rarely = _Rarely(self._limits.log_s)
        self._worker = ThreadPoolExecutor(1, "policy")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="policy server", daemon=True)

    def __enter__(self) -> PolicyServer:
        with needs_extra("robot"):
            from websockets.asyncio.server import serve

        async def start() -> Any:  # noqa: ANN401 - websockets' server
            return await serve(
                self._session,
                self.host,
                self.port,
                process_request=self._admit,
                compression=None,
                max_size=self._answerer.frame_bytes,
                open_timeout=self._limits.handshake_s,
                server_header=None,
                logger=LIBRARY,
            )

        for each in (log, LIBRARY, answerer_log):
            each.addFilter(self._rarely)
        self._thread.start()
        try:
            self._server = asyncio.run_coroutine_threadsafe(start(), self._loop).result()
        except OSError as error:
            self._stop()
            if isinstance(error, socket.gaierror):
                raise UserError(f"unknown host={self.host}; expected an address of this machine, or 0.0.0.0") from error
            raise
        self.port = self._server.sockets[0].getsockname()[1]
        if self.host not in LOOPBACK:
            log.warning(f"serving on {self.host} without encryption; use a tunnel across networks you do not trust")
        return self

    def __exit__(self, *_: object) -> None:
        async def stop() -> None:
            self._server.close()
            await self._server.wait_closed()

        asyncio.run_coroutine_threadsafe(stop(), self._loop).result()
        self._stop()

    def _stop(self) -> None:
        for each in (log, LIBRARY, answerer_log):
            each.removeFilter(self._rarely)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._worker.shutdown()

    def _admit(self, connection: ServerConnection, request: Request) -> Response | None:
        """Refuse clients without the token; openpi's health check needs none."""
        if request.path == "/healthz":
            return connection.respond(http.HTTPStatus.OK, "OK\n")
        # constant-time comparison, so that response times reveal nothing about the token
        if not hmac.compare_digest(sent_token(request.headers.get("Authorization", "")), self._token):
            return connection.respond(http.HTTPStatus.UNAUTHORIZED, "wrong or missing token\n")
        if len(self._idle_since) >= self._limits.clients and self._spare() is None:
            return connection.respond(http.HTTPStatus.SERVICE_UNAVAILABLE, "too many clients\n")
        return None

    async def _session(self, connection: ServerConnection) -> None:
        """Serve one client until it leaves, stalls, or sends an invalid request."""
        from websockets.exceptions import ConnectionClosed

        if len(self._idle_since) >= self._limits.clients and not self._displace():
            await connection.close(CLOSE_LATER, "too many clients")  # admitted at the same moment as others
            return
        self._idle_since[connection] = time.monotonic()
        try:
            answerer = self._answerer_of(connection)
            if answerer.greeting is not None:
                await self._send(connection, answerer.greeting)
            while True:
                request = await asyncio.wait_for(connection.recv(), self._limits.idle_s)
                self._idle_since[connection] = math.inf
                answer = await self._answer(answerer, connection, request)
                self._idle_since[connection] = time.monotonic()
                if answer is None:
                    log.warning(f"dropped a request of {connection.remote_address}, which left, or its deadline passed")
                    await connection.close(CLOSE_LATER, "the deadline of the request has passed")
                    return
                if answer:
                    await self._send(connection, answer)
                if isinstance(answer, str):
                    log.warning(f"refused {connection.remote_address}: {answer}")
                    await connection.close(CLOSE_REFUSED, "refused; see the message before")
                    return
        except TimeoutError:
            log.warning(f"{connection.remote_address} stalled; connection closed")
            connection.transport.abort()  # a close handshake would wait for the stalled client
        except ConnectionClosed:
            pass
        finally:
            self._idle_since.pop(connection, None)

    def _answerer_of(self, connection: ServerConnection) -> Answerer | vla_eval.VlaEvalSession:
        """Answerer or session of this client: openpi's clients wait for a greeting, vla-eval's name a path."""
        if connection.request is not None and connection.request.path.rstrip("/") == vla_eval.PATH:
            return vla_eval.VlaEvalSession(self._answerer, self._convention)
        return self._answerer

    async def _answer(
        self, answerer: Answerer | vla_eval.VlaEvalSession, connection: ServerConnection, request: bytes | str
    ) -> bytes | str | None:
        """The answer to `request`, b"" if it needs none; None if the client has left, or the request is too late."""
        # the policy runs in one worker thread; the event loop meanwhile detects whether the client leaves
        work = self._worker.submit(answerer.answer, request, time.monotonic(), self._others_wait)
        answer = asyncio.wrap_future(work)
        departure = self._loop.create_task(connection.wait_closed())
        try:
            await asyncio.wait((answer, departure), return_when=asyncio.FIRST_COMPLETED)
            return answer.result() if answer.done() else None
        finally:
            answer.cancel()  # which takes a request that still waits out of the queue
            departure.cancel()

    def _others_wait(self) -> bool:
        """Whether more than one request is unanswered; called by the worker."""
        return list(self._idle_since.values()).count(math.inf) > 1

    def _spare(self) -> ServerConnection | None:
        """The client that has been idle longest; None if that is less than `spare_s`."""
        client = min(self._idle_since, key=self._idle_since.__getitem__, default=None)
        if client is None or time.monotonic() - self._idle_since[client] < self._limits.spare_s:
            return None
        return client

    def _displace(self) -> bool:
        """Disconnect an idle client; it may reconnect, because the server keeps no state."""
        if (idle := self._spare()) is None:
            return False
        del self._idle_since[idle]
        log.warning(f"{idle.remote_address} was idle and gives its place to another client")
        closing = self._loop.create_task(idle.close(CLOSE_LATER, "idle; another client took the place"))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        return True

    async def _send(self, connection: ServerConnection, data: bytes | str) -> None:
        await asyncio.wait_for(connection.send(data), self._limits.send_s)


class _Rarely(logging.Filter):
    """Passes one record per line of code in `every_s`, with the number of records suppressed before it."""

    def __init__(self, every_s: float) -> None:
        super().__init__()
        self._every_s = every_s
        self._last: dict[
            tuple[str, int], tuple[float, int]
        ] = {}  # line of code -> time of the last record that passed, number suppressed since

    def filter(self, record: logging.LogRecord) -> bool:
        kind = (record.pathname, record.lineno)
        now = time.monotonic()
        last_s, suppressed = self._last.get(kind, (-math.inf, 0))
        if now - last_s < self._every_s:
            self._last[kind] = last_s, suppressed + 1
            return False
        self._last[kind] = now, 0
        if suppressed:
            record.msg = f"{record.getMessage()} ({suppressed} more like this before)"
            record.args = None
        return True
