"""A policy on a policy server, ours or openpi's, with the interface of a local policy."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.contract import Contract
from embodied.errors import UserError
from embodied.execution.chunking import Running
from embodied.extras import needs_extra
from embodied.policy import MEMORY, Decision
from embodied.rollout.memory import STARTED
from real_robot.serving.wire import OPTIONS, pack, unpack

REPLY_BYTES = 64 << 20
CLOSE_S = 1.0


class PolicyClient:
    """Queries the server at `uri`, such as "ws://127.0.0.1:8000", within `deadline_s` per decision; N = 1.

    A lost connection is restored within the deadline of the next decision. A late response is never mistaken for the
    answer to the next request: its connection is closed. The caller stores recurrent memory, as everywhere
    (`embodied.rollout.memory`). The client has `initial_memory` and `inpaint` if the server's policy has them.

    Args:
        uri: address of the server.
        token: token of the server.
        deadline_s: time limit of a decision in s, including connecting.
        contract: contract of the policy, if the server does not send it: openpi's servers do not. Its observation keys
            are the server's.
        constants: further entries of every observation: {"instruction": "pick up the milk"} if observations have none,
            openpi's {"prompt": "..."}.

    Raises:
        UserError: if `uri` is no websocket address, or the contract is missing or differs from the server's.
        OSError: if the server cannot be reached, or refuses.
    """

    def __init__(
        self,
        uri: str,
        token: str,
        *,
        deadline_s: float = 1.0,
        contract: Contract | None = None,
        constants: Mapping[str, str] | None = None,
    ) -> None:
        self.uri = uri
        self.deadline_s = deadline_s
        self._token = token
        self._constants = dict(constants or {})
        self._connection: Any = None
        metadata = self._connect(time.monotonic() + deadline_s)
        served = Contract.from_dict(metadata["contract"]) if "contract" in metadata else contract
        if served is None:
            self.close()
            raise UserError(f"{uri} does not send the contract of its policy; pass it as contract=...")
        if contract is not None and (rows := served.differences(contract)):
            self.close()
            raise UserError(f"the policy at {uri} has another contract ({'; '.join(rows)})")
        self.contract = served
        self._ours = "contract" in metadata
        self._initial = metadata.get("initial_memory")
        if self._initial is not None:
            self.initial_memory = self._initial_memory
        if metadata.get("inpaints"):
            self.inpaint = self._inpaint

    def act(
        self, observation: TensorDict, *, deterministic: bool = True, generator: torch.Generator | None = None
    ) -> Decision:
        """Deterministic actions by default; with `deterministic=False`, `generator` draws the noise's seed.

        Raises:
            ValueError: if the server refuses the observation, or does not answer with actions.
            OSError: if it cannot be reached; TimeoutError, a subclass, if it takes too long.
        """
        return self._decide(observation, deterministic, generator, None)

    def close(self) -> None:
        """Close the connection."""
        connection = self._connection
        self._connection = None
        if connection is not None:
            connection.close()

    def _drop(self) -> None:
        """Close at once, without a close handshake that a stalled server would not answer."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.socket.shutdown(socket.SHUT_RDWR)
        self.close()

    def _initial_memory(self, count: int) -> Tensor:
        """Memory [count, M] with which episodes begin."""
        return torch.from_numpy(self._initial).expand(count, -1)

    def _inpaint(
        self,
        observation: TensorDict,
        running: Running,
        *,
        deterministic: bool = True,
        generator: torch.Generator | None = None,
    ) -> Decision:
        return self._decide(observation, deterministic, generator, running)

    def _decide(
        self,
        observation: TensorDict,
        deterministic: bool,
        generator: torch.Generator | None,
        running: Running | None,
    ) -> Decision:
        """Send the observation, and `running` actions to continue; return the chunk [1, H, A] of the reply."""
        if len(observation) != 1:
            raise ValueError(f"expected one observation, got {len(observation)}; a policy server decides for one robot")
        message: dict[str, Any] = {**self._constants}
        message |= {key: _row(value) for key, value in observation.items() if key != STARTED}
        if self._ours:
            message[OPTIONS] = _options(deterministic, generator, running)
        reply = self._ask(message)
        actions = reply.get("actions")
        shape = (self.contract.horizon, *self.contract.action.shape)
        if not isinstance(actions, np.ndarray) or actions.shape != shape:
            description = actions.shape if isinstance(actions, np.ndarray) else type(actions).__name__
            raise UserError(f"expected actions {shape} from {self.uri}, got {description}")
        if not np.isfinite(actions).all():
            raise UserError(f"expected finite actions from {self.uri}, got infinity or not a number")
        sample = {MEMORY: torch.from_numpy(reply[MEMORY]).unsqueeze(0)} if self._initial is not None else {}
        batch = torch.from_numpy(actions.astype(np.float32, copy=False)).unsqueeze(0)  # [1, H, A]
        return Decision(batch, TensorDict(sample, batch_size=[1]), torch.full((1, 1, 1), torch.nan))

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a request; repeat it once if the connection was lost, because a server keeps no state."""
        from websockets.exceptions import ConnectionClosed

        until = time.monotonic() + self.deadline_s
        reason: Exception | None = None
        # an existing connection may have been closed by the server meanwhile: try once more with a new one
        for _ in range(1 if self._connection is None else 2):
            try:
                if self._connection is None:
                    self._check_same(self._connect(until))
                if self._ours:
                    message[OPTIONS]["deadline_s"] = max(1e-3, until - time.monotonic())
                return self._exchange(pack(message), until)
            except ConnectionClosed as error:
                self._drop()
                reason = error
        raise ConnectionError(f"the policy server {self.uri} closed the connection: {reason}") from reason

    def _check_same(self, metadata: dict[str, Any]) -> None:
        """Raise UserError if the server's contract has changed since the first connection."""
        if self._ours and metadata.get("contract") != _plain(self.contract):
            self._drop()
            raise UserError(f"{self.uri} now serves a policy of another contract; connect again")

    def _exchange(self, data: bytes, until: float) -> dict[str, Any]:
        """Send a request and receive its reply until the monotonic time `until`; close the connection if it is late."""
        connection = self._connection
        try:
            with contextlib.suppress(OSError):  # a closed socket is detected below
                limit_sending(connection.socket, until - time.monotonic())
            connection.send(data)
            reply = connection.recv(timeout=max(0.0, until - time.monotonic()))
        except (TimeoutError, BlockingIOError) as error:
            self._drop()
            raise TimeoutError(f"the policy server {self.uri} did not answer within {self.deadline_s} s") from error
        if isinstance(reply, str):
            self._drop()
            raise UserError(f"the policy server {self.uri} refuses: {' '.join(reply.split())[-300:]}")
        return unpack(reply)

    def _connect(self, until: float) -> dict[str, Any]:
        """Connect until the monotonic time `until`; return the metadata of the server's greeting."""
        with needs_extra("robot"):
            from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI
            from websockets.sync.client import connect
            from websockets.uri import parse_uri
        try:
            parse_uri(self.uri)
        except (InvalidURI, ValueError) as error:
            raise UserError(f"expected a policy server as ws://host:port, got {self.uri!r}") from error
        remaining_s = max(1e-3, until - time.monotonic())
        try:
            self._connection = connect(
                self.uri,
                additional_headers={"Authorization": f"Api-Key {self._token}"},
                compression=None,
                max_size=REPLY_BYTES,
                open_timeout=remaining_s,
                close_timeout=CLOSE_S,
                proxy=None,
            ).__enter__()
            greeting = self._connection.recv(timeout=max(0.0, until - time.monotonic()))
        except InvalidStatus as error:
            status = error.response.status_code
            explanation = error.response.body.decode(errors="replace").strip()
            raise ConnectionRefusedError(
                f"the policy server {self.uri} refuses: {status} {explanation[:100]}"
            ) from error
        except TimeoutError as error:
            self._drop()
            raise TimeoutError(f"the policy server {self.uri} did not answer within {self.deadline_s} s") from error
        except (InvalidHandshake, ConnectionClosed, OSError) as error:
            self._drop()
            raise ConnectionError(f"cannot reach the policy server {self.uri}: {error}") from error
        try:
            if isinstance(greeting, str):
                raise UserError(f"{self.uri} is no policy server: it greets with text")
            return unpack(greeting)
        except UserError:
            self._drop()
            raise


def _plain(contract: Contract) -> dict[str, Any]:
    """The contract as a server sends it."""
    return unpack(pack(contract.to_dict()))


def _options(deterministic: bool, generator: torch.Generator | None, running: Running | None) -> dict[str, Any]:
    """Options of a request, with a seed drawn from `generator` unless `deterministic`."""
    options: dict[str, Any] = {"deterministic": deterministic}
    if not deterministic:
        options["seed"] = int(torch.randint(2**63 - 1, (), generator=generator, device=generator and generator.device))
    if running is not None:
        options["running"] = {name: _row(value) for name, value in vars(running).items()}
    return options


def _row(batch: Any) -> np.ndarray:  # noqa: ANN401 - a Tensor, which TensorDict does not promise
    return np.asarray(batch[0].detach().cpu().numpy())


def limit_sending(sock: socket.socket, seconds: float) -> None:
    """Make a send that the server does not read fail after `seconds`; the receiving thread is not affected."""
    # struct timeval: seconds and microseconds
    whole, fraction = divmod(max(1e-3, seconds), 1.0)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(whole), int(fraction * 1e6)))
