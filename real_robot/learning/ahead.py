"""Control steps of a chunk, of which the last ones are executed beside the inference of the next chunk."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from real_robot.robots.robot import Array


@dataclass
class Steps:
    """Control steps of one chunk [K], as they were executed."""

    actions: list[Array] = field(default_factory=list)
    human: list[bool] = field(default_factory=list)
    takeovers: list[bool] = field(default_factory=list)
    limited: list[bool] = field(default_factory=list)
    solved: bool = False  # by the last of them
    cut: bool = False  # where a person handed back


class Ahead:
    """Runs one function at a time in a thread."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, function: Callable[[], object]) -> None:
        """Run `function`, once the last one has ended."""
        self.wait()

        def run() -> None:
            try:
                function()
            except BaseException as error:  # raised by `wait`, in the program's own thread
                self._error = error

        self._thread = threading.Thread(target=run, name="ahead", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the function has ended, also when interrupted, and raise its error."""
        try:
            if self._thread:
                self._thread.join()
        finally:
            if self._thread:
                self._thread.join()
            self._thread = None
            error, self._error = self._error, None
        if error is not None:
            raise error
