"""Placements by the value of the option `placement`, and the default of the environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

from omegaconf import MISSING

from embodied.configuration import Configuration, NonNegativeInt, PositiveInt, Range
from embodied.errors import UserError
from embodied.placement.local import Local, Processes
from embodied.placement.ray import RayConfig

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables that torchrun sets."""


@dataclass
class LocalConfig(Configuration):
    """One process, on one device.

    With several `collectors` each is a thread with its part of the `num_envs` environments, and the policy acts for one
    while others simulate: worth it for a policy on a GPU and simulators on the CPU. Rollouts are used up to
    `max_staleness` updates after their weights were sent (0: collectors wait for each update).
    """

    collectors: PositiveInt = 1
    max_staleness: NonNegativeInt = 0

    def __post_init__(self) -> None:
        """Raise UserError for numbers that are out of range or do not go together."""
        super().__post_init__()
        if self.collectors == 1 and self.max_staleness:
            raise UserError("placement.max_staleness is of several collectors; use overlap=true, or collectors=2")

    @contextmanager
    def start(self, device: str) -> Iterator[Processes]:
        """Start the run's process, with its threads."""
        if self.collectors == 1:
            yield Local(device=device)
            return
        from embodied.placement.threads import ThreadPlacement

        processes = ThreadPlacement(device=device, collectors=self.collectors, staleness=self.max_staleness)
        try:
            yield processes
        finally:
            processes.close()


@dataclass
class TorchrunConfig(Configuration):
    """Processes of torchrun, each with its share of the environments.

    A collective operation that takes longer than `timeout_s` ends the run. `shard` divides weights and optimiser among
    the processes (FSDP2) where a policy names its layers; null: on CUDA. `processes` is the required number, with
    which plan=true computes, too; null: any number.
    """

    timeout_s: Annotated[float, Range(at_least=1)] = 600.0
    shard: bool | None = None
    processes: PositiveInt | None = None

    @property
    def size(self) -> int:
        """Number of processes: torchrun's, or the configured number."""
        return int(os.environ.get("WORLD_SIZE", self.processes or 1))

    @contextmanager
    def start(self, device: str) -> Iterator[Processes]:
        """Join this process with the others.

        Raises:
            UserError: if it was not started by torchrun, or with a wrong number of processes, or the others are
            unreachable.
        """
        processes = self.processes or 2
        if missing := [name for name in VARIABLES if name not in os.environ]:
            command = f"torchrun --nproc-per-node={processes} {sys.argv[0]}"
            raise UserError(f"placement=torchrun needs torchrun's {', '.join(missing)}: {command} task=... starts them")
        if self.processes not in (None, self.size):
            raise UserError(
                f"expected placement.processes={self.processes}, but torchrun has started {self.size}: use "
                f"--nproc-per-node={self.processes}, on several nodes less, or placement.processes={self.size}"
            )
        from embodied.placement.torchrun import Torchrun

        with Torchrun(device, self.timeout_s, self.shard) as processes:
            yield processes


PLACEMENTS: dict[str, type] = {"local": LocalConfig, "ray": RayConfig, "torchrun": TorchrunConfig}


@dataclass
class PlacementOptions(Configuration):
    """Placement of a run: `placement` is local, ray or torchrun; torchrun is implied where it starts the program."""

    placement: Any = MISSING


def started_by_torchrun() -> bool:
    """Whether the environment has torchrun's variables."""
    return all(name in os.environ for name in VARIABLES)


def with_placement(arguments: Sequence[str], saved: Mapping[str, Any] | None = None) -> list[str]:
    """Add a placement to `arguments` without one, if it differs from the default or from that of a `saved` run.

    It is torchrun if that started this process; a run that torchrun had started before continues in one process
    otherwise.
    """
    if any(each.startswith("placement=") for each in arguments):
        return [*arguments]
    if started_by_torchrun():
        return [*arguments, "placement=torchrun"]
    saved_placement = (saved or {}).get("values", {}).get("placement", {})
    return [*arguments, "placement=local"] if "shard" in saved_placement else [*arguments]
