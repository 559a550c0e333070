"""Collectors as threads of the learner's process: while one simulates, the policy acts for another.

Simulators and PyTorch release Python's lock while they compute, so that a simulator on the CPU and a policy on a GPU
work at the same time (double-buffered sampling, arXiv 2006.11751).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from embodied import seeding
from embodied.placement.apart import Apart, places
from embodied.placement.worker import Place, Recipe, Worker
from embodied.rollout.rollout import Rollout


@dataclass
class Slot:
    """Handle of one collector, which runs in a thread."""

    place: Place
    thread: ThreadPoolExecutor
    worker: Worker | None = None
    asked: deque[Future[Rollout]] = field(default_factory=deque)

    @property
    def ready(self) -> bool:
        """Whether its environments exist."""
        return self.worker is not None

    @property
    def busy(self) -> int:
        """Number of requested rollouts that it has not yet returned."""
        return len(self.asked)


class Threads:
    """Crew of `collectors` threads that have `num_envs` environments together.

    Raises:
        UserError: for more collectors than environments.
    """

    lost_episodes = lost_collectors = sent_bytes = 0  # threads do not die alone, and nothing is sent

    def __init__(self, recipe: Recipe, num_envs: int, *, collectors: int) -> None:
        self.recipe = recipe
        initializer = torch.set_num_threads, (recipe.threads,)
        self.slots: Sequence[Slot] = [
            Slot(place, ThreadPoolExecutor(1, f"collector {place.number}", *initializer))
            for place in places(collectors, num_envs)
        ]

    def publish(self, weights: Mapping[str, Tensor]) -> None:
        """Store a copy of `weights`, since the learner changes its own."""
        self._weights = {name: part.clone() for name, part in weights.items()}

    def ask(self, slot: Slot, version: int, decisions: int) -> None:
        """Request a rollout from `slot` by the published weights, which are those of `version`."""
        assert slot.worker is not None
        slot.asked.append(slot.thread.submit(slot.worker.collect, self._weights, version, decisions))

    def hear(self) -> list[tuple[Slot, Rollout]]:
        """Wait for a collector, and return the finished rollouts; the first call creates the environments.

        Raises:
            UserError: raised by an environment.
        """
        if not all(slot.ready for slot in self.slots):
            self._build()
            return []
        done, _ = wait([slot.asked[0] for slot in self.slots if slot.asked], return_when=FIRST_COMPLETED)
        finished = [(slot, slot.asked.popleft()) for slot in self.slots if slot.asked and slot.asked[0] in done]
        # the CPU time of threads is counted with this process
        return [(slot, replace(each.result(), placement_metrics={})) for slot, each in finished]

    def _build(self) -> None:
        """Build the collectors one by one: each sets the global generators and threads, which are then restored."""
        threads = torch.get_num_threads()
        with seeding.undisturbed():
            for slot in self.slots:
                worker = Worker()
                worker.build(self.recipe, slot.place, self.recipe.policy.with_new_weights())
                slot.worker = worker
        torch.set_num_threads(threads)

    def close(self) -> None:
        """End running collections at their next decision, and close all environments."""
        for slot in self.slots:
            for each in slot.asked:
                each.cancel()
            if slot.worker:
                slot.worker.collector.cancelled = True
        for slot in self.slots:
            slot.thread.shutdown()
            if slot.worker:
                slot.worker.env.close()


@dataclass(frozen=True)
class Beside(Apart):
    """Learner's process of a run whose collectors are its threads."""

    crews: list[Threads] = field(default_factory=list)

    def _crew(self, recipe: Recipe, num_envs: int) -> Threads:
        threads = max(1, torch.get_num_threads() // self.config.collectors)
        self.crews.append(Threads(replace(recipe, threads=threads), num_envs, collectors=self.config.collectors))
        return self.crews[-1]

    def close(self) -> None:
        """End all collectors."""
        for each in self.crews:
            each.close()
