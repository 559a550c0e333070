"""A discrete-event model of collectors, inference and a learner, for `scale_model.py`.

`RemoteCollectors` itself, the code of a run, decides when rollouts are requested, accepted and dropped; its pool of
collectors is simulated here: time is a number that jumps from event to event. Collectors wait for a simulator with a
device of its own, and optionally share cores with each other and with the learner.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.errors import UserError
from embodied.placement.collectors import CollectorPool, RemoteCollectors
from embodied.placement.worker import CollectorSpec
from embodied.policy import TrainablePolicy
from embodied.rollout.rollout import Rollout

Then = Callable[[], None]
WARM_UP = 4
"""Iterations before the first that counts, in addition to the staleness of rollouts."""


@dataclass(frozen=True)
class Line:
    """A time that grows linearly with a number: `base` + `each` * number, s."""

    base: float
    each: float

    def __call__(self, number: float) -> float:
        """Time for `number`, s."""
        return self.base + self.each * number


@dataclass(frozen=True)
class Costs:
    """Durations of the parts, s; CPU time unless stated otherwise.

    Raises:
        UserError: for negative or infinite values, and without decisions or environments.
    """

    decisions: int
    """Of a rollout in each environment."""
    environments: int
    """Of each collector."""
    wait_s: float
    """Time of the simulator's device, without CPU, for a step of all environments of a collector."""
    step_s: float
    """CPU time of such a step."""
    act: Line
    """Time of the policy by number of environments."""
    update: Line
    """Time of an update by number of decisions."""
    publish_s: float = 0.0
    """Time to publish weights."""
    ask_s: float = 0.0
    """Time to request a rollout of a collector."""
    receive_s: float = 0.0
    """Time to receive a rollout."""
    transit_s: float = 0.0
    """Latency from a request to the first decision plus latency from the last decision to the learner, without CPU."""
    round_trip_s: float = 0.0
    """Round trip to the inference server, without CPU."""
    spread: float = 0.0
    """Standard deviation of a rollout's time over its mean."""

    def __post_init__(self) -> None:
        """See `Raises`."""
        if min(self.decisions, self.environments) < 1:
            raise UserError(f"expected decisions and environments, got {self.decisions} and {self.environments}")
        for each in fields(self):
            value = getattr(self, each.name)
            for number in (value.base, value.each) if isinstance(value, Line) else (value,):
                if not (math.isfinite(number) and number >= 0):
                    raise UserError(f"expected {each.name} of at least 0, got {value}")


@dataclass(frozen=True)
class Setting:
    """Number of collectors, and their cooperation with the learner.

    Rollouts may be `max_staleness` updates old: 0 is synchronous, 1 collects during the update. `central` inference
    runs on one server, which acts at once for all waiting collectors. `speeds[m - 1]` is the total number of cores of
    `m` busy processes on a shared machine; the last value holds for more processes. None: all have their own cores.

    Raises:
        UserError: for impossible numbers.
    """

    collectors: int
    max_staleness: int = 0
    central: bool = False
    speeds: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        """See `Raises`."""
        if self.collectors < 1 or self.max_staleness < 0:
            raise UserError(
                f"expected collectors and max_staleness of at least 1 and 0, got {self.collectors} and"
                f" {self.max_staleness}"
            )
        if self.speeds is not None and (not self.speeds or not min(self.speeds) > 0):
            raise UserError(f"expected speeds above 0, got {self.speeds}")


@dataclass(frozen=True)
class Outcome:
    """Results of a setting: control steps per second, shares of time, ages of rollouts in updates."""

    steps_per_s: float
    learning: float
    """Share of time in which the learner updates, or sends and takes rollouts."""
    collecting: float
    """Share of time in which a collector collects."""
    inferring: float
    """Share of time in which the central server acts."""
    staleness: float
    dropped: float
    """Rollouts that were too old, of all."""


class Clock:
    """Processes events in the order of their times."""

    def __init__(self) -> None:
        self.now, self._events, self._order = 0.0, [], itertools.count()

    def after(self, seconds: float, then: Then) -> None:
        """Schedule a call of `then` after a delay."""
        heapq.heappush(self._events, (self.now + seconds, next(self._order), then))

    def until(self, over: Callable[[], object]) -> None:
        """Process events until `over`."""
        while not over():
            self.now, _, then = heapq.heappop(self._events)
            then()


class Cores:
    """Cores that all jobs share equally; for `speeds`, see `Setting`."""

    def __init__(self, clock: Clock, speeds: Sequence[float] | None) -> None:
        self.clock, self.speeds = clock, speeds
        self.jobs: list[tuple[float, int, Then]] = []  # by what each will have been given when it is done
        self.given = self.at = 0.0  # CPU time of each job that is there since the beginning, and when it was so
        self.order = itertools.count()
        self.plan = 0

    def serve(self, seconds: float, then: Then) -> None:
        """Call `then` after an amount of CPU time."""
        if self.speeds is None:
            return self.clock.after(seconds, then)
        self._give()
        heapq.heappush(self.jobs, (self.given + seconds, next(self.order), then))
        self._expect()

    def _rate(self) -> float:
        assert self.speeds is not None
        return self.speeds[min(len(self.jobs), len(self.speeds)) - 1] / len(self.jobs)

    def _give(self) -> None:
        if self.jobs:
            self.given += (self.clock.now - self.at) * self._rate()
        self.at = self.clock.now

    def _expect(self) -> None:
        """Schedule the end of the job that ends first, and cancel earlier schedules."""
        self.plan += 1
        if self.jobs:
            self.clock.after(max(0.0, self.jobs[0][0] - self.given) / self._rate(), partial(self._end, self.plan))

    def _end(self, plan: int) -> None:
        if plan == self.plan:
            self._give()
            then = heapq.heappop(self.jobs)[2]
            self._expect()
            then()


class Server:
    """Inference server for all collectors: it acts at once for all that wait."""

    def __init__(self, clock: Clock, cores: Cores, costs: Costs) -> None:
        self.clock, self.cores, self.costs = clock, cores, costs
        self.waiting: list[Then] = []
        self.busy, self.busy_s = False, 0.0

    def act(self, then: Then) -> None:
        """Call `then` when the actions are computed."""
        self.clock.after(self.costs.round_trip_s / 2, partial(self._come, then))

    def _come(self, then: Then) -> None:
        self.waiting.append(then)
        if not self.busy:
            self.busy = True
            self.clock.after(0.0, self._begin)  # with all that come at the same time

    def _begin(self) -> None:
        batch, self.waiting, self.busy = self.waiting, [], True
        self.cores.serve(
            self.costs.act(len(batch) * self.costs.environments), partial(self._end, batch, self.clock.now)
        )

    def _end(self, batch: list[Then], began: float) -> None:
        self.busy, self.busy_s = False, self.busy_s + self.clock.now - began
        for then in batch:
            self.clock.after(self.costs.round_trip_s / 2, then)
        if self.waiting:
            self._begin()


@dataclass
class SimulatedCollector:
    """A simulated collector."""

    spec: CollectorSpec
    requests: deque[int] = field(default_factory=deque)  # versions
    pending: int = 0
    """Number of requested rollouts that the learner has not received yet."""
    busy_s: float = 0.0
    ready = True


class Simulated(CollectorPool):
    """A `CollectorPool` in simulated time."""

    def __init__(self, costs: Costs, setting: Setting, seed: int) -> None:
        self.costs, self.clock, self.random = costs, Clock(), random.Random(seed)
        self.cores = Cores(self.clock, setting.speeds)
        self.server = Server(self.clock, self.cores, costs) if setting.central else None
        self.handles = [SimulatedCollector(CollectorSpec(number, number, 1)) for number in range(setting.collectors)]
        self.arrived: list[tuple[SimulatedCollector, int]] = []
        self.learner_s = 0.0

    def work(self, seconds: float) -> None:
        """Let the learner compute, while all others continue."""
        done: list[bool] = []
        start_s = self.clock.now
        self.cores.serve(seconds, lambda: done.append(True))
        self.clock.until(lambda: done)
        self.learner_s += self.clock.now - start_s

    def publish(self, weights: Mapping[str, Tensor]) -> None:
        """Simulate the time of publishing weights."""
        self.work(self.costs.publish_s)

    def request(self, handle: SimulatedCollector, version: int, decisions: int) -> None:
        """Request a rollout of `handle`, which begins at once or after its current one."""
        self.work(self.costs.ask_s)
        handle.requests.append(version)
        handle.pending += 1
        if len(handle.requests) == 1:
            self._begin(handle)

    def receive(self) -> list[tuple[SimulatedCollector, Rollout]]:
        """Wait for a rollout; returns all that have arrived, each with one environment instead of the collector's."""
        self.clock.until(lambda: self.arrived)
        rollouts, self.arrived = self.arrived, []
        for handle, _ in rollouts:
            handle.pending -= 1
        self.work(self.costs.receive_s * len(rollouts))
        return [(handle, _rollout(version)) for handle, version in rollouts]

    def _begin(self, handle: SimulatedCollector) -> None:
        spread = math.sqrt(math.log1p(self.costs.spread**2))  # of a log-normal distribution with a mean of 1
        factor = self.random.lognormvariate(-(spread**2) / 2, spread)
        self.clock.after(
            self.costs.transit_s, partial(self._decide, handle, self.costs.decisions, factor, self.clock.now)
        )

    def _decide(self, handle: SimulatedCollector, left: int, factor: float, began: float) -> None:
        """Simulate the next of `left` remaining decisions."""
        costs = self.costs
        if not left:
            return self._come(handle, began)
        following = partial(self._decide, handle, left - 1, factor, began)
        computed = partial(self.clock.after, costs.wait_s * factor, following)
        if self.server:
            return self.server.act(partial(self.cores.serve, costs.step_s * factor, computed))
        act_s = costs.act(costs.environments)
        if self.cores.speeds is None:  # no other event happens between its decisions
            decision = act_s + factor * (costs.step_s + costs.wait_s)
            return self.clock.after(left * decision, partial(self._come, handle, began))
        self.cores.serve(act_s + costs.step_s * factor, computed)

    def _come(self, handle: SimulatedCollector, began: float) -> None:
        handle.busy_s += self.clock.now - began
        self.arrived.append((handle, handle.requests.popleft()))
        if handle.requests:
            self._begin(handle)


def simulate(costs: Costs, setting: Setting, *, updates: int = 20, seed: int = 0) -> Outcome:
    """Simulate `setting` for a number of updates, after a warm-up.

    Raises:
        UserError: without updates.
    """
    if updates < 1:
        raise UserError(f"expected updates of at least 1, got {updates}")
    pool = Simulated(costs, setting, seed)
    collectors = RemoteCollectors(pool, cast(TrainablePolicy, _NoWeights()), max_staleness=setting.max_staleness)
    counts_before, rollouts, ages = _counts(pool, collectors), 0, 0.0
    for update in range(WARM_UP + setting.max_staleness + updates):
        if update == WARM_UP + setting.max_staleness:
            counts_before, rollouts, ages = _counts(pool, collectors), 0, 0.0
        rollout = collectors.collect(1)
        count = rollout.done.shape[1]
        rollouts, ages = rollouts + count, ages + count * rollout.placement_metrics["staleness"]
        pool.work(costs.update(count * costs.decisions * costs.environments))
        collectors.version += 1
    counts_after = _counts(pool, collectors)
    took, learner, collected, acted, dropped = (new - old for new, old in zip(counts_after, counts_before, strict=True))
    return Outcome(
        rollouts * costs.decisions * costs.environments / took,
        learner / took,
        collected / took / setting.collectors,
        acted / took,
        ages / rollouts,
        dropped / (rollouts + dropped),
    )


def _counts(pool: Simulated, collectors: RemoteCollectors) -> tuple[float, ...]:
    acted = pool.server.busy_s if pool.server else 0.0
    return pool.clock.now, pool.learner_s, sum(handle.busy_s for handle in pool.handles), acted, collectors.dropped


class _NoWeights:
    """The part of a policy that `RemoteCollectors` reads."""

    device = torch.device("cpu")

    def state_dict(self) -> dict[str, Any]:
        return {}


def _rollout(version: int) -> Rollout:
    """A rollout of one decision of one environment, which only marks its arrival."""
    empty, no, zero = TensorDict({}, batch_size=[1, 1]), torch.zeros(1, 1, dtype=torch.bool), torch.zeros(1, 1, 1)
    return Rollout(
        observation=empty,
        last_observation=empty[0],
        actions=zero,
        sample=empty,
        log_prob=zero,
        reward=zero,
        executed=no,
        terminated=no,
        truncated=no,
        success=no,
        task_index=no[0],
        policy_version=version,
    )
