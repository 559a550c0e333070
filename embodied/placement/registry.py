"""Placements by the name given as `placement=`, and which one the environment asks for."""

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
"""What torchrun tells its processes."""


@dataclass
class LocalConfig(Configuration):
    """One process, on one device.

    With several `collectors` each is a thread with its part of the `num_envs` environments, and the policy acts for one
    while others simulate: worth it for a policy on a GPU and simulators on the CPU. Rollouts are learned from up to
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
        """The process."""
        if self.collectors == 1:
            yield Local(device=device)
            return
        from embodied.placement.threads import Beside

        beside = Beside(device=device, config=self)
        try:
            yield beside
        finally:
            beside.close()


@dataclass
class TorchrunConfig(Configuration):
    """The processes of torchrun, each with its share of the environments.

    A collective operation that takes longer than `timeout_s` ends the run. `shard` divides weights and optimiser among
    the processes (FSDP2) where a policy names its layers; null: on CUDA. `processes` is how many there have to be, by
    which plan=true counts, too; null: any number.
    """

    timeout_s: Annotated[float, Range(at_least=1)] = 600.0
    shard: bool | None = None
    processes: PositiveInt | None = None

    @property
    def size(self) -> int:
        """Number of processes: torchrun's, or how many there have to be."""
        return int(os.environ.get("WORLD_SIZE", self.processes or 1))

    @contextmanager
    def start(self, device: str) -> Iterator[Processes]:
        """This process among the others.

        Raises:
            UserError: if torchrun did not start it, or not as many as have to be, or the others cannot be reached.
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
    """Where a run is: `placement` is local, ray or torchrun, which need not be given where torchrun starts it."""

    placement: Any = MISSING


def started_by_torchrun() -> bool:
    """Whether the environment has torchrun's variables."""
    return all(name in os.environ for name in VARIABLES)


def with_placement(arguments: Sequence[str], saved: Mapping[str, Any] | None = None) -> list[str]:
    """`arguments`, with a placement if they name none and it is another one than the default, or that of a `saved` run.

    That is torchrun where that started this process; where it did not, a run that it had started goes on in one.
    """
    if any(each.startswith("placement=") for each in arguments):
        return [*arguments]
    if started_by_torchrun():
        return [*arguments, "placement=torchrun"]
    before = (saved or {}).get("values", {}).get("placement", {})
    return [*arguments, "placement=local"] if "shard" in before else [*arguments]
