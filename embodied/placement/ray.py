"""Collectors as actors of a Ray cluster (arXiv 1712.05889), on any number of machines; those that die are replaced."""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

from torch import Tensor

from embodied import seeding
from embodied.configuration import Configuration, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from embodied.errors import UserError
from embodied.extras import needs_extra
from embodied.placement.collectors import CollectorHandle, CollectorPool
from embodied.placement.remote import RemotePlacement, collector_specs
from embodied.placement.worker import CollectorHost, CollectorRecipe, Worker, software
from embodied.rollout.rollout import Rollout

log = logging.getLogger(__name__)
ZERO_COPY = ("RAY_ENABLE_ZERO_COPY_TORCH_TENSORS", "1")
TICK_S = 0.5
"""Period at which a waiting learner checks whether a collector hangs, s."""
REACH_S = 5.0
"""Timeout of a connection to the head node, s."""
LONGEST_REST_S = 60.0
"""Longest pause before the restart of a collector that died repeatedly without a rollout, s."""


@dataclass
class RayConfig(Configuration):
    """Collectors on a Ray cluster, and the learner in this process.

    `collectors` have `num_envs` environments together, each its part, on `cpus` and `gpus` of any machine. `address` is
    null (Ray is started here, for this run), auto (the cluster that this machine is in) or HOST:PORT of a head node.
    Rollouts are used up to `max_staleness` updates after their weights were sent (0: synchronous). A collector
    that returns nothing for `timeout_s` counts as dead; dead ones are replaced, and the run ends after `patience_s`
    without any.
    """

    collectors: PositiveInt = 2
    address: str | None = None
    max_staleness: NonNegativeInt = 0
    cpus: NonNegativeFloat = 1.0
    gpus: NonNegativeFloat = 0.0
    timeout_s: PositiveFloat = 600.0
    patience_s: PositiveFloat = 300.0

    @contextmanager
    def start(self, device: str) -> Iterator[RayPlacement]:
        """Connect this process to the cluster.

        Raises:
            UserError: see `cluster`.
        """
        with cluster(self):
            yield RayPlacement(device=device, config=self)


def library() -> Any:  # noqa: ANN401 - a module
    """Import Ray without usage statistics, with zero-copy tensors, and with time to start on a busy machine.

    Raises:
        UserError: if it is not installed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")
    os.environ.setdefault(*ZERO_COPY)
    warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # such tensors are only read
    warnings.filterwarnings("ignore", "Zero-copy tensor serialization is enabled")
    with needs_extra("ray"):
        return import_module("ray")


@contextmanager
def cluster(config: RayConfig) -> Iterator[None]:
    """Context connected to the cluster of `config`; a cluster that was started for it ends with the body.

    Raises:
        UserError: without Ray, and where there is no head node at the address.
    """
    ray = library()
    if ray.is_initialized():  # the caller's cluster
        yield
        return
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    if config.address is None:
        cores = max(os.cpu_count() or 1, math.ceil(config.collectors * config.cpus))
        options |= {"address": "local", "num_cpus": cores, "include_dashboard": False}
    else:
        reach(config.address)
        options |= {"address": config.address, "runtime_env": {"env_vars": dict([ZERO_COPY])}}
    with _own_signals():
        try:
            ray.init(**options)
        except Exception as error:  # of many classes, with messages of several lines
            raise UserError(
                f"Ray cannot be started, or joined at placement.address={config.address} ({_first_line(error)})"
            ) from error
    try:
        yield
    finally:
        ray.shutdown()


def reach(address: str) -> None:
    """Raise UserError unless something listens at `address`, HOST:PORT: Ray itself would try for minutes."""
    if address == "auto":
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise UserError(f"expected placement.address=null, auto or HOST:PORT, got {address}")
    try:
        socket.create_connection((host, int(port)), REACH_S).close()
    except OSError as error:
        raise UserError(
            f"no Ray head node at placement.address={address} ({error}); start one with `ray start --head`, and see"
            " whether this machine reaches it"
        ) from error


@contextmanager
def _own_signals() -> Iterator[None]:
    """Context that restores the handler of SIGTERM, which saves the run: Ray sets its own."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


@dataclass
class _Request:
    """Task of a collector, and the time since which it runs."""

    result: Any  # Ray's reference
    since: float


@dataclass
class _ActorHandle(CollectorHandle):
    """Handle of a collector, which is replaced when it dies."""

    actor: Any = None
    host: CollectorHost | None = None  # None: its environments do not exist yet
    failures: int = 0  # consecutive deaths before a rollout
    rest_until: float = 0.0

    @property
    def ready(self) -> bool:
        """Whether its environments exist."""
        return self.host is not None


class RayCollectors(CollectorPool):
    """Pool of `config.collectors` actors that have `num_envs` environments together; `cluster` has to be entered.

    Raises:
        UserError: for more collectors than environments.
    """

    def __init__(self, config: RayConfig, recipe: CollectorRecipe, num_envs: int) -> None:
        self.ray = library()
        self.config = config
        self.handles = [_ActorHandle(spec) for spec in collector_specs(config.collectors, num_envs)]
        try:
            self._recipe = self.ray.put(recipe)
            self._weights = None
        except (TypeError, AttributeError) as error:  # cannot be pickled
            raise UserError(
                f"what collectors are made of cannot be sent to them ({_first_line(error)}); viewer=true and objects of"
                " one process need placement=local"
            ) from error
        self._size = 0
        self._reason = ""  # reason why the last collector died
        self._alone_since: float | None = None  # time since which there is no collector, s
        self._once = False  # whether there has been a collector

    def close(self) -> None:
        """End all collectors."""
        for handle in self.handles:
            self._end(handle)

    def publish(self, weights: Mapping[str, Tensor]) -> None:
        """Put `weights` where every collector can fetch them."""
        self._size = sum(part.nbytes for part in weights.values())
        self._weights = self.ray.put({name: part.cpu() for name, part in weights.items()})

    def request(self, handle: _ActorHandle, version: int, decisions: int) -> None:
        """Request a rollout from `handle` by the published weights, which are those of `version`."""
        handle.requests.append(
            _Request(handle.actor.collect.remote(self._weights, version, decisions), time.monotonic())
        )
        self.sent_bytes += self._size

    def receive(self) -> list[tuple[_ActorHandle, Rollout]]:
        """Wait briefly for collectors, and return their rollouts; dead collectors are replaced.

        Raises:
            UserError: if there has been no collector for too long.
        """
        for handle in self.handles:
            if handle.actor is None and time.monotonic() >= handle.rest_until:
                self._spawn(handle)
        pending = {handle.requests[0].result: handle for handle in self.handles if handle.requests}
        if pending:
            # all finished ones at once; only if there are none, wait for one
            done, _ = self.ray.wait(list(pending), num_returns=len(pending), timeout=0)
            done = done or self.ray.wait(list(pending), num_returns=1, timeout=TICK_S)[0]
        else:
            done = []
            time.sleep(TICK_S)
        rollouts = []
        for result in done:
            handle = pending[result]
            if (rollout := self._take(handle)) is not None:
                rollouts.append((handle, rollout))
        for handle in self.handles:
            self._check_alive(handle)
        self._check_patience()
        return rollouts

    def _take(self, handle: _ActorHandle) -> Rollout | None:
        """Take the result of `handle`: a rollout, or None if it has become ready or has died."""
        task = handle.requests.popleft()
        try:
            value = self.ray.get(task.result, timeout=self.config.timeout_s)
        except self.ray.exceptions.RayTaskError as error:  # raised by our code in the actor
            if isinstance(error.cause, UserError):
                raise UserError(str(error.cause)) from None
            raise
        except self.ray.exceptions.RayError as error:
            self._died(handle, _first_line(error))
            return None
        if handle.requests:
            handle.requests[0].since = time.monotonic()
        if isinstance(value, CollectorHost):
            self._admit(handle, value)
            return None
        handle.failures = 0
        return value

    def _spawn(self, handle: _ActorHandle) -> None:
        """Start a collector in `handle`, on the machine with most free resources."""
        actor_class = self.ray.remote(Worker).options(
            num_cpus=self.config.cpus, num_gpus=self.config.gpus, max_restarts=0, scheduling_strategy="SPREAD"
        )
        handle.actor = actor_class.remote()
        handle.host = None
        handle.requests = deque([_Request(handle.actor.build.remote(self._recipe, handle.spec), time.monotonic())])

    def _admit(self, handle: _ActorHandle, host: CollectorHost) -> None:
        """Accept a collector if its software is the same as here.

        Raises:
            UserError: if it is not, and there has never been a collector.
        """
        if differences := host.differences(software()):
            reason = f"node {host.node} has {differences}; install the same everywhere"
            if not self._once:
                raise UserError(f"placement=ray: {reason}")
            return self._died(handle, reason)
        handle.host = host
        self._once = True

    def _died(self, handle: _ActorHandle, reason: str) -> None:
        """Count the losses with the collector of `handle`, which will be replaced."""
        episodes = handle.spec.count if handle.ready else 0
        node = f" on {handle.host.node}" if handle.host else ""
        log.warning(
            f"collector {handle.spec.number}{node} is gone ({reason}); {episodes} episodes are lost, another one takes"
            " its place"
        )
        self._reason = reason
        self.lost_episodes += episodes
        self.lost_collectors += 1
        handle.failures += 1
        # exponential back-off: 0, 1, 3, 7, ... s
        handle.rest_until = time.monotonic() + min(LONGEST_REST_S, 2.0 ** (handle.failures - 1) - 1.0)
        handle.spec = replace(handle.spec, restarts=handle.spec.restarts + 1)
        self._end(handle)

    def _end(self, handle: _ActorHandle) -> None:
        if handle.actor is not None:
            self.ray.kill(handle.actor)
        handle.actor = None
        handle.host = None
        handle.requests.clear()

    def _check_alive(self, handle: _ActorHandle) -> None:
        """Treat a collector that hangs as dead."""
        if not handle.requests:
            return
        limit_s = self.config.timeout_s if handle.ready else self.config.patience_s
        if time.monotonic() - handle.requests[0].since > limit_s:
            self._died(handle, f"it has not answered for {limit_s:g} s" if handle.ready else self._unplaced())

    def _check_patience(self) -> None:
        """Raise UserError if there has been no collector for `patience_s`."""
        if any(handle.ready for handle in self.handles):
            self._alone_since = None
            return
        now = time.monotonic()
        self._alone_since = self._alone_since or now
        if now - self._alone_since > self.config.patience_s:
            why = self._reason or self._unplaced()
            raise UserError(
                f"no collector could be had for placement.patience_s={self.config.patience_s:g}: {why}; resume= goes on"
                " from the last checkpoint"
            )

    def _unplaced(self) -> str:
        """Known reason why a collector has not started."""
        resources = self.ray.cluster_resources()
        return (
            f"it did not begin for {self.config.patience_s:g} s; each needs {self.config.cpus:g} CPUs and"
            f" {self.config.gpus:g} GPUs, the cluster has {resources.get('CPU', 0):g} and {resources.get('GPU', 0):g}"
        )


@dataclass(frozen=True)
class RayPlacement(RemotePlacement):
    """Learner's process of a run whose collectors are on a cluster."""

    config: RayConfig = field(default_factory=RayConfig)

    @property
    def max_staleness(self) -> int:
        """Updates that the weights of a rollout may be behind."""
        return self.config.max_staleness

    @property
    def patience_s(self) -> float:
        """Seconds to wait for a collector to start."""
        return self.config.patience_s

    @property
    def collector_device(self) -> str:
        """Device of the collectors."""
        return "cuda" if self.config.gpus else "cpu"

    def _pool(self, recipe: CollectorRecipe, num_envs: int) -> RayCollectors:
        with seeding.undisturbed():
            cpu_policy = recipe.policy.with_new_weights().to("cpu")
        recipe = replace(recipe, policy=cpu_policy, threads=max(1, int(self.config.cpus)))
        return RayCollectors(self.config, recipe, num_envs)


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
