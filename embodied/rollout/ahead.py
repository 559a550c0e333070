"""Collection of the next rollout during the learner's update, by the policy from before that update."""

from __future__ import annotations

import copy
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from types import TracebackType
from typing import Any, Self

import torch

from embodied.environment import in_real_time
from embodied.networks.precision import Precision
from embodied.policy import TrainablePolicy
from embodied.rollout.rollout import Collector, Rollout
from embodied.runtime.interrupt import waiting_ended
from embodied.saving.tree import copy_tree


class CollectorAhead:
    """Collector that runs `collector` in a thread: its rollouts are by a policy that is one update old.

    Every rollout has the same numbers as if it had been collected before the update, so that a run is repeatable.
    While entered, this thread and the other have half of PyTorch's threads each. On a CUDA device the collection has a
    stream of its own.
    """

    def __init__(self, collector: Collector, policy: TrainablePolicy, precision: Precision = Precision.FLOAT32) -> None:
        self.collector = collector
        self.policy = policy
        self.precision = precision
        self.generator = collector.generator
        self.version = collector.version
        collector.policy = self.acting = copy.deepcopy(policy)
        collector.memory.of(self.acting)
        self.running: Future[tuple[Rollout, float]] | None = None
        self.began: dict[str, Any] = {}  # the state in which `running` began
        self.threads = torch.get_num_threads()

    def __enter__(self) -> Self:
        """Start the thread."""
        half = max(1, self.threads // 2)
        torch.set_num_threads(half)
        self.thread = ThreadPoolExecutor(1, "collector", torch.set_num_threads, (half,))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Drop the running rollout and stop the thread."""
        self.abandon()
        self.thread.shutdown()
        torch.set_num_threads(self.threads)

    def begin(self, decisions: int) -> None:
        """Start to collect `decisions` chunks in every environment, by the current policy; returns at once."""
        with torch.no_grad():
            self.acting.load_state_dict(self.policy.state_dict())
        self.collector.version = self.version
        self._begin(decisions)

    def collect(self, decisions: int) -> Rollout:
        """Wait for the rollout that is running, or collect one by the current policy.

        Its times are those of waiting.
        """
        if self.running is None:
            self.begin(decisions)
        assert self.running is not None
        wait_began = time.perf_counter()
        rollout, took_s = self.running.result()
        self.running = None
        # Times are scaled by the share that this thread waited: the rest ran during the update.
        share = min(1.0, (time.perf_counter() - wait_began) / max(took_s, 1e-9))
        return replace(rollout, simulation_s=share * rollout.simulation_s, policy_s=share * rollout.policy_s)

    def abandon(self) -> None:
        """Drop the running rollout and the running episodes: new ones begin everywhere."""
        if self.running is not None:
            self.collector.cancelled = True
            # a person may be away who has to begin a robot's episode
            with waiting_ended() if in_real_time(self.collector.env) else nullcontext():
                wait([self.running])
            self.collector.cancelled = False
            self.running = None
        self.collector.abandon()

    def _begin(self, decisions: int) -> None:
        acting = dict(self.acting.state_dict())
        self.began = copy_tree({"collector": self.collector.state_dict(), "acting": acting, "decisions": decisions})
        if self.generator.device.type == "cuda":
            # the other stream must not reuse memory that the learner's stream still reads
            torch.cuda.current_stream(self.generator.device).synchronize()
        self.running = self.thread.submit(self._collect, decisions)

    def _collect(self, decisions: int) -> tuple[Rollout, float]:
        """Rollout, and the time that it took, s."""
        started = time.perf_counter()
        with torch.cuda.stream(self._stream), self.precision.on(self.generator.device):
            rollout = self.collector.collect(decisions)
        if self._stream is not None:
            self._stream.synchronize()
        return rollout, time.perf_counter() - started

    @cached_property
    def _stream(self) -> torch.cuda.Stream | None:
        """Stream of all collections on a CUDA device, because PyTorch reuses a stream's memory in that stream only.

        Memory of an earlier rollout is free for reuse once the learner's stream is done with it, see `_begin`.
        """
        device = self.generator.device
        return torch.cuda.Stream(device) if device.type == "cuda" else None

    def state_dict(self) -> dict[str, Any]:
        """State of the collector; for a running rollout the state in which it began, from which it is repeated."""
        if self.running is None:
            return {"version": self.version, "collector": self.collector.state_dict()}
        return {"version": self.version, **self.began}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.version = state["version"]
        self.collector.load_state_dict(state["collector"])
        if "acting" in state:
            self.acting.load_state_dict(state["acting"])
            self._begin(state["decisions"])
