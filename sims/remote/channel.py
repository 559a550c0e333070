"""What parent and child say to each other, beside the tensors (`memory.py`): JSON by a Unix socket, nothing pickled.

Needs nothing but the standard library: a child whose interpreter has nothing installed can say so.
"""

from __future__ import annotations

import json
import math
import socket
import time
from typing import Any


class Channel:
    """JSON messages over a Unix socket, one a line; an open file can go with one."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket, self._read, self._files = connection, b"", list[int]()

    def send(self, message: dict[str, Any], file: int | None = None) -> None:
        """Send `message` and the descriptor `file`; OSError where nobody is there."""
        data = json.dumps(message).encode() + b"\n"
        if file is not None:
            data = data[socket.send_fds(self._socket, [data], [file]) :]
        self._socket.sendall(data)

    def receive(self, timeout_s: float | None = None) -> tuple[dict[str, Any], int | None]:
        """The next message, and the descriptor that came with it.

        Raises:
            TimeoutError: after `timeout_s`.
            EOFError: where the other side is gone; OSError is possible too.
        """
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while b"\n" not in self._read:
            left_s = deadline - time.monotonic()
            if left_s <= 0.0:
                raise TimeoutError
            self._socket.settimeout(None if timeout_s is None else left_s)
            data, files, *_ = socket.recv_fds(self._socket, 1 << 16, 1)
            if not data:
                raise EOFError
            self._read += data
            self._files += files
        line, _, self._read = self._read.partition(b"\n")
        return json.loads(line), self._files.pop(0) if self._files else None

    def close(self) -> None:
        """Hang up."""
        self._socket.close()
