"""Processes with torchrun's variables, forked from one that has imported what they need.

Imports take most of the time of a small run.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta

from torch.distributed.rendezvous import TCPStore

from tests.programs import Completed

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.placement.run", "tests.placement.worker", "embodied.placement.torchrun"])


def run_processes(count: int, main: Callable[[list[str]], int | None], *arguments: object) -> Completed:
    """Run `main` with `arguments` in `count` processes that train together, or in one alone."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60.0))
    shared = {"WORLD_SIZE": count, "MASTER_ADDR": "localhost", "MASTER_PORT": store.port}
    shared |= {"TORCHELASTIC_USE_AGENT_STORE": True, "OMP_NUM_THREADS": 1}
    with tempfile.NamedTemporaryFile("r") as stderr:
        processes = []
        for rank in range(count):
            variables = shared | {"RANK": rank, "LOCAL_RANK": rank} if count > 1 else {}
            environment = {name: str(value) for name, value in variables.items()}
            started = main, [*map(str, arguments)], environment, stderr.name
            processes.append(FORKS.Process(target=_process, args=started))
            processes[-1].start()
        for process in processes:
            process.join()
        statuses = [process.exitcode for process in processes]
        return Completed(next((status for status in statuses if status), 0), "", stderr.read())


def _process(
    main: Callable[[list[str]], int | None], arguments: list[str], environment: dict[str, str], stderr: str
) -> None:
    os.environ.update(environment)
    with open(stderr, "a") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(main(arguments))
