"""Options for child processes, common to all tasks of simulators on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from embodied.configuration import Configuration, NonNegativeInt, PositiveFloat


@dataclass(kw_only=True)
class ProcessOptions(Configuration):
    """Options for the processes of environments, see `sims/remote`.

    Environments are divided among `processes` child processes (0: none, they run in this one). The children run the
    interpreter `python`, such as /path/to/venv/bin/python, which has the simulator (None: this one's). A child that has
    not answered after `timeout_s` counts as dead.
    """

    processes: NonNegativeInt = 0
    python: str | None = None
    timeout_s: PositiveFloat = 120.0

    group: ClassVar[int] = 1
    """Number of consecutive environments that share a world, and have to be in one process."""

    def group_of(self, distribution: str) -> int:
        """Value of `group` for environments of `distribution`."""
        return self.group

    @property
    def max_envs(self) -> int | None:
        """Largest useful number of environments; None: any number."""
        return None

    def settled(self) -> Self:
        """The task with the processes and the interpreter that its simulator needs.

        Raises:
            UserError: if they are not available.
        """
        return self
