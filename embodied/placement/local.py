"""A run in one process, and the interface of a run's processes in every placement."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from embodied.errors import UserError
from embodied.policy import TrainablePolicy
from embodied.world import OneProcess, World

if TYPE_CHECKING:
    from embodied.environment import Environment
    from embodied.rollout.rollout import RolloutSource
    from embodied.run_options import ExperimentConfig
    from embodied.task import Learner, LearnerConfig, Task

Result = TypeVar("Result", bound=str | int | bool | None)


class Processes(World, Protocol):
    """Processes of a run, an extended `World`; every process calls the same methods in the same order."""

    @property
    def device(self) -> str:
        """Device of this process."""
        ...

    def lead(self, work: Callable[[], Result]) -> Result:
        """Run `work` in process 0 only and return its result in all; the others wait while process 0 is alive."""
        ...

    def gather(self, tree: Any) -> list[Any]:  # noqa: ANN401 - a tree (`embodied.saving.tree`)
        """Return in process 0 the `tree` of each of the other processes, in order; an empty list in the others."""
        ...

    def join(self, learner: object) -> None:
        """Give all networks of `learner` the weights of process 0, and average their gradients from now on."""
        ...

    def place(self, policy: TrainablePolicy) -> TrainablePolicy:
        """Divide the weights of `policy` among the processes if they are too many for one, and return it."""
        ...

    def whole(self, policy: TrainablePolicy) -> TrainablePolicy:
        """Policy in process 0 that acts as `policy` does, without the other processes."""
        ...

    def write_divided(self, tree: Any, folder: Path) -> tuple[Any, bool]:  # noqa: ANN401 - a tree
        """Write divided tensors of `tree` into `folder`; return the rest, and whether there were any."""
        ...


@runtime_checkable
class Elsewhere(Processes, Protocol):
    """Processes whose collectors have environments of their own, a part each."""

    remark: str
    """Note for the report."""

    def share(self, num_envs: int) -> int:
        """Number of environments of this process, in addition to the collectors' `num_envs`: enough for statistics."""
        ...

    def collector(
        self,
        task: Task,
        algorithm: LearnerConfig,
        learner: Learner,
        env: Environment,
        policy: TrainablePolicy,
        config: ExperimentConfig,
        seed: int,
    ) -> RolloutSource:
        """Source of the rollouts of all collectors, for the `learner` of `policy`, built for `env`.

        The collectors start with the first request.

        Raises:
            UserError: for parts that cannot run in other processes.
        """
        ...


@contextmanager
def one_after_another(world: Processes) -> Iterator[None]:
    """Context in which process 0 runs the body first, so that the others find its files."""
    if world.rank:
        world.lead(lambda: None)
    yield
    if not world.rank:
        world.lead(lambda: None)


def own_share(num_envs: int, world: World) -> int:
    """Number of environments of each process.

    Raises:
        UserError: if `num_envs` is not divisible by the number of processes.
    """
    if isinstance(world, Elsewhere):
        return world.share(num_envs)
    if num_envs % world.size:
        usable = max(1, num_envs // world.size) * world.size
        raise UserError(f"num_envs={num_envs} does not divide among {world.size} processes; use num_envs={usable}")
    return num_envs // world.size


def divides(shard: bool | None, device: str) -> bool:
    """Whether processes of torchrun divide the weights of large policies: `shard`, or on CUDA if that is None."""
    return device.startswith("cuda") if shard is None else shard


@dataclass(frozen=True)
class Local(OneProcess):
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

    def place(self, policy: TrainablePolicy) -> TrainablePolicy:
        """The unchanged `policy`."""
        return policy

    def whole(self, policy: TrainablePolicy) -> TrainablePolicy:
        """The same `policy`."""
        return policy

    def write_divided(self, tree: Any, folder: Path) -> tuple[Any, bool]:  # noqa: ANN401 - a tree
        """The whole `tree`, of which nothing is divided."""
        return tree, False
