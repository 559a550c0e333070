"""Writes recordings in a background thread while a robot runs; see `recording.py` for the format."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from embodied.contract import Contract, TensorSpec
from embodied.errors import UserError
from embodied.extras import needs_extra
from embodied.saving.files import flush
from real_robot.recording import cdr
from real_robot.recording.mcap_file import RECORD_BYTES
from real_robot.recording.recording import (
    END,
    FORMAT,
    METADATA,
    ROOT,
    Decided,
    Ended,
    Episode,
    Gap,
    Item,
    Tick,
    header_crc32,
)
from real_robot.robots.robot import Array, Clock, Reading
from real_robot.safety.safety import Verdict

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

    from embodied.execution.chunking import Running
    from embodied.policy import Decision, Policy

log = logging.getLogger(__name__)
P = TypeVar("P", bound="Policy")
CHUNK_BYTES = 4096, 8 << 20
"""Smallest and largest chunk; between these a chunk holds about a second, which is lost if the process is killed."""
ITEM_BYTES = 1024
"""Assumed size of an item without its arrays."""


class Recorder:
    """Writes a recording in a background thread, so that the control loop never waits for a disk.

    The file exists at `path` from the start, and every chunk is flushed to the disk: if the process is killed or the
    power fails, everything up to the last second is readable. At most `capacity_bytes` of items wait to be written;
    further items are dropped, counted and reported, except for the beginnings, ends and outcomes of episodes.

    Args:
        path: a new file.
        contract: contract of the recorded robot.
        origin: further JSON-ready metadata: the checkpoint, the robot, the person.
        clock: clock of the control loop.
        capacity_bytes: memory for waiting items; a single larger item is accepted, too.

    Raises:
        UserError: if `path` exists, or an observation or action cannot be recorded.
    """

    def __init__(
        self,
        path: str | Path,
        contract: Contract,
        *,
        origin: Mapping[str, Any] | None = None,
        clock: Clock = time.monotonic,
        capacity_bytes: int = 256 << 20,
    ) -> None:
        self.path = Path(path)
        self.contract = contract
        self.clock = clock
        self.dropped = 0
        self._gap: Gap | None = None  # not yet written
        self._generator_due = True
        self._failure: Exception | None = None
        self._capacity = capacity_bytes
        self._waiting_bytes = 0
        self._waiting: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._file = _File(self.path, contract, dict(origin or {}))
        self._thread = threading.Thread(target=self._write_all, name="recorder", daemon=True)
        self._thread.start()

    @property
    def trouble(self) -> str:
        """Number of dropped items and the reason; "" if the recording is complete."""
        reason = self._failure or "the disk is too slow; record less, or to a faster one"
        return f"{self.dropped} items were dropped: {reason}" if self.dropped else ""

    def begin_episode(self, task: str = "") -> None:
        """Begin an episode of `task`: policy memories restart here."""
        self._generator_due = True
        self._put(Episode(self.clock(), task))

    def end_episode(self, *, success: bool) -> None:
        """End the episode with its outcome; learners do not imitate failures."""
        self._put(Ended(self.clock(), success))

    def write(
        self,
        now_s: float,
        reading: Reading | None,
        proposed_action: Array | None,
        verdict: Verdict,
        intervention: bool = False,
    ) -> None:
        """Record one period: the action requested at `now_s`, and safety's verdict on it.

        `intervention` marks an action chosen by a human.
        """
        if reading is not None:
            observation = {key: np.array(value) for key, value in reading.observation.items()}
            # copies, because the robot may reuse its arrays before the thread writes them
            reading = Reading(observation, reading.stamp_s, reading.sequence, reading.frames)
        proposed_action = None if proposed_action is None else np.array(proposed_action)
        self._put(Tick(now_s, reading, proposed_action, verdict, intervention))

    def watch(self, policy: P) -> P:
        """Copy of `policy` that records its decisions (N = 1); deterministic by default."""
        watched = copy.copy(policy)
        for name in ("act", "inpaint"):
            if ask := getattr(policy, name, None):
                setattr(watched, name, partial(self._ask, ask))
        return watched

    def close(self) -> None:
        """Write the waiting items and the index.

        Raises:
            Exception: the error that stopped writing, such as OSError of a full disk.
        """
        if self._thread.is_alive():
            with self._lock:
                self._put_gap()
                self._waiting.put(None)
            self._thread.join()
        if self.dropped:
            log.warning(f"{self.path}: {self.trouble}")
        if self._failure:
            raise self._failure

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(
        self,
        ask: Callable[..., Decision],
        observation: TensorDict,
        *running: Running,
        deterministic: bool = True,
        generator: torch.Generator | None = None,
    ) -> Decision:
        """Call the policy and record the decision; the generator's state once per episode and after gaps."""
        if len(observation) != 1:
            raise ValueError(f"expected decisions of one robot to record, got a batch of {len(observation)}")
        state = None
        stamp_s = self.clock()
        if generator is not None and not deterministic and self._generator_due:
            # later states follow from this one, because a replay draws the same numbers
            state = generator.get_state().numpy()
            self._generator_due = False
        decision = ask(observation, *running, deterministic=deterministic, generator=generator)
        running_fields = {name: _row(value) for fields in running for name, value in vars(fields).items()}
        inputs = {key: _row(value) for key, value in observation.items()}
        self._put(Decided(stamp_s, inputs, _row(decision.actions), deterministic, running_fields, state))
        return decision

    def _put(self, item: Item) -> None:
        """Queue `item`, or drop it if the queue is full or writing has failed."""
        size = _bytes(item)
        with self._lock:  # so that a gap is written before the items that follow it
            full = self._waiting_bytes > 0 and self._waiting_bytes + size > self._capacity
            # without beginnings and ends, other episodes would get the wrong outcome
            lost = full and not isinstance(item, Episode | Ended)
            if lost or self._failure:
                if not self.dropped:
                    log.warning(f"{self.path}: recording drops items: {self._failure or 'the disk is too slow'}")
                self.dropped += 1
                self._gap = Gap(1 + (self._gap.dropped if self._gap else 0), _stamp_s(item))
                self._generator_due = True
                return
            self._put_gap()
            self._waiting_bytes += size
            self._waiting.put(item)

    def _put_gap(self) -> None:
        if self._gap:
            self._waiting_bytes += _bytes(self._gap)
            self._waiting.put(self._gap)
            self._gap = None

    def _write_all(self) -> None:
        while (item := self._waiting.get()) is not None:
            self._try(item)
            with self._lock:
                self._waiting_bytes -= _bytes(item)
        self._try(None)
        with contextlib.suppress(OSError):
            self._file.stream.close()

    def _try(self, item: Item | None) -> None:
        """Write `item`, or the end if None; after a failure, drop all items."""
        if self._failure:
            return
        try:
            if item is None:
                self._file.finish(self.dropped)
                return
            self._file.write(item)
        except Exception as error:  # any error, because a dead thread would silently lose all later items
            self._failure = self._failure or error


class _File:
    """The MCAP file of a recorder."""

    def __init__(self, path: Path, contract: Contract, origin: dict[str, Any]) -> None:
        with needs_extra("robot"):
            from mcap.writer import Writer
        for key, spec in [*contract.observation.items(), ("action", contract.action)]:
            if not spec.privileged:
                _check_recordable(key, spec)
        try:
            self.stream = path.open("xb")
        except FileExistsError as error:
            raise UserError(f"{path} exists; recordings are never overwritten, choose another path") from error
        self._contract = contract
        self._channels: dict[Hashable, int] = {}
        self._schemas: dict[str, int] = {}
        self._writer = Writer(self.stream, chunk_size=_chunk_bytes(contract))
        self._writer.start(profile="ros2", library="embodied-rl")
        about = contract.to_json(), json.dumps(origin)
        fields = {"format": FORMAT, "contract": about[0], "origin": about[1], "crc32": header_crc32(*about)}
        self._writer.add_metadata(METADATA, fields)
        self._sync()
        flush(path.parent)  # so that the file's name survives a power failure, too

    def write(self, item: Item) -> None:
        self._write(item)
        if self.stream.tell() > self._synced:  # a chunk is complete
            self._sync()

    def _sync(self) -> None:
        """Flush written data to the disk."""
        self.stream.flush()
        os.fsync(self.stream.fileno())
        self._synced = self.stream.tell()

    def _write(self, item: Item) -> None:
        if isinstance(item, Tick):
            self._tick(item)
        elif isinstance(item, Decided):
            self._decided(item)
        elif isinstance(item, Episode):
            self._json("episode", item.stamp_s, {"stamp_s": item.stamp_s, "task": item.task})
        elif isinstance(item, Ended):
            self._json("end", item.stamp_s, {"stamp_s": item.stamp_s, "success": item.success})
        else:
            self._json("gap", item.stamp_s, {"dropped": item.dropped, "stamp_s": item.stamp_s})

    def finish(self, dropped: int) -> None:
        self._writer.add_metadata(END, {"dropped": str(dropped)})
        self._writer.finish()
        self._sync()

    def _tick(self, tick: Tick) -> None:
        verdict = tick.verdict
        reading = tick.reading
        fields: dict[str, Any] = {"now_s": tick.now_s, "intervention": tick.intervention, "state": verdict.state.value}
        fields |= {"reason": verdict.reason, "limited": verdict.limited}
        if reading is not None:
            fields |= {"stamp_s": reading.stamp_s, "sequence": reading.sequence, "frames": dict(reading.frames)}
            for key, value in reading.observation.items():
                self._array(f"observation/{key}", value, reading.stamp_s, self._contract.observation.get(key))
        for name, action in (("asked", tick.proposed_action), ("written", verdict.action)):
            if action is not None:
                self._array(f"action/{name}", np.asarray(action), tick.now_s, self._contract.action)
        self._json("tick", tick.now_s, fields)

    def _decided(self, item: Decided) -> None:
        for key, value in item.observation.items():
            self._array(f"decision/observation/{key}", value, item.stamp_s, self._contract.observation.get(key))
        for name, value in item.running.items():
            self._array(f"decision/running/{name}", value, item.stamp_s, None)
        self._array("decision/actions", item.actions, item.stamp_s, self._contract.action)
        if item.generator is not None:
            self._array("decision/generator", item.generator, item.stamp_s, None)
        self._json("decision", item.stamp_s, {"stamp_s": item.stamp_s, "deterministic": item.deterministic})

    def _array(self, name: str, array: Array, stamp_s: float, spec: TensorSpec | None) -> None:
        frame = spec.frame if spec else ""
        key = name, array.dtype, array.shape[2:]  # these determine the type of message
        if key not in self._channels:
            dtype = str(array.dtype)
            metadata = {"dtype": dtype}
            if spec is not None:
                metadata |= {"unit": spec.unit, "frame": frame, "names": ",".join(spec.names)}
            self._channels[key] = self._channel(name, cdr.array_type(dtype, array.shape), metadata)
        self._add(self._channels[key], stamp_s, cdr.encode_array(array, _nanoseconds(stamp_s), frame))

    def _json(self, name: str, stamp_s: float, fields: dict[str, Any]) -> None:
        if name not in self._channels:
            self._channels[name] = self._channel(name, cdr.STRING, {})
        self._add(self._channels[name], stamp_s, cdr.encode_string(json.dumps(fields)))

    def _channel(self, name: str, message_type: str, about: dict[str, str]) -> int:
        if message_type not in self._schemas:
            definition = cdr.definition(message_type).encode()
            self._schemas[message_type] = self._writer.register_schema(message_type, "ros2msg", definition)
        return self._writer.register_channel(f"{ROOT}/{name}", "cdr", self._schemas[message_type], about)

    def _add(self, channel: int, stamp_s: float, data: bytes) -> None:
        stamp = _nanoseconds(stamp_s)
        self._writer.add_message(channel, log_time=stamp, publish_time=stamp, data=data)


def _bytes(item: Item) -> int:
    """Approximate memory of `item`."""
    arrays: list[Array | None] = []
    if isinstance(item, Tick):
        arrays = [
            item.proposed_action,
            item.verdict.action,
            *(item.reading.observation.values() if item.reading else ()),
        ]
    elif isinstance(item, Decided):
        arrays = [item.actions, item.generator, *item.observation.values(), *item.running.values()]
    return ITEM_BYTES + sum(array.nbytes for array in arrays if array is not None)


def _stamp_s(item: Item) -> float:
    return item.now_s if isinstance(item, Tick) else item.stamp_s


def _row(batch: Any) -> Array:  # noqa: ANN401 - a Tensor, which TensorDict does not promise
    """The only row of a batch as an array."""
    return batch[0].detach().cpu().numpy().copy()


def _check_recordable(key: str, spec: TensorSpec) -> None:
    try:
        cdr.array_type(spec.dtype, spec.shape)
    except UserError as error:
        raise UserError(f"{key}: {error}") from error
    size = _spec_bytes(spec)
    largest = RECORD_BYTES - CHUNK_BYTES[1]
    if size > largest:
        raise UserError(f"{key}: cannot record {size:,} bytes in one message; expected at most {largest:,}")


def _chunk_bytes(contract: Contract) -> int:
    """Size of about a second of recording, within CHUNK_BYTES."""
    specs = [spec for spec in contract.observation.values() if not spec.privileged]
    tick = sum(map(_spec_bytes, specs))
    smallest, largest = CHUNK_BYTES
    return int(min(largest, max(smallest, 2 * tick / contract.control_dt_s)))


def _spec_bytes(spec: TensorSpec) -> int:
    return math.prod(abs(size) for size in spec.shape) * np.dtype(spec.dtype).itemsize


def _nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))
