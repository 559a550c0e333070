"""Rollouts from collectors in other processes, which may be slow, late or dead; it knows nothing of Ray.

An update needs as many rollouts as there are collectors. With `max_staleness` 0 each gives one, by the newest weights,
and waits for the next. With more, collectors go on with the weights that they have, and an update takes the rollouts
that are ready; as many are begun as can be learned from in time (AReaL, arXiv 2505.24298): before an update takes its
own, running and waiting ones are at most (max_staleness + 1) x collectors. One that is too old all the same is dropped
and counted.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor

from embodied import seeding
from embodied.placement.worker import Place
from embodied.policy import TrainablePolicy
from embodied.rollout.joining import joined
from embodied.rollout.rollout import Rollout

log = logging.getLogger(__name__)


class Slot(Protocol):
    """The place of one collector."""

    place: Place

    @property
    def ready(self) -> bool:
        """It has made its environments."""
        ...

    @property
    def busy(self) -> int:
        """Rollouts that it was asked for and has not given."""
        ...


class Crew(Protocol):
    """Collectors in other processes."""

    lost_episodes: int
    """Episodes that were running in collectors that died; this and the following only grow."""
    lost_collectors: int
    sent_bytes: int

    @property
    def slots(self) -> Sequence[Slot]:
        """All places."""
        ...

    def publish(self, weights: Mapping[str, Tensor]) -> None:
        """What is asked for from now on is collected with `weights`, which the learner will change in place."""
        ...

    def ask(self, slot: Any, version: int, decisions: int) -> None:  # noqa: ANN401 - one of its slots
        """Ask `slot` for a rollout by the weights of `version`."""
        ...

    def hear(self) -> list[tuple[Any, Rollout]]:
        """Wait a moment; what slots gave. Dead collectors are replaced.

        Raises:
            UserError: if there has been no collector for too long.
        """
        ...


class RemoteCollectors:
    """Collects like a `Collector`, by a `crew`; the weights are those of `policy`, in this process.

    Collectors that are not there after `patience_s` are not waited for at the beginning.
    """

    def __init__(
        self, crew: Crew, policy: TrainablePolicy, *, seed: int = 0, max_staleness: int = 0, patience_s: float = 300.0
    ) -> None:
        self.crew, self.policy, self.seed = crew, policy, seed
        self.max_staleness, self.patience_s = max_staleness, patience_s
        self.generator = seeding.generator(seed, "noise", device=policy.device)
        self.version = 0  # number of updates so far
        self.waiting: deque[Rollout] = deque()  # given, and not learned from yet, oldest first
        self.dropped = 0  # rollouts that were too old
        self._told = (0, 0, 0, 0)  # what was counted up to the last rollout
        self._begun = False

    def collect(self, decisions: int) -> Rollout:
        """A rollout of `decisions` of all collectors that are there, side by side.

        Raises:
            UserError: after `patience_s` without a collector, with what became of the last one, and for an environment
                that raises it.
        """
        if not self._begun:
            self._await_all()
        began = time.perf_counter()
        self.crew.publish({name: part.detach() for name, part in self.policy.state_dict().items()})
        given = self._ready(decisions) if self.max_staleness else self._synchronous(decisions)
        waited_s = time.perf_counter() - began
        rollout = joined(given)
        spent = rollout.simulation_s + rollout.policy_s
        share = min(1.0, waited_s / spent) if spent else 0.0  # of the time that collectors took, this process waited
        lost, told = self._counted()
        ages = [self.version - each.policy_version for each in given]
        told |= {"waited_s": waited_s, "staleness": sum(ages) / len(ages)}
        told |= {f"share_of_staleness_{age}": ages.count(age) / len(ages) for age in range(self.max_staleness + 1)}
        return replace(
            rollout,
            told=rollout.told | told,
            vanished=rollout.vanished + lost,
            simulation_s=share * rollout.simulation_s,
            policy_s=share * rollout.policy_s,
        )

    def _counted(self) -> tuple[int, dict[str, float]]:
        """Episodes that were lost with collectors since the last rollout, and what the log tells."""
        crew = self.crew
        now = (crew.lost_episodes, crew.lost_collectors, self.dropped, crew.sent_bytes)
        episodes, collectors, dropped, sent = (new - old for new, old in zip(now, self._told, strict=True))
        self._told = now
        return episodes, {
            "collectors": float(sum(slot.ready for slot in crew.slots)),
            "lost_collectors": float(collectors),
            "dropped_rollouts": float(dropped),
            "sent_mb": sent / 1e6,
        }

    def abandon(self) -> None:
        """Collectors have environments of their own: nothing that happens in this process ends their episodes."""

    def state_dict(self) -> dict[str, Any]:
        """Counters alone: a resumed run's collectors begin new episodes, by the weights of the checkpoint."""
        noise = seeding.generator(self.seed, "noise", "after", self.version)  # for a run that goes on here
        before = max(slot.place.before for slot in self.crew.slots)
        return {"version": self.version, "before": before, "generator": noise.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`, or a `Collector`'s, with other random numbers than those used before."""
        self.version = state["version"]
        for slot in self.crew.slots:
            slot.place = replace(slot.place, before=state.get("before", 0) + 1)

    def _await_all(self) -> None:
        """Wait for all collectors, for a while: without those that have not come by then it goes on."""
        end = time.monotonic() + self.patience_s
        while missing := sum(not slot.ready for slot in self.crew.slots):
            self.crew.hear()
            if time.monotonic() > end:
                log.warning(f"{missing} of {len(self.crew.slots)} collectors have not begun")
                break
        self._begun = True

    def _synchronous(self, decisions: int) -> list[Rollout]:
        """One rollout of each collector by the newest weights; of those that die meanwhile, none."""
        given: dict[int, Rollout] = {}
        while True:
            for slot in self.crew.slots:
                if slot.ready and not slot.busy and slot.place.number not in given:
                    self.crew.ask(slot, self.version, decisions)
            if given and not any(slot.ready and slot.busy for slot in self.crew.slots):
                return [given[number] for number in sorted(given)]
            given |= {slot.place.number: rollout for slot, rollout in self.crew.hear()}

    def _ready(self, decisions: int) -> list[Rollout]:
        """As many rollouts as there are collectors, of those that came first; the next ones are begun before.

        After they are taken none is begun: by the weights of this version it would wait for one update too many.
        """
        while True:
            self._begin(decisions)
            fresh = [each for each in self.waiting if self.version - each.policy_version <= self.max_staleness]
            self.dropped += len(self.waiting) - len(fresh)
            self.waiting = deque(fresh)
            wanted = max(1, sum(slot.ready for slot in self.crew.slots))
            if len(self.waiting) >= wanted:
                return [self.waiting.popleft() for _ in range(wanted)]
            self.waiting.extend(rollout for _, rollout in self.crew.hear())

    def _begin(self, decisions: int) -> None:
        """Ask those with the least to do for rollouts, as long as these can be learned from in time."""
        up = [slot for slot in self.crew.slots if slot.ready]
        while up:
            slot = min(up, key=lambda each: each.busy)
            begun = len(self.waiting) + sum(each.busy for each in up)
            if begun >= (self.max_staleness + 1) * len(up) or slot.busy > 1:
                return
            self.crew.ask(slot, self.version, decisions)
