"""A run in one process, and the interface of a run's processes in every placement."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from embodied.errors import UserError
from embodied.policy import TrainablePolicy
from embodied.world import OneProcess

if TYPE_CHECKING:
    from embodied.environment import Environment
    from embodied.rollout.rollout import RolloutSource
    from embodied.run_options import ExperimentConfig
    from embodied.task import Learner, LearnerConfig, Task

Result = TypeVar("Result", bound=str | int | bool | None)


@dataclass(frozen=True)
class RunParts:
    """Parts of a run from which collectors with environments of their own are built.

    The `learner` of `policy` was built by `algorithm` for the environments `env`.
    """

    task: Task
    algorithm: LearnerConfig
    learner: Learner
    env: Environment
    policy: TrainablePolicy
    config: ExperimentConfig
    seed: int


class Processes(ABC):
    """Base class of a run's processes, a `World`; every process calls the same methods in the same order.

    `rank`, `size` and `device` are those of this process; `remark` is a note for the report.
    """

    rank: int
    size: int
    device: str
    remark: str = ""

    @abstractmethod
    def sum(self, values: Tensor) -> Tensor:
        """See `World.sum`."""

    @abstractmethod
    def mean(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """See `World.mean`."""

    @abstractmethod
    def lead(self, work: Callable[[], Result]) -> Result:
        """Run `work` in process 0 only and return its result in all; the others wait while process 0 is alive."""

    @abstractmethod
    def gather(self, tree: Any) -> list[Any]:  # noqa: ANN401 - a tree (`embodied.saving.tree`)
        """Return in process 0 the `tree` of each of the other processes, in order; an empty list in the others."""

    @abstractmethod
    def join(self, learner: object) -> None:
        """Give all networks of `learner` the weights of process 0, and average their gradients from now on."""

    def place(self, policy: TrainablePolicy) -> TrainablePolicy:
        """Divide the weights of `policy` among the processes if they are too many for one, and return it."""
        return policy

    def whole(self, policy: TrainablePolicy) -> TrainablePolicy:
        """Policy in process 0 that acts as `policy` does, without the other processes."""
        return policy

    def write_divided(self, tree: Any, folder: Path) -> tuple[Any, bool]:  # noqa: ANN401 - a tree
        """Write divided tensors of `tree` into `folder`; return the rest, and whether there were any."""
        return tree, False

    def own_envs(self, num_envs: int) -> int:
        """Number of this process's environments, of the run's `num_envs`.

        Raises:
            UserError: if `num_envs` is not divisible by the number of processes.
        """
        return divided_envs(num_envs, self.size)

    def remote_collector(self, parts: RunParts) -> RolloutSource | None:
        """Source of the rollouts of collectors with environments of their own; None: this process collects.

        The collectors start with the first request.

        Raises:
            UserError: for parts that cannot run in other processes.
        """
        return None


@contextmanager
def one_after_another(world: Processes) -> Iterator[None]:
    """Context in which process 0 runs the body first, so that the others find its files."""
    if world.rank:
        world.lead(lambda: None)
    yield
    if not world.rank:
        world.lead(lambda: None)


def divided_envs(num_envs: int, processes: int) -> int:
    """Number of environments of each of `processes`.

    Raises:
        UserError: if they cannot have the same number.
    """
    if num_envs % processes:
        usable = max(1, num_envs // processes) * processes
        raise UserError(f"num_envs={num_envs} does not divide among {processes} processes; use num_envs={usable}")
    return num_envs // processes


def divides(shard: bool | None, device: str) -> bool:
    """Whether processes of torchrun divide the weights of large policies: `shard`, or on CUDA if that is None."""
    return device.startswith("cuda") if shard is None else shard


@dataclass(frozen=True)
class Local(OneProcess, Processes):
    """Only process of a run."""

    device: str = "cpu"

    def lead(self, work: Callable[[], Result]) -> Result:
        """Run `work` and return its result."""
        return work()

    def gather(self, tree: Any) -> list[Any]:  # noqa: ANN401 - a tree
        """No other processes: an empty list."""
        return []

    def join(self, learner: object) -> None:
        """No-op."""
