"""Tasks that child processes make in tests: of environments from tests/embodied, and some that go wrong."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from embodied.contract import Contract
from embodied.environment import Environment
from embodied.environments.engine import Outcome
from embodied.task import Task
from sims.remote.children import Pool
from sims.remote.options import ProcessOptions
from sims.remote.task import RemoteTask, in_processes
from tests.embodied.counter import Costly, Counter
from tests.embodied.nameless import Nameless, Single
from tests.embodied.reach import Reach

POOL = Pool(None, "tests")
"""Children that all tests of a process share: to start one takes seconds."""


def in_children(task: Task) -> RemoteTask:
    """`task` in processes that end with those of all other tests."""
    made = in_processes(task)
    assert isinstance(made, RemoteTask)
    made._pool = POOL
    return made


class Fragile(Counter):
    """A Counter in which action 0.75 kills its process, 0.5 hangs it and 0.25 is an error of the simulator."""

    def advance(self, actions: torch.Tensor, remaining_steps: torch.Tensor) -> Outcome:
        first = actions[remaining_steps > 0, 0, 0]
        if bool((first == 0.75).any()):
            sys.stderr.write("a physics engine says\nthat memory is corrupt\n")
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        if bool((first == 0.5).any()):
            time.sleep(1000.0)
        if bool((first == 0.25).any()):
            raise ArithmeticError("a quarter is not allowed")
        return super().advance(actions, remaining_steps)


@dataclass
class MadeTask(Task, ProcessOptions):
    """Environments of a `kind`; what must be there for it to be made is `needed`."""

    name: str = "made"
    kind: str = "counter"
    executed: int = 3
    step_limit: int = 9
    tasks: int = 2
    share: int = 1
    needed: str | None = None

    distributions = ("anywhere",)

    @property
    def group(self) -> int:
        return self.share

    def contract(self, distribution: str) -> Contract:
        return self.environment(1, distribution, "train").contract

    def environment(
        self, num_envs: int, distribution: str, split: str, seed: int = 0, device: str = "cpu"
    ) -> Environment:
        if self.needed and not Path(self.needed).exists():
            sys.exit(f"no simulator without {self.needed}")
        options: dict[str, Any] = {"executed": self.executed, "step_limit": self.step_limit, "seed": seed}
        if self.kind == "reach":
            return Reach(num_envs, horizon=self.executed, tasks=self.tasks, **options)
        if self.kind in ("nameless", "single"):
            return Nameless(num_envs, self.tasks, seed) if self.kind == "nameless" else Single(num_envs)
        if self.kind == "costly":
            return Costly(num_envs, tasks=self.tasks, **options)
        return Fragile(num_envs, tasks=self.tasks, group=self.share, **options)

    def video(self, path: Path, policies: object, device: str, distribution: str | None, first: int) -> None:
        return
