"""Timed execution of action chunks: returns the current command while the next chunk is being computed.

The time of an action is its observation's time plus its index in control steps. Inference runs in a thread, or inline
if it is fast; its measured latency determines how much of the running chunk will be past when the next one arrives
(`embodied.execution.chunking`). Letters: H actions of a chunk, K of them between observations, A action dimension.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.contract import Contract
from embodied.errors import UserError
from embodied.execution.chunking import (
    Execution,
    Running,
    check_execution,
    follow,
    shifted,
    steps_until,
    steps_within,
)
from embodied.policy import Decision, Policy
from embodied.rollout.memory import Memory
from real_robot.robots.robot import Array, Clock, Reading

log = logging.getLogger(__name__)
LATENCIES = 50
QUANTILE = 0.95
"""The planned latency is this quantile of this many recent ones."""
BACK_OFF_S = 0.1, 5.0
"""First and longest pause after a connection error; each further one in a row doubles the pause."""


@dataclass(frozen=True)
class _Chunk:
    actions: Tensor  # [1, H, A] in the policy's order
    commands: Array  # [H, A] in the robot's
    start_s: float  # time of action 0
    gap: range  # of actions that nobody decided, in place of which the robot holds

    def step(self, now_s: float, control_dt_s: float) -> int:
        """Index of the action for `now_s`; H or more after the end."""
        return max(0, steps_within(now_s - self.start_s, control_dt_s))


class _Inference:
    """One call of the policy, in a thread or inline."""

    def __init__(self, call: Callable[[], Decision], stamp_s: float, overlap: int, clock: Clock) -> None:
        self.stamp_s = stamp_s
        self.overlap = overlap
        self.decision: Decision | None = None
        self.error = ""
        self.transient = False
        self.finished_s = math.inf
        self._call = call
        self._clock = clock

    def run(self) -> None:
        """Call the policy; an exception is stored as `error`, which is `transient` if the server was not reached."""
        try:
            self.decision = self._call()
        except Exception as error:  # any error of a policy is a reason to stop, not to crash the control loop
            self.error = f"inference failed: {type(error).__name__}: {error}"
            self.transient = isinstance(error, OSError)
        self.finished_s = self._clock()


class ChunkExecutor:
    """Runs `policy` on a robot of `contract`; call `observe`, then `action`, in every control period.

    An inference starts with the newest reading once K control steps have passed since the last inference, or earlier if
    the chunk would run out. Inferences run one after the other: commands never pause if H actions cover two of them.
    The first chunk, and the first one after a gap, starts when it arrives, because the robot was holding. All chunks
    are dropped if the clock goes back; a reading from the future is treated as current. With DELAYED a chunk has the d
    actions before its first one, too, and also the first chunk begins d control steps after its observation; inference
    that takes longer is logged. Recurrent policies receive
    their memory; policies with H = 1 may miss one reading. Execution is deterministic if `clock` is and inference runs
    inline. Readings that are not finite never reach the policy; actions that are not finite end the episode.

    If the policy's server cannot be reached or misses its deadline (OSError), the running chunk is dropped, so that the
    robot holds, and inference starts again from a reading that was taken after the pause of `BACK_OFF_S`. Any other
    error of the policy lasts until `reset`.

    Args:
        policy: the policy; its contract has to fit `contract`.
        contract: the robot's contract.
        execution: how commands continue while inference runs.
        clock: the robot's clock, s.
        asynchronous: infer in a thread; otherwise within `observe`.
        latency_s: chunks arrive no earlier than this after their observation, to simulate inference time with simulated
            clocks.
        executed: K; the policy's own if None.
        device: device of the policy.

    Raises:
        UserError: if the contracts differ or `policy` does not support `execution`, or has less delay than `latency_s`.
    """

    def __init__(
        self,
        policy: Policy,
        contract: Contract,
        *,
        execution: Execution,
        clock: Clock,
        asynchronous: bool,
        latency_s: float = 0.0,
        executed: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        check_execution(policy, execution)
        if latency_s < 0.0:
            raise UserError(f"expected latency_s of at least 0, got {latency_s}")
        self._delay = policy.contract.delay
        if self._delay and steps_until(latency_s, policy.contract.control_dt_s) > self._delay:
            raise UserError(self._too_slow(latency_s, policy.contract.control_dt_s))
        self._binding = policy.contract.delayed(0).bind(contract)
        self._policy = policy
        self._execution = execution
        self._clock = clock
        self._device = device
        self._horizon = self._delay + policy.contract.horizon  # with the actions before the chunk
        self._dt_s = policy.contract.control_dt_s
        self._executed = executed or policy.contract.executed
        self._latency_s = latency_s
        self._latencies = deque[float](maxlen=LATENCIES)
        self._was_late = False
        self._worker = _Worker() if asynchronous else None
        self.reset()

    @property
    def latency_s(self) -> float:
        """Planned time from an observation to its chunk."""
        recent = sorted(self._latencies)
        return recent[math.ceil(QUANTILE * len(recent)) - 1] if recent else self._latency_s

    @property
    def reason(self) -> str:
        """Reason for which the last `action` was None; otherwise empty."""
        return self._reason

    def reset(self) -> None:
        """Begin an episode: forget the running chunk, pending inference, memory and errors."""
        self._memory = Memory(self._policy, 1, self._device)
        self._chunk: _Chunk | None = None
        self._pending: _Inference | None = None
        self._now_s = self._stamp_s = self._resume_s = -math.inf
        self._sequence = -1
        self._failures = 0
        self._error = ""
        self._interruption = ""
        self._fault = ""
        self._reason = ""

    def ask(self, policy: Policy) -> None:
        """Replace the policy by `policy`, which wraps the same one, for example to record it."""
        self._policy = policy

    def drop(self, reason: str) -> None:
        """Drop the running chunk and a pending one; the next inference starts from a newer reading."""
        self._chunk = self._pending = None
        self._interruption = reason

    def observe(self, reading: Reading) -> None:
        """Pass in the newest reading, which may start an inference; old or reordered readings are ignored."""
        now_s = self._clock()
        self._take_up(now_s)
        stamp_s = min(reading.stamp_s, now_s)  # a stamp from the future counts as now
        stale = reading.sequence <= self._sequence or stamp_s <= self._stamp_s or stamp_s < self._resume_s
        if stale or self._error or self._pending or not self._due(stamp_s):
            return
        self._fault = reading.fault
        if self._fault:
            return
        # the state is stored before inference, so that the same reading is never used twice
        self._sequence = reading.sequence
        self._stamp_s = stamp_s
        running = self._running(stamp_s)
        self._pending = _Inference(lambda: self._infer(reading, running), stamp_s, int(running.overlap), self._clock)
        if self._worker:
            self._worker.submit(self._pending)
        else:
            self._pending.run()

    def action(self, now_s: float) -> Array | None:
        """The command [A] for `now_s`, in the robot's order; None, with a `reason`, if no chunk covers it."""
        self._take_up(now_s)
        step = self._chunk.step(now_s, self._dt_s) if self._chunk else 0
        if self._horizon == step == 1:
            step = 0  # a sensor as slow as the loop misses a period now and then
        self._reason = self._missing(step, now_s)
        return None if self._reason or self._chunk is None else self._chunk.commands[step]

    def close(self) -> None:
        """End the thread after its current inference."""
        if self._worker:
            self._worker.close()

    def _due(self, stamp_s: float) -> bool:
        """Whether an observation of `stamp_s` starts an inference."""
        if self._chunk is None or self._chunk.step(stamp_s, self._dt_s) >= self._horizon:
            return True
        # the next chunk must arrive before this one ends: observe at most H - latency steps after the last observation
        lasting = self._horizon - steps_until(self.latency_s, self._dt_s)
        every = min(self._executed, max(1, lasting))
        return steps_within(stamp_s - self._stamp_s, self._dt_s) >= every

    def _running(self, stamp_s: float) -> Running:
        """The actions of the running chunk from `stamp_s` on."""
        # without a chunk, no action is frozen or overlaps
        if self._chunk is None:
            zeros = torch.zeros(1, self._horizon, *self._policy.contract.action.shape, device=self._device)
            none = torch.tensor([0], device=self._device)
            return Running(zeros, none, none)
        steps = self._chunk.step(stamp_s, self._dt_s)
        # overlap: actions left in the chunk; frozen: those of them that run before the next chunk can arrive
        overlap = max(0, self._horizon - steps)
        frozen = min(overlap, steps_until(self.latency_s, self._dt_s))
        counts = (torch.tensor([count], device=self._device) for count in (frozen, overlap))
        return Running(shifted(self._chunk.actions, steps), *counts)

    def _infer(self, reading: Reading, running: Running) -> Decision:
        """Call the policy on `reading`; raise ValueError if its actions have another shape or are not finite."""
        observation = {}
        for key, order in self._binding.observation.items():
            spec = self._policy.contract.observation[key]
            if not spec.privileged:
                value = torch.as_tensor(reading.observation[key]).to(self._device, getattr(torch, spec.dtype))
                # reorder elements to the policy's order and add the batch axis [1, ...]
                observation[key] = (value if order is None else value[..., order.to(value.device)]).unsqueeze(0)
        inputs = self._memory.with_observation(TensorDict(observation, batch_size=[1]))
        decision = follow(self._policy, inputs, running, self._execution)
        expected = (1, self._horizon, *self._policy.contract.action.shape)
        if decision.actions.shape != expected:
            raise ValueError(f"expected actions of shape {expected}, got {tuple(decision.actions.shape)}")
        if not bool(decision.actions.isfinite().all()):
            raise ValueError("the policy's actions are not finite, though its observation is")
        return decision

    def _take_up(self, now_s: float) -> None:
        """Switch to a chunk that has arrived; drop all chunks if the clock went back."""
        if now_s < self._now_s:
            self._chunk = self._pending = None
            self._stamp_s = self._resume_s = -math.inf
            self._sequence = -1
        self._now_s = now_s
        inference = self._pending
        if inference is None:
            return
        # a simulated latency delays the arrival; a measured one may be longer
        arrived_s = max(inference.finished_s, inference.stamp_s + self._latency_s)
        if self._worker and not self._worker.alive and inference.finished_s == math.inf:
            self._error = "the inference thread has died"
        if inference.transient and not self._error:
            self._interrupt(inference.error, now_s)
        elif inference.error or self._error:
            self._error = self._error or inference.error
            self._pending = None
        elif inference.decision is not None and now_s >= arrived_s - 1e-6:
            self._pending = None
            self._interruption = ""
            self._failures = 0
            self._latencies.append(arrived_s - inference.stamp_s)
            self._check_delay(arrived_s - inference.stamp_s)
            self._memory.keep([inference.decision])
            # actions stay in the policy's order for inpainting, commands are in the robot's order
            actions = inference.decision.actions
            order = self._binding.action
            commands = (actions if order is None else actions[..., order.to(actions.device)])[0].cpu().numpy()
            gap = range(inference.overlap, self._delay)
            self._chunk = _Chunk(actions, commands, self._start_s(inference, now_s), gap)

    def _interrupt(self, error: str, now_s: float) -> None:
        """Drop the chunk after a connection error; readings during the next pause start no inference."""
        first, longest = BACK_OFF_S
        self._chunk = self._pending = None
        self._interruption = error
        # exponential back-off: first, 2 first, 4 first, ... up to the longest pause
        self._resume_s = now_s + min(longest, first * 2.0 ** min(self._failures, 30))
        self._failures += 1

    def _check_delay(self, latency_s: float) -> None:
        """Log the first inference that took longer than the policy's delay."""
        if self._delay and not self._was_late and steps_until(latency_s, self._dt_s) > self._delay:
            self._was_late = True
            log.warning(self._too_slow(latency_s, self._dt_s))

    def _too_slow(self, latency_s: float, dt_s: float) -> str:
        longest = f"the delay={self._delay} of training ({self._delay * dt_s:.3g} s)"
        return (
            f"inference takes {latency_s:.3g} s, more than {longest}; train with delay={steps_until(latency_s, dt_s)}"
        )

    def _start_s(self, inference: _Inference, now_s: float) -> float:
        """Time of the first action of a chunk that has arrived."""
        # aligned chunks start at their observation; if the old chunk ended meanwhile, the robot held from its end on
        overlap = max(inference.overlap, self._delay)
        if not self._execution.aligned or overlap == 0:
            return now_s
        elapsed = min(overlap, steps_within(now_s - inference.stamp_s, self._dt_s))
        chunk_ended = elapsed < steps_within(now_s - inference.stamp_s, self._dt_s)
        return now_s - elapsed * self._dt_s if chunk_ended else inference.stamp_s

    def _missing(self, step: int, now_s: float) -> str:
        """Describe why no action covers `now_s`; "" if `step` is inside the chunk."""
        if self._error:
            return self._error
        if self._chunk is None:
            return self._fault or self._interruption or "no chunk yet"
        if step in self._chunk.gap:
            return "holding until the chunk begins"
        waited = (
            f"inference has taken {now_s - self._pending.stamp_s:.3f} s"
            if self._pending
            else self._fault or "none is computed"
        )
        if self._pending and self._execution is Execution.SYNCHRONOUS:
            return f"holding while the next chunk is computed: {waited}"
        return f"the chunk has ended: {waited}" if step >= self._horizon else ""


class _Worker:
    """A thread that runs inferences in order."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[_Inference | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="inference", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread is alive."""
        return self._thread.is_alive()

    def submit(self, inference: _Inference) -> None:
        """Run `inference` next."""
        self._queue.put(inference)

    def close(self) -> None:
        """End the thread after its current inference."""
        self._queue.put(None)

    def _run(self) -> None:
        while (inference := self._queue.get()) is not None:
            inference.run()
