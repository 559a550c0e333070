"""Messages between parent and child, in addition to the tensors (`memory.py`): JSON over a Unix socket, no pickles.

Needs only the standard library, so that a child can report that its interpreter has no packages.
"""

from __future__ import annotations

import json
import math
import socket
import time
from typing import Any


class Channel:
    """JSON messages over a Unix socket, one per line, each with an optional file descriptor."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._read = b""
        self._files = list[int]()

    def send(self, message: dict[str, Any], file: int | None = None) -> None:
        """Send `message` and the descriptor `file`; OSError if the other side is gone."""
        data = json.dumps(message).encode() + b"\n"
        if file is not None:
            data = data[socket.send_fds(self._socket, [data], [file]) :]
        self._socket.sendall(data)

    def receive(self, timeout_s: float | None = None) -> tuple[dict[str, Any], int | None]:
        """Receive the next message, and the descriptor sent with it.

        Raises:
            TimeoutError: after `timeout_s`.
            EOFError: if the other side is gone; OSError is possible too.
        """
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while b"\n" not in self._read:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0.0:
                raise TimeoutError
            self._socket.settimeout(None if timeout_s is None else remaining_s)
            data, files, *_ = socket.recv_fds(self._socket, 1 << 16, 1)
            if not data:
                raise EOFError
            self._read += data
            self._files += files
        line, _, self._read = self._read.partition(b"\n")
        return json.loads(line), self._files.pop(0) if self._files else None

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()
