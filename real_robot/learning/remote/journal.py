"""Rollouts of a robot at another computer, on disk: what is stored is learned from once, also after a kill.

A learner that goes on from a checkpoint reads the rollouts after it again, in the same order, and takes the same steps.
"""

from __future__ import annotations

import re
from pathlib import Path

from embodied.errors import UserError
from embodied.saving.files import complete_or_absent

FOLDER = "rollouts"
"""Folder of a run with a file for each rollout, NUMBER-SESSION-SEQUENCE.msgpack."""
NAME = re.compile(r"(\d+)-([0-9a-f]+)-(\d+)\.msgpack")
SESSION = re.compile(r"[0-9a-f]{16}")
"""Name of a run of the actor's program."""


class Journal:
    """Rollouts in `folder`, numbered in order of arrival. `total` is the number of the next one.

    Each actor's program, a `session`, numbers its own from 0, the sequence; each of them is stored once.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._paths: dict[int, Path] = {}
        self._stored: dict[str, int] = {}
        for path in folder.glob("*.msgpack") if folder.exists() else ():
            if match := NAME.fullmatch(path.name):
                self._paths[int(match[1])] = path
                self._stored[match[2]] = max(self.stored(match[2]), int(match[3]) + 1)
        self.total = max(self._paths, default=-1) + 1

    def stored(self, session: str) -> int:
        """Number of rollouts of `session` that are stored."""
        return self._stored.get(session, 0)

    def add(self, session: str, sequence: int, data: bytes) -> None:
        """Store the next rollout of `session` on disk, completely or not at all.

        Raises:
            OSError: if it cannot be written, such as on a full disk.
        """
        assert sequence == self.stored(session)
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{self.total:08d}-{session}-{sequence}.msgpack"
        with complete_or_absent(path) as temporary:
            temporary.write_bytes(data)
        self._paths[self.total] = path
        self._stored[session] = sequence + 1
        self.total += 1

    def read(self, number: int) -> bytes:
        """Content of rollout `number` < total.

        Raises:
            UserError: if it is not there.
        """
        path = self._paths.get(number)
        if path is None or not path.exists():
            raise UserError(f"rollout {number} is missing in {self.folder}: the run cannot go on from this checkpoint")
        return path.read_bytes()
