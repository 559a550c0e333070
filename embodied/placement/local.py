"""A run in one process, and what a run asks of its processes wherever they are."""

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
    """What a run asks of its processes beside a `World`; every one calls the same methods in the same order."""

    @property
    def device(self) -> str:
        """The device of this process."""
        ...

    def lead(self, work: Callable[[], Result]) -> Result:
        """What `work` returns in process 0, which alone does it; the others wait as long as that is alive."""
        ...

    def gather(self, tree: Any) -> list[Any]:  # noqa: ANN401 - a tree (`embodied.saving.tree`)
        """In process 0 the `tree` of each of the others, in order; elsewhere nothing."""
        ...

    def join(self, learner: object) -> None:
        """Give all networks of `learner` the weights of process 0, and average their gradients from now on."""
        ...

    def place(self, policy: TrainablePolicy) -> TrainablePolicy:
        """`policy`, whose weights are divided among the processes if they are too many for one."""
        ...

    def whole(self, policy: TrainablePolicy) -> TrainablePolicy:
        """In process 0 a policy that acts as `policy` does, without the other processes."""
        ...

    def write_divided(self, tree: Any, folder: Path) -> tuple[Any, bool]:  # noqa: ANN401 - a tree
        """Write divided tensors of `tree` into `folder`; returns the rest, and whether there were any."""
        ...


@runtime_checkable
class Elsewhere(Processes, Protocol):
    """Processes that learn from environments somewhere else, where collectors have a part of them each."""

    remark: str
    """What a report says of it."""

    def share(self, num_envs: int) -> int:
        """Environments of this process, beside the `num_envs` of all collectors: enough for statistics."""
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
        """What gives the `learner` of `policy`, built for `env`, the rollouts of all collectors; it begins when asked.

        Raises:
            UserError: for parts that cannot be somewhere else.
        """
        ...


@contextmanager
def one_after_another(world: Processes) -> Iterator[None]:
    """Process 0 runs the body first; the others find what it has made."""
    if world.rank:
        world.lead(lambda: None)
    yield
    if not world.rank:
        world.lead(lambda: None)


def own_share(num_envs: int, world: World) -> int:
    """Environments of each process.

    Raises:
        UserError: if `num_envs` does not divide.
    """
    if isinstance(world, Elsewhere):
        return world.share(num_envs)
    if num_envs % world.size:
        usable = max(1, num_envs // world.size) * world.size
        raise UserError(f"num_envs={num_envs} does not divide among {world.size} processes; use num_envs={usable}")
    return num_envs // world.size


def divides(shard: bool | None, device: str) -> bool:
    """Whether processes of torchrun divide the weights of large policies, as `shard` says; if it is None, on CUDA."""
    return device.startswith("cuda") if shard is None else shard


@dataclass(frozen=True)
class Local(OneProcess):
    """The only process of a run."""

    device: str = "cpu"

    def lead(self, work: Callable[[], Result]) -> Result:
        """What `work` returns."""
        return work()

    def gather(self, tree: Any) -> list[Any]:  # noqa: ANN401 - a tree
        """Nothing: there are no others."""
        return []

    def join(self, learner: object) -> None:
        """Nothing: there are no others."""

    def place(self, policy: TrainablePolicy) -> TrainablePolicy:
        """`policy` unchanged."""
        return policy

    def whole(self, policy: TrainablePolicy) -> TrainablePolicy:
        """`policy` itself."""
        return policy

    def write_divided(self, tree: Any, folder: Path) -> tuple[Any, bool]:  # noqa: ANN401 - a tree
        """`tree`: nothing is divided."""
        return tree, False
