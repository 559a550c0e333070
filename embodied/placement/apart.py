"""Learner of a run whose collectors have environments of their own: threads of its process, or actors of Ray."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from embodied import seeding
from embodied.environment import Environment
from embodied.errors import UserError
from embodied.placement.collectors import Crew, RemoteCollectors
from embodied.placement.local import Local
from embodied.placement.worker import Place, Recipe, part_of
from embodied.policy import TrainablePolicy
from embodied.rollout.rollout import RolloutSource
from embodied.rollout.storage import Storage
from embodied.run_options import ExperimentConfig
from embodied.task import Learner, LearnerConfig, RemotelyCollected, Task

OWN = 100
"""Largest number of environments of the learner itself: enough for normalisation statistics."""


class Collectors(Protocol):
    """Options of a placement with several collectors."""

    collectors: int
    max_staleness: int


@dataclass(frozen=True)
class Apart(Local):
    """The learner's process, see `Elsewhere`; `_crew` creates the collectors."""

    config: Collectors = field(kw_only=True)
    remark = (
        "Collectors had environments of their own: a resumed run goes on with its weights and counters, and with new"
        " episodes, initial states and noise."
    )

    @property
    def patience_s(self) -> float:
        """Seconds to wait for a collector to start; infinite, because threads always start."""
        return math.inf

    @property
    def collecting_on(self) -> str:
        """Device of the collectors."""
        return self.device

    def _crew(self, recipe: Recipe, num_envs: int) -> Crew:
        """Create collectors from `recipe`, which have `num_envs` environments together."""
        raise NotImplementedError

    def share(self, num_envs: int) -> int:
        """Number of the learner's own environments, for normalisation statistics."""
        return min(num_envs, OWN)

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
        """See `Elsewhere.collector`."""
        staleness = self.config.max_staleness
        if not isinstance(algorithm, RemotelyCollected):
            raise UserError(
                "collectors are for learners of rollouts that stand alone, algorithm=ppo or grpo: others put episodes"
                " together from successive rollouts, or need gradients of the simulator: use placement=local"
                " placement.collectors=1"
            )
        if staleness > algorithm.max_staleness:
            raise UserError(
                f"placement.max_staleness={staleness} is more than the algorithm takes, {algorithm.max_staleness}; ppo"
                " takes 4, and 8 with algorithm.importance_limit=2"
            )
        if config.overlap:
            raise UserError("overlap=true is for the learner's own environments; use placement.max_staleness=1")
        if config.storage is Storage.DISK:
            raise UserError("storage=disk is for the learner's own environments; collectors have memory: use cpu")
        algorithm.remote_starts(env, seeding.generator(seed, "starts"))  # raises here instead of in the collector
        make = partial(part_of, task, self.collecting_on)
        recipe = Recipe(
            make, learner.collector, algorithm.remote_starts, policy, seed, self.collecting_on, config.precision
        )
        crew = self._crew(recipe, config.num_envs)
        return RemoteCollectors(crew, policy, seed=seed, max_staleness=staleness, patience_s=self.patience_s)


def places(collectors: int, num_envs: int) -> Sequence[Place]:
    """Environments of each of the `collectors`: contiguous ranges of nearly equal size.

    Raises:
        UserError: for more collectors than environments.
    """
    if collectors > num_envs:
        raise UserError(f"expected num_envs of at least {collectors}, one per collector; got {num_envs}")
    bounds = [num_envs * number // collectors for number in range(collectors + 1)]
    return [Place(number, low, bounds[number + 1] - low) for number, low in enumerate(bounds[:-1])]
