"""Any task with its environments in child processes."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from omegaconf import OmegaConf

from embodied.contract import Contract
from embodied.data.episodes import FOLDER, Episodes, read
from embodied.environment import Environment
from embodied.environments.wrapping import WrappedTask
from embodied.errors import UserError
from embodied.policy import Policy
from embodied.task import Task
from sims.remote.children import START_S, Died, Pool
from sims.remote.environment import remote
from sims.remote.options import ProcessOptions

log = logging.getLogger(__name__)
T = TypeVar("T", bound=Task)


class RemoteTask(WrappedTask):
    """`task`, a dataclass of options, with environments in child processes as its `ProcessOptions` ask.

    Where the children have another interpreter, they make demonstrations and contracts too, which take a simulator;
    there are no films then. Else those are made in this process.
    """

    def __init__(self, task: Task, options: ProcessOptions) -> None:
        super().__init__(task)
        self.options = options
        module, self.processes = type(task).__module__, max(1, options.processes)
        self._told = {"task": f"{module}:{type(task).__qualname__}", "options": _resolved(task)}
        threads = max(1, (os.cpu_count() or 1) // self.processes)
        self._pool = Pool(options.python, module.partition(".")[0], threads)

    def __reduce__(self) -> tuple[type[RemoteTask], tuple[Task, ProcessOptions]]:
        """Sent to another process, it has children of its own there."""
        return RemoteTask, (self.task, self.options)

    def contract(self, distribution: str) -> Contract:
        """As `Task.contract`."""
        if not self.options.python:
            return self.task.contract(distribution)
        return Contract.from_dict(self._ask({"do": "contract", "distribution": distribution}, START_S)["contract"])

    def environment(
        self, num_envs: int, distribution: str, split: str, seed: int = 0, device: str = "cpu"
    ) -> Environment:
        """As `Task.environment`; on the CPU.

        Raises:
            UserError: as in the child, and where there is no interpreter or it lacks a package.
        """
        num_envs = min(num_envs, self.options.most_envs or num_envs)
        return remote(
            self._told | {"distribution": distribution, "split": split},
            num_envs,
            seed=seed,
            group=self.options.group_of(distribution),
            processes=self.processes,
            pool=self._pool,
            timeout_s=self.options.timeout_s,
        )

    def demonstrations(self, directory: Path, seed: int) -> Episodes | None:
        """As `Task.demonstrations`."""
        if not self.options.python:
            return self.task.demonstrations(directory, seed)
        about = {"do": "demonstrate", "directory": str(directory.resolve()), "seed": seed}
        return read(directory / FOLDER)[0] if self._ask(about, None)["found"] else None

    def video(
        self, path: Path, policies: Mapping[str, Policy], device: str, distribution: str | None = None, first: int = 0
    ) -> None:
        """As `Task.video`, in this process; none where the simulator is another interpreter's."""
        if self.options.python:
            log.warning(f"no film: the simulator is that of {self.options.python}")
        else:
            self.task.video(path, policies, device, distribution, first)

    def _ask(self, message: dict[str, Any], timeout_s: float | None) -> dict[str, Any]:
        child = self._pool.take()
        try:
            reply = child.ask(self._told | message, timeout_s)
        except Died as error:
            raise UserError(f"a process of the simulator {error}") from None
        self._pool.give(child)
        return reply


def in_processes(task: T) -> T | RemoteTask:
    """`task` with its environments where its options say; itself where those ask for nothing.

    Raises:
        UserError: for impossible options.
    """
    if not isinstance(task, ProcessOptions):
        return task
    task = task.settled()
    if not (task.processes or task.python):
        return task
    return RemoteTask(cast(Task, task), task)


def _resolved(task: Task) -> dict[str, Any]:
    """The options of `task` as JSON values, without those that say where it runs."""
    values = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.structured(task), enum_to_str=True))
    return json.loads(json.dumps(values | {"processes": 0, "python": None}))
