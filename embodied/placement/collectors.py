"""Rollouts from collectors in other processes, which may be slow, late or dead; independent of Ray.

An update needs as many rollouts as there are collectors. With `max_staleness` 0 each collector returns one, by the
newest weights, and waits for the next. With more, collectors continue with the weights that they have, and an update
takes the rollouts that are ready; as many are started as can be learned from in time (AReaL, arXiv 2505.24298): before
an update takes its own, running and waiting ones are at most (max_staleness + 1) x collectors. A rollout that is too
old nevertheless is dropped and counted.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from embodied import seeding
from embodied.placement.worker import CollectorSpec
from embodied.policy import TrainablePolicy
from embodied.rollout.joining import joined
from embodied.rollout.rollout import Rollout

log = logging.getLogger(__name__)


@dataclass
class CollectorHandle:
    """Handle of one collector, with its requests that have no result yet, oldest first."""

    spec: CollectorSpec
    requests: deque[Any] = field(default_factory=deque, kw_only=True)

    @property
    def ready(self) -> bool:
        """Whether its environments exist."""
        raise NotImplementedError

    @property
    def pending(self) -> int:
        """Number of requested rollouts that it has not yet returned."""
        return len(self.requests) if self.ready else 0


class CollectorPool(ABC):
    """Collectors in threads or other processes; the counters only grow."""

    handles: Sequence[Any]
    """A `CollectorHandle` of each collector."""
    lost_episodes: int = 0
    """Number of episodes that were lost with collectors."""
    lost_collectors: int = 0
    sent_bytes: int = 0

    @abstractmethod
    def publish(self, weights: Mapping[str, Tensor]) -> None:
        """Set the `weights`, which the learner will change in place, of all rollouts that are requested from now on."""

    @abstractmethod
    def request(self, handle: Any, version: int, decisions: int) -> None:  # noqa: ANN401 - one of its handles
        """Request a rollout by the published weights, which are those of `version`."""

    @abstractmethod
    def receive(self) -> list[tuple[Any, Rollout]]:
        """Wait briefly, and return the rollouts that have arrived; dead collectors are replaced.

        Raises:
            UserError: if there has been no collector for too long.
        """


class RemoteCollectors:
    """Source of the rollouts of a `pool`, like a `Collector`; the weights are those of `policy`, in this process.

    At the beginning it waits at most `patience_s` for all collectors.
    """

    def __init__(
        self,
        pool: CollectorPool,
        policy: TrainablePolicy,
        *,
        seed: int = 0,
        max_staleness: int = 0,
        patience_s: float = 300.0,
    ) -> None:
        self.pool = pool
        self.policy = policy
        self.seed = seed
        self.max_staleness = max_staleness
        self.patience_s = patience_s
        self.generator = seeding.generator(seed, "noise", device=policy.device)
        self.version = 0  # number of updates so far
        self.waiting: deque[Rollout] = deque()  # returned, and not yet learned from, oldest first
        self.dropped = 0  # rollouts that were too old
        self._last_counters = (0, 0, 0, 0)  # counters up to the last rollout
        self._started = False

    def collect(self, decisions: int) -> Rollout:
        """Collect a rollout of `decisions` in the environments of all available collectors.

        Raises:
            UserError: after `patience_s` without a collector, with the reason why the last one died, and for errors of
            environments.
        """
        if not self._started:
            self._await_all()
        began = time.perf_counter()
        self.pool.publish({name: part.detach() for name, part in self.policy.state_dict().items()})
        rollouts = self._ready(decisions) if self.max_staleness else self._synchronous(decisions)
        waited_s = time.perf_counter() - began
        rollout = joined(rollouts)
        collect_s = rollout.simulation_s + rollout.policy_s
        # of the collectors' time in which this process waited
        share = min(1.0, waited_s / collect_s) if collect_s else 0.0
        lost, metrics = self._counted()
        ages = [self.version - each.policy_version for each in rollouts]
        metrics |= {"waited_s": waited_s, "staleness": sum(ages) / len(ages)}
        metrics |= {f"share_of_staleness_{age}": ages.count(age) / len(ages) for age in range(self.max_staleness + 1)}
        return replace(
            rollout,
            placement_metrics=rollout.placement_metrics | metrics,
            vanished=rollout.vanished + lost,
            simulation_s=share * rollout.simulation_s,
            policy_s=share * rollout.policy_s,
        )

    def _counted(self) -> tuple[int, dict[str, float]]:
        """Number of episodes lost with collectors since the last rollout, and metrics for the log."""
        pool = self.pool
        # differences of the counters since the last rollout
        now = (pool.lost_episodes, pool.lost_collectors, self.dropped, pool.sent_bytes)
        episodes, collectors, dropped, sent = (new - old for new, old in zip(now, self._last_counters, strict=True))
        self._last_counters = now
        return episodes, {
            "collectors": float(sum(handle.ready for handle in pool.handles)),
            "lost_collectors": float(collectors),
            "dropped_rollouts": float(dropped),
            "sent_mb": sent / 1e6,
        }

    def abandon(self) -> None:
        """No-op: collectors have environments of their own, whose episodes continue."""

    def state_dict(self) -> dict[str, Any]:
        """Counters only: the collectors of a resumed run begin new episodes, by the weights of the checkpoint."""
        # for a run that continues with a local collector
        noise = seeding.generator(self.seed, "noise", "after", self.version)
        before = max(handle.spec.restarts for handle in self.pool.handles)
        return {"version": self.version, "before": before, "generator": noise.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`, or a `Collector`'s, with random numbers that were not used before."""
        self.version = state["version"]
        for handle in self.pool.handles:
            handle.spec = replace(handle.spec, restarts=state.get("before", 0) + 1)

    def _await_all(self) -> None:
        """Wait for all collectors for at most `patience_s`, then continue without the missing ones."""
        end = time.monotonic() + self.patience_s
        while missing := sum(not handle.ready for handle in self.pool.handles):
            self.pool.receive()
            if time.monotonic() > end:
                log.warning(f"{missing} of {len(self.pool.handles)} collectors have not begun")
                break
        self._started = True

    def _synchronous(self, decisions: int) -> list[Rollout]:
        """Collect one rollout of each collector by the newest weights; none of those that die in the meantime."""
        rollouts: dict[int, Rollout] = {}
        while True:
            for handle in self.pool.handles:
                if handle.ready and not handle.pending and handle.spec.number not in rollouts:
                    self.pool.request(handle, self.version, decisions)
            if rollouts and not any(handle.ready and handle.pending for handle in self.pool.handles):
                return [rollouts[number] for number in sorted(rollouts)]
            rollouts |= {handle.spec.number: rollout for handle, rollout in self.pool.receive()}

    def _ready(self, decisions: int) -> list[Rollout]:
        """Take as many rollouts as there are collectors, in order of arrival, after requesting the next ones.

        None is requested after they are taken: by the weights of this version it would wait for one update too many.
        """
        while True:
            self._begin(decisions)
            # before an update the oldest rollouts are checked: those too old to learn from are dropped
            fresh = [each for each in self.waiting if self.version - each.policy_version <= self.max_staleness]
            self.dropped += len(self.waiting) - len(fresh)
            self.waiting = deque(fresh)
            needed = max(1, sum(handle.ready for handle in self.pool.handles))
            if len(self.waiting) >= needed:
                return [self.waiting.popleft() for _ in range(needed)]
            self.waiting.extend(rollout for _, rollout in self.pool.receive())

    def _begin(self, decisions: int) -> None:
        """Request rollouts from the least busy collectors, as long as these can be learned from in time."""
        ready = [handle for handle in self.pool.handles if handle.ready]
        while ready:
            handle = min(ready, key=lambda each: each.pending)
            pending = len(self.waiting) + sum(each.pending for each in ready)
            if pending >= (self.max_staleness + 1) * len(ready) or handle.pending > 1:
                return
            self.pool.request(handle, self.version, decisions)
