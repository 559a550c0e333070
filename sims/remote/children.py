"""Child processes: start, requests with timeouts, and end; idle children wait for the next environment."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from embodied.errors import UserError
from sims.remote.channel import Channel

WORKER = Path(__file__).with_name("worker.py")
START_S = 600.0
"""Timeout for a child that imports a simulator, compiles it and makes an environment."""
END_S = 30.0
"""Timeout for the exit of a child that has closed its connection."""
LAST_LINES = 5
READ = 1 << 16
"""Number of last lines of a child's output in the message of its death, and bytes of output that are searched."""


class Died(Exception):  # noqa: N818 - not an error of ours
    """A child is gone or hangs; the message has the cause and its last output."""


class Child:
    """One child process of the interpreter `python` (None: this one's); `top` is the task's own package.

    It has a session of its own, so that only the parent receives Ctrl-C from the terminal. It never outlives the
    parent.

    Raises:
        UserError: if there is no such interpreter.
    """

    def __init__(self, python: str | None, top: str, threads: int) -> None:
        parent_end, child_end = socket.socketpair()
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the child
        folders = {name: _folder(name) for name in ("embodied", "sims", top)}
        command = [python or sys.executable, str(WORKER), str(child_end.fileno()), json.dumps(folders)]
        environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
        for name in ("PYTHONPATH", "PYTHONHOME") if python else ():  # of this interpreter
            environment.pop(name, None)
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=self._words,
                stderr=self._words,
                env=environment,
                pass_fds=[child_end.fileno()],
                start_new_session=True,
            )
        except OSError as error:
            parent_end.close()
            raise UserError(f"cannot start task.python={python}: {error.strerror}; expected an interpreter") from error
        finally:
            child_end.close()
        self.python = python
        self.channel = Channel(parent_end)
        self._number = 0
        self.end = weakref.finalize(self, _end, self.process, self.channel, self._words)

    def tell(self, message: dict[str, Any], file: int | None = None) -> None:
        """Send `message` and the descriptor `file`; `hear` returns the reply, or raises Died if the child is gone."""
        self._number += 1
        with suppress(OSError):
            self.channel.send({**message, "id": self._number}, file)

    def hear(self, timeout_s: float | None) -> dict[str, Any]:
        """Wait for the reply to the last message; pending replies to earlier messages are dropped.

        Raises:
            Died: if the child is gone, or does not answer within `timeout_s`.
            UserError: as in the child.
            RuntimeError: for any other error in the child, with its traceback.
        """
        try:
            reply: dict[str, Any] = {"id": 0}
            while reply.get("id", self._number) != self._number:
                reply, _ = self.channel.receive(timeout_s)
        except TimeoutError:
            raise Died(f"gave no answer within {timeout_s:g} s{self._last_words()}") from None
        except (EOFError, OSError):
            raise Died(f"{self._ending()}{self._last_words()}") from None
        if "error" not in reply:
            return reply
        if reply["kind"] == UserError.__name__:
            raise UserError(f"task.python={self.python}: {reply['error']}" if self.python else reply["error"])
        raise RuntimeError(f"{reply['kind']} in a child process: {reply['error']}\n{reply['traceback']}")

    def ask(self, message: dict[str, Any], timeout_s: float | None) -> dict[str, Any]:
        """Send a message and wait for the reply."""
        self.tell(message)
        return self.hear(timeout_s)

    def _ending(self) -> str:
        try:
            status = self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            return "hung up"
        return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"

    def _last_words(self) -> str:
        self._words.seek(max(0, self._words.seek(0, os.SEEK_END) - READ))
        lines = self._words.read().decode(errors="replace").split("\n")
        last_lines = [line.strip() for line in lines if line.strip()][-LAST_LINES:]
        return f"; its last lines: {' | '.join(last_lines)}" if last_lines else ""


class Pool:
    """Children for environments of one kind of task, which are reused after an environment is closed.

    Args:
        python: interpreter of the children; this one's if None.
        top: top-level package of the task's class.
        threads: number of PyTorch's threads in each child.
    """

    def __init__(self, python: str | None, top: str, threads: int = 1) -> None:
        self.python = python
        self.top = top
        self.threads = threads
        self.idle: list[Child] = []

    def take(self) -> Child:
        """An idle child, or a new one."""
        while self.idle:
            child = self.idle.pop()
            if child.process.poll() is None:
                return child
        return Child(self.python, self.top, self.threads)

    def give(self, child: Child) -> None:
        """Return `child`, whose environment is closed, for reuse."""
        self.idle.append(child)

    def close(self) -> None:
        """End all idle children."""
        while self.idle:
            self.idle.pop().end()


def _end(process: subprocess.Popen[bytes], channel: Channel, words: BinaryIO) -> None:
    """Kill the child and all processes that it started."""
    if process.poll() is None:
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert process.stdin is not None
    with suppress(OSError):
        process.stdin.close()
    channel.close()
    words.close()


def _folder(package: str) -> str:
    """Folder that contains `package`."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"{package} is no package that a child process can import; put the task into one")
    return str(Path(next(iter(spec.submodule_search_locations))).parent.resolve())
