"""Reach in a process that a test knows: it writes its number into a folder, and stops where it is told to."""

import os
import time
from pathlib import Path

from embodied.environment import Transition
from embodied.errors import UserError
from tests.embodied.reach import Reach


class WatchedReach(Reach):
    """`folder` gets a file PID.FIRST-COUNT; a file "hang" there stops one process, "refuse" is an error of the user."""

    def __init__(self, folder: Path, first: int, count: int, seed: int) -> None:
        super().__init__(count, seed=seed)
        if (folder / "refuse").exists():
            raise UserError("expected another simulator, got this one")
        if (folder / "crash").exists():
            os.abort()
        self.folder = folder
        (folder / f"{os.getpid()}.{first}-{count}").touch()

    def step(self, actions) -> Transition:
        try:
            (self.folder / "hang").rename(self.folder / "hung")  # one process alone can
        except FileNotFoundError:
            return super().step(actions)
        time.sleep(3600.0)
        raise AssertionError("not reached")


def processes(folder: Path) -> dict[int, str]:
    """Environments, FIRST-COUNT, of each process that made some, in order of time."""
    files = sorted((each for each in folder.iterdir() if "-" in each.suffix), key=lambda each: each.stat().st_mtime_ns)
    return {int(each.stem): each.suffix[1:] for each in files}
