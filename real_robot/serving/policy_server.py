"""Serves a policy over a websocket, to our client and to openpi's; see `wire.py` for the protocol.

The server keeps no client state between requests: the memory of a recurrent policy travels with the observation, so
sessions cannot affect each other. Invalid requests are refused individually while other clients are served.
"""

from __future__ import annotations

import asyncio
import hmac
import http
import logging
import math
import socket
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDict

from embodied.contract import TensorSpec
from embodied.errors import UserError
from embodied.execution.chunking import InpaintingPolicy, Running
from embodied.extras import needs_extra
from embodied.policy import MEMORY, Decision, Policy
from embodied.rollout.memory import RecurrentPolicy
from embodied.text import encode_as
from real_robot.serving.wire import CLOSE_LATER, CLOSE_REFUSED, OPTIONS, PROMPT, pack, unpack

if TYPE_CHECKING:
    from websockets.asyncio.server import ServerConnection
    from websockets.http11 import Request, Response

log = logging.getLogger(__name__)
LIBRARY = logging.getLogger(f"{__name__}.websockets")
LIBRARY.setLevel(logging.WARNING)
"""Logger of the websockets library, whose warnings are about broken handshakes."""
LOOPBACK = "127.0.0.1", "::1", "localhost"
ROWS = 1024
"""Largest assumed number of rows along an axis of variable length."""
OVERHEAD_BYTES = 64 << 10
DURATIONS = 20
"""Number of recent decisions; their median duration is the estimate for the next one."""


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
        token: sent by clients as `Authorization: Bearer TOKEN` or `Api-Key TOKEN`.
        host: address to listen on.
        port: port to listen on; 0 chooses a free one, which the attribute `port` then holds.
        device: device of the policy.
        limits: limits of connections and times.

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
    ) -> None:
        if len(token) < 16:
            raise UserError(f"expected a token of at least 16 characters, got {len(token)}")
        if not 0 <= port < 2**16:
            raise UserError(f"expected a port of 0 (a free one) to 65535, got {port}")
        self.host = host
        self.port = port
        self._answerer = _Answerer(policy, device)
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

        for each in (log, LIBRARY):
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
        for each in (log, LIBRARY):
            each.removeFilter(self._rarely)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._worker.shutdown()

    def _admit(self, connection: ServerConnection, request: Request) -> Response | None:
        """Refuse clients without the token; openpi's health check needs none."""
        if request.path == "/healthz":
            return connection.respond(http.HTTPStatus.OK, "OK\n")
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        credentials = token.strip().encode(errors="surrogateescape")  # how websockets 15 and 16 read what is not ASCII
        # constant-time comparison, so that response times reveal nothing about the token
        if scheme not in ("Bearer", "Api-Key") or not hmac.compare_digest(credentials, self._token):
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
            await self._send(connection, self._answerer.greeting)
            while True:
                request = await asyncio.wait_for(connection.recv(), self._limits.idle_s)
                self._idle_since[connection] = math.inf
                answer = await self._answer(connection, request)
                self._idle_since[connection] = time.monotonic()
                if answer is None:
                    log.warning(f"dropped a request of {connection.remote_address}, which left, or its deadline passed")
                    await connection.close(CLOSE_LATER, "the deadline of the request has passed")
                    return
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

    async def _answer(self, connection: ServerConnection, request: bytes | str) -> bytes | str | None:
        """The answer to `request`; None if the client has left, or the deadline of the request has passed."""
        # the policy runs in one worker thread; the event loop meanwhile detects whether the client leaves
        work = self._worker.submit(self._answerer.answer, request, time.monotonic(), self._others_wait)
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


class _Answerer:
    """Turns a request frame into a response frame, without a network."""

    def __init__(self, policy: Policy, device: torch.device | str) -> None:
        self.policy = policy
        self.device = device
        self.specs = {key: spec for key, spec in policy.contract.observation.items() if not spec.privileged}
        metadata: dict[str, Any] = {"contract": policy.contract.to_dict()}
        if isinstance(policy, RecurrentPolicy):
            initial = policy.initial_memory(1)[0].detach().cpu().numpy()
            metadata["initial_memory"] = initial
            self.specs[MEMORY] = TensorSpec(initial.shape)
        if isinstance(policy, InpaintingPolicy):
            metadata["inpaints"] = True
        self.greeting = pack(metadata)
        action = TensorSpec((policy.contract.horizon, *policy.contract.action.shape))
        self.frame_bytes = OVERHEAD_BYTES + 2 * sum(_bytes(spec) for spec in [*self.specs.values(), action])
        self._durations_s = deque[float](maxlen=DURATIONS)

    def answer(self, request: bytes | str, received_s: float, others_wait: Callable[[], bool]) -> bytes | str | None:
        """Actions for a request received at `received_s` of monotonic time, or a one-line error.

        None if its deadline has passed, or probably will have passed before the answer while `others_wait`.
        """
        start_s = time.monotonic()
        try:
            if isinstance(request, str):
                raise UserError("expected a binary message, got text")
            message = unpack(request)
            options = _Options.of(message.pop(OPTIONS, {}))
            # skip requests that are late already, and while others wait also those that probably will be
            remaining_s = received_s + options.deadline_s - time.monotonic()
            if remaining_s <= 0.0 or (remaining_s < self._expected_s() and others_wait()):
                return None
            decision = self._decide(message, options)
        except UserError as error:
            return " ".join(str(error).split())
        except Exception:
            log.exception("the policy failed")
            return "the policy failed; its server's log says why"
        reply: dict[str, Any] = {"actions": _array(decision.actions)}
        if MEMORY in self.specs:
            reply[MEMORY] = _array(decision.sample[MEMORY])
        if broken := [key for key, value in reply.items() if not np.isfinite(value).all()]:
            return f"the policy's {' and '.join(broken)} are not finite, though its observation is"
        self._durations_s.append(time.monotonic() - start_s)
        return pack(reply | {"server_timing": {"infer_ms": 1e3 * self._durations_s[-1]}})

    def _expected_s(self) -> float:
        """Median duration of recent decisions, s."""
        return statistics.median(self._durations_s) if self._durations_s else 0.0

    def _decide(self, message: dict[str, Any], options: _Options) -> Decision:
        """Call the policy on a batch of one; raise UserError if the message does not fit the contract."""
        arrays = {key: self._checked(key, spec, _entry(message, key, spec)) for key, spec in self.specs.items()}
        batch = {key: torch.from_numpy(value).unsqueeze(0) for key, value in arrays.items()}
        observation = TensorDict(batch, batch_size=[1]).to(self.device)
        generator = torch.Generator(self.device).manual_seed(options.seed)
        if options.running is None:
            return self.policy.act(observation, deterministic=options.deterministic, generator=generator)
        if not isinstance(self.policy, InpaintingPolicy):
            raise UserError(f"{type(self.policy).__name__} cannot continue running chunks")
        running = self._running(options.running)
        return self.policy.inpaint(observation, running, deterministic=options.deterministic, generator=generator)

    def _running(self, message: dict[str, Any]) -> Running:
        """The running actions of a request, as a batch of one; raise UserError if they do not fit the contract."""
        contract = self.policy.contract
        specs = {"actions": TensorSpec((contract.horizon, *contract.action.shape))}
        specs |= {"frozen": TensorSpec((), "int64"), "overlap": TensorSpec((), "int64")}
        arrays = {key: self._checked(key, spec, message.get(key)) for key, spec in specs.items()}
        if not 0 <= arrays["frozen"] <= arrays["overlap"] <= contract.horizon:
            raise UserError(f"expected 0 <= frozen <= overlap <= {contract.horizon} in running")
        return Running(**{key: torch.from_numpy(value).unsqueeze(0).to(self.device) for key, value in arrays.items()})

    @staticmethod
    def _checked(key: str, spec: TensorSpec, value: object) -> np.ndarray:
        """`value` as an array of `spec`; raise UserError for another type, shape, dtype or range."""
        if spec.is_text and isinstance(value, str | list):
            try:
                return encode_as(value, spec.shape)
            except UserError as error:
                raise UserError(f"{key}: {error}") from error
        if not isinstance(value, np.ndarray):
            raise UserError(f"{key}: expected an array of {spec.dtype} {spec.shape}, got {type(value).__name__}")
        # -1 in a spec is an axis of any length
        fits = len(spec.shape) == value.ndim and all(a in (-1, b) for a, b in zip(spec.shape, value.shape, strict=True))
        if str(value.dtype) != spec.dtype or not fits:
            raise UserError(f"{key}: expected {spec.dtype} {spec.shape}, got {value.dtype} {value.shape}")
        if value.dtype.kind == "f" and not np.isfinite(value).all():
            raise UserError(f"{key}: expected finite numbers, got infinity or not a number")
        if value.dtype.kind in "iu" and spec.low and ((value < spec.low) | (value > spec.high)).any():
            raise UserError(f"{key}: expected integers from {spec.low} to {spec.high}, got {value.tolist()}")
        return value


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


@dataclass(frozen=True)
class _Options:
    """Options of a request."""

    deterministic: bool = True
    seed: int = 0
    running: dict[str, Any] | None = None
    deadline_s: float = math.inf

    @staticmethod
    def of(message: object) -> _Options:
        """Parse the options of a request; raise UserError for unknown ones, wrong types and impossible values."""
        try:
            options = _Options(**message)  # type: ignore[arg-type]
        except TypeError as error:
            expected = "deterministic, seed, running and deadline_s"
            raise UserError(f"{OPTIONS}: expected {expected}, got {message!r:.80}") from error
        kinds = type(options.deterministic), type(options.seed)
        numeric = type(options.deadline_s) in (int, float)
        if kinds != (bool, int) or not numeric or not isinstance(options.running, dict | None):
            raise UserError(f"{OPTIONS}: expected a bool, a number, a map and seconds, got {message!r:.80}")
        if not 0 <= options.seed < 2**63 or not options.deadline_s > 0.0:
            raise UserError(f"{OPTIONS}: expected a seed of 0 to 2^63 - 1 and deadline_s above 0, got {message!r:.80}")
        return options


def _entry(message: dict[str, Any], key: str, spec: TensorSpec) -> object:
    """The entry `key` of the message; an instruction may be sent under openpi's name PROMPT."""
    instruction = spec.is_text and len(spec.shape) == 1
    return message.get(key, message.get(PROMPT) if instruction else None)


def _bytes(spec: TensorSpec) -> int:
    """Size of an array of `spec`; axes of variable length count as ROWS."""
    return math.prod(ROWS if size < 0 else size for size in spec.shape) * np.dtype(spec.dtype).itemsize


def _array(batch: Any) -> np.ndarray:  # noqa: ANN401 - a Tensor, which TensorDict does not promise
    return batch[0].detach().cpu().numpy()
