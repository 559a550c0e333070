"""Collectors as threads of the learner's process: while one simulates, the policy acts for another.

Simulators and PyTorch release Python's lock while they compute, so that a simulator on the CPU and a policy on a GPU
work at the same time (double-buffered sampling, arXiv 2006.11751).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from embodied import seeding
from embodied.placement.collectors import CollectorHandle, CollectorPool
from embodied.placement.remote import RemotePlacement, collector_specs
from embodied.placement.worker import CollectorRecipe, Worker
from embodied.rollout.rollout import Rollout


@dataclass
class ThreadHandle(CollectorHandle):
    """Handle of a collector in a thread; its requests are futures."""

    thread: ThreadPoolExecutor
    worker: Worker | None = None

    @property
    def ready(self) -> bool:
        """Whether its environments exist."""
        return self.worker is not None


class ThreadCollectors(CollectorPool):
    """Pool of `collectors` threads that have `num_envs` environments together.

    Raises:
        UserError: for more collectors than environments.
    """

    def __init__(self, recipe: CollectorRecipe, num_envs: int, *, collectors: int) -> None:
        self.recipe = recipe
        initializer = torch.set_num_threads, (recipe.threads,)
        self.handles: Sequence[ThreadHandle] = [
            ThreadHandle(spec, ThreadPoolExecutor(1, f"collector {spec.number}", *initializer))
            for spec in collector_specs(collectors, num_envs)
        ]

    def publish(self, weights: Mapping[str, Tensor]) -> None:
        """Store a copy of `weights`, since the learner changes its own."""
        self._weights = {name: part.clone() for name, part in weights.items()}

    def request(self, handle: ThreadHandle, version: int, decisions: int) -> None:
        """Request a rollout from `handle` by the published weights, which are those of `version`."""
        assert handle.worker is not None
        handle.requests.append(handle.thread.submit(handle.worker.collect, self._weights, version, decisions))

    def receive(self) -> list[tuple[ThreadHandle, Rollout]]:
        """Wait for a collector, and return the finished rollouts; the first call creates the environments.

        Raises:
            UserError: raised by an environment.
        """
        if not all(handle.ready for handle in self.handles):
            self._build()
            return []
        done, _ = wait([handle.requests[0] for handle in self.handles if handle.requests], return_when=FIRST_COMPLETED)
        finished = [
            (handle, handle.requests.popleft())
            for handle in self.handles
            if handle.requests and handle.requests[0] in done
        ]
        # the CPU time of threads is counted with this process
        return [(handle, replace(each.result(), placement_metrics={})) for handle, each in finished]

    def _build(self) -> None:
        """Build the collectors one by one: each sets the global generators and threads, which are then restored."""
        threads = torch.get_num_threads()
        with seeding.undisturbed():
            for handle in self.handles:
                worker = Worker()
                worker.build(self.recipe, handle.spec, self.recipe.policy.with_new_weights())
                handle.worker = worker
        torch.set_num_threads(threads)

    def close(self) -> None:
        """End running collections at their next decision, and close all environments."""
        for handle in self.handles:
            for each in handle.requests:
                each.cancel()
            if handle.worker:
                handle.worker.collector.cancelled = True
        for handle in self.handles:
            handle.thread.shutdown()
            if handle.worker:
                handle.worker.env.close()


@dataclass(frozen=True)
class ThreadPlacement(RemotePlacement):
    """Learner's process of a run whose collectors are its threads."""

    collectors: int = 2
    staleness: int = 0
    pools: list[ThreadCollectors] = field(default_factory=list)

    @property
    def max_staleness(self) -> int:
        """Updates that the weights of a rollout may be behind."""
        return self.staleness

    def _pool(self, recipe: CollectorRecipe, num_envs: int) -> ThreadCollectors:
        recipe = replace(recipe, threads=max(1, torch.get_num_threads() // self.collectors))
        self.pools.append(ThreadCollectors(recipe, num_envs, collectors=self.collectors))
        return self.pools[-1]

    def close(self) -> None:
        """End all collectors."""
        for each in self.pools:
            each.close()
