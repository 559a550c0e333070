"""Learner of a run whose collectors have environments of their own: threads of its process, or actors of Ray."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from embodied import seeding
from embodied.errors import UserError
from embodied.placement.collectors import CollectorPool, RemoteCollectors
from embodied.placement.local import Local, RunParts
from embodied.placement.worker import CollectorRecipe, CollectorSpec, part_of
from embodied.rollout.rollout import RolloutSource
from embodied.rollout.storage import Storage
from embodied.task import RemotelyCollected

OWN = 100
"""Largest number of environments of the learner itself: enough for normalisation statistics."""


@dataclass(frozen=True)
class RemotePlacement(Local):
    """The learner's process of a run with collectors that have environments of their own; `_pool` creates them."""

    remark = (
        "Collectors had environments of their own: a resumed run goes on with its weights and counters, and with new"
        " episodes, initial states and noise."
    )

    @property
    @abstractmethod
    def max_staleness(self) -> int:
        """Updates that the weights of a rollout may be behind."""

    @property
    def patience_s(self) -> float:
        """Seconds to wait for a collector to start; infinite, because threads always start."""
        return math.inf

    @property
    def collector_device(self) -> str:
        """Device of the collectors."""
        return self.device

    @abstractmethod
    def _pool(self, recipe: CollectorRecipe, num_envs: int) -> CollectorPool:
        """Create collectors from `recipe`, which have `num_envs` environments together."""

    def own_envs(self, num_envs: int) -> int:
        """Number of the learner's own environments, for normalisation statistics."""
        return min(num_envs, OWN)

    def remote_collector(self, parts: RunParts) -> RolloutSource:
        """See `Processes.remote_collector`."""
        algorithm = parts.algorithm
        config = parts.config
        seed = parts.seed
        if not isinstance(algorithm, RemotelyCollected):
            raise UserError(
                "collectors are for learners of rollouts that stand alone, algorithm=ppo or grpo: others put episodes"
                " together from successive rollouts, or need gradients of the simulator: use placement=local"
                " placement.collectors=1"
            )
        if self.max_staleness > algorithm.max_staleness:
            raise UserError(
                f"placement.max_staleness={self.max_staleness} is more than the algorithm takes,"
                f" {algorithm.max_staleness}; ppo takes 4, and 8 with algorithm.importance_limit=2"
            )
        if config.overlap:
            raise UserError("overlap=true is for the learner's own environments; use placement.max_staleness=1")
        if config.storage is Storage.DISK:
            raise UserError("storage=disk is for the learner's own environments; collectors have memory: use cpu")
        algorithm.remote_starts(parts.env, seeding.generator(seed, "starts"))  # raises here, not in the collector
        make = partial(part_of, parts.task, self.collector_device)
        device = self.collector_device
        kind = parts.learner.collector
        starts = algorithm.remote_starts
        recipe = CollectorRecipe(make, kind, starts, parts.policy, seed, device, config.precision)
        pool = self._pool(recipe, config.num_envs)
        patience_s = self.patience_s
        return RemoteCollectors(pool, parts.policy, seed=seed, max_staleness=self.max_staleness, patience_s=patience_s)


def collector_specs(collectors: int, num_envs: int) -> Sequence[CollectorSpec]:
    """Environments of each of the `collectors`: contiguous ranges of nearly equal size.

    Raises:
        UserError: for more collectors than environments.
    """
    if collectors > num_envs:
        raise UserError(f"expected num_envs of at least {collectors}, one per collector; got {num_envs}")
    bounds = [num_envs * number // collectors for number in range(collectors + 1)]
    return [CollectorSpec(number, low, bounds[number + 1] - low) for number, low in enumerate(bounds[:-1])]
