"""Where the worlds of a task run: options that every task of a simulator on the CPU has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from embodied.configuration import Configuration, NonNegativeInt, PositiveFloat


@dataclass(kw_only=True)
class ProcessOptions(Configuration):
    """Where environments run, see `sims/remote`.

    They are divided among `processes` child processes (0: in this one). The children run the interpreter `python`, such
    as /path/to/venv/bin/python, where the simulator lives (None: this one's). A child that has not answered after
    `timeout_s` counts as dead.
    """

    processes: NonNegativeInt = 0
    python: str | None = None
    timeout_s: PositiveFloat = 120.0

    group: ClassVar[int] = 1
    """Consecutive environments that share a world, which no two processes can divide."""

    def group_of(self, distribution: str) -> int:
        """`group` in environments of `distribution`."""
        return self.group

    @property
    def most_envs(self) -> int | None:
        """Environments beyond which more are of no use; None: any number."""
        return None

    def settled(self) -> Self:
        """The same task, with the processes and the interpreter that its simulator cannot do without.

        Raises:
            UserError: where they cannot be had.
        """
        return self
