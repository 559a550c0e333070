"""A task with its environments in child processes."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from omegaconf import OmegaConf

from embodied.configuration import Configuration
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
    """The task `task`, a dataclass of options, with environments in child processes, see `ProcessOptions`.

    If the children have another interpreter, they also make demonstrations and contracts, which need the simulator, and
    there are no films. Otherwise this process makes them.
    """

    def __init__(self, task: Task, options: ProcessOptions) -> None:
        super().__init__(task)
        self.options = options
        module = type(task).__module__
        self.processes = max(1, options.processes)
        self._description = {"task": f"{module}:{type(task).__qualname__}", "options": _resolved(task)}
        threads = max(1, (os.cpu_count() or 1) // self.processes)
        self._pool = Pool(options.python, module.partition(".")[0], threads)

    def __reduce__(self) -> tuple[type[RemoteTask], tuple[Task, ProcessOptions]]:
        """Pickle the task and its options; a copy in another process has children of its own."""
        return RemoteTask, (self.task, self.options)

    def contract(self, distribution: str) -> Contract:
        """Contract of the task, from a child if it has another interpreter."""
        if not self.options.python:
            return self.task.contract(distribution)
        return Contract.from_dict(self._ask({"do": "contract", "distribution": distribution}, START_S)["contract"])

    def environment(
        self, num_envs: int, distribution: str, split: str, seed: int = 0, device: str = "cpu"
    ) -> Environment:
        """Make environments in child processes, on the CPU.

        Raises:
            UserError: for errors of the task in a child, and if the interpreter or one of its packages is missing.
        """
        num_envs = min(num_envs, self.options.max_envs or num_envs)
        return remote(
            self._description | {"distribution": distribution, "split": split},
            num_envs,
            seed=seed,
            group=self.options.group_of(distribution),
            processes=self.processes,
            pool=self._pool,
            timeout_s=self.options.timeout_s,
        )

    def demonstrations(self, directory: Path, seed: int) -> Episodes | None:
        """Demonstrations of the task, made by a child if it has another interpreter."""
        if not self.options.python:
            return self.task.demonstrations(directory, seed)
        message = {"do": "demonstrate", "directory": str(directory.resolve()), "seed": seed}
        return read(directory / FOLDER)[0] if self._ask(message, None)["found"] else None

    def video(
        self, path: Path, policies: Mapping[str, Policy], device: str, distribution: str | None = None, first: int = 0
    ) -> None:
        """Film the task in this process; no-op with a warning if the children have another interpreter."""
        if self.options.python:
            log.warning(f"no film: the simulator is that of {self.options.python}")
        else:
            self.task.video(path, policies, device, distribution, first)

    def _ask(self, message: dict[str, Any], timeout_s: float | None) -> dict[str, Any]:
        child = self._pool.take()
        try:
            reply = child.ask(self._description | message, timeout_s)
        except Died as error:
            raise UserError(f"a process of the simulator {error}") from None
        self._pool.give(child)
        return reply


def in_processes(task: T) -> T | RemoteTask:
    """`task` with its environments in child processes, or `task` itself if its options need none.

    Raises:
        UserError: for impossible options.
    """
    if not isinstance(task, ProcessOptions):
        return task
    task = task.settled()
    if not (task.processes or task.python):
        return task
    return RemoteTask(task, task)


def _resolved(task: Task) -> dict[str, Any]:
    """Options of `task` as JSON values, with defaults for `processes` and `python`."""
    values = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.structured(task), enum_to_str=True))
    if isinstance(task, Configuration):
        values |= task.recorded()
    return json.loads(json.dumps(values | {"processes": 0, "python": None}))
