"""What collectors with environments of their own need of a run, whether they are threads here or actors of Ray."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, cast

from embodied import seeding
from embodied.environment import Environment
from embodied.errors import UserError
from embodied.placement.collectors import Crew, RemoteCollectors
from embodied.placement.worker import Place, Recipe, part_of
from embodied.policy import TrainablePolicy
from embodied.rollout.rollout import Collector
from embodied.rollout.storage import Storage
from embodied.task import Learner, LearnerConfig, RemotelyCollected, Task
from embodied.training.config import ExperimentConfig

OWN = 100
"""Environments of the learner itself, at most: enough for normalisation statistics."""


class Apart(Protocol):
    """Options of a placement whose collectors have environments of their own."""

    collectors: int
    max_staleness: int
    patience_s: float


def collector(
    task: Task, algorithm: LearnerConfig, learner: Learner, env: Environment, policy: TrainablePolicy,
    config: ExperimentConfig, seed: int, *, options: Apart, device: str, threads: int,
    crew: Callable[[Recipe, int], Crew],
) -> Collector:  # fmt: skip
    """What gives `learner` the rollouts of a `crew`, which is made of a recipe and the number of all environments.

    Collectors compute on `device`, with so many `threads` each.

    Raises:
        UserError: for parts that cannot be apart, before anything runs.
    """
    if not isinstance(algorithm, RemotelyCollected):
        raise UserError(
            "collectors are for learners of rollouts that stand alone, algorithm=ppo or grpo: others put episodes"
            " together from successive rollouts, or need gradients of the simulator: use placement=local"
            " placement.collectors=1"
        )
    if options.max_staleness > algorithm.max_staleness:
        raise UserError(
            f"placement.max_staleness={options.max_staleness} is more than the algorithm takes,"
            f" {algorithm.max_staleness}; ppo takes 4, and 8 with algorithm.importance_limit=2"
        )
    if config.overlap:
        raise UserError("overlap=true is for the learner's own environments; use placement.max_staleness=1")
    if config.storage is Storage.DISK:
        raise UserError("storage=disk is for the learner's own environments; collectors have memory: use cpu")
    algorithm.remote_starts(env, seeding.generator(seed, "starts"))  # refuses now what it would refuse there
    recipe = Recipe(
        partial(part_of, task, device), learner.collector, algorithm.remote_starts, policy, seed, device,
        config.precision, threads,
    )  # fmt: skip
    made = crew(recipe, config.num_envs)
    staleness, patience_s = options.max_staleness, options.patience_s
    return cast(Collector, RemoteCollectors(made, policy, seed=seed, max_staleness=staleness, patience_s=patience_s))


def places(collectors: int, num_envs: int) -> Sequence[Place]:
    """Which environments each of the `collectors` has.

    Raises:
        UserError: for more collectors than environments.
    """
    if collectors > num_envs:
        raise UserError(f"expected num_envs of at least {collectors}, one per collector; got {num_envs}")
    bounds = [num_envs * number // collectors for number in range(collectors + 1)]
    return [Place(number, low, bounds[number + 1] - low) for number, low in enumerate(bounds[:-1])]
