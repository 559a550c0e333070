"""Recordings of a robot: MCAP files that ROS 2 tools and Foxglove open, with the contract inside.

A recording is a sequence of items: an episode begins, the policy decides, the loop runs one tick. Arrays are standard
messages (`cdr.py`) on topics under /embodied; their channels' metadata holds units, frames and names. Recordings
contain enough to run a policy again: see `replay.py`.
"""

from __future__ import annotations

import json
import logging
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from embodied.contract import Contract
from embodied.errors import UserError
from real_robot.recording import cdr, mcap_file
from real_robot.robots.robot import Array, Reading
from real_robot.safety.safety import State, Verdict

log = logging.getLogger(__name__)
FORMAT = "1"
METADATA = "embodied"
END = "embodied_end"
"""Names of the metadata records at the beginning and at the end."""
ROOT = "/embodied"


@dataclass(frozen=True)
class Episode:
    """An episode begins at `stamp_s`."""

    stamp_s: float
    task: str = ""


@dataclass(frozen=True)
class Ended:
    """The episode ends at `stamp_s`, with the outcome given by a person or a simulator."""

    stamp_s: float
    success: bool


@dataclass(frozen=True)
class Decided:
    """One call of the policy, without the batch axis: its observation and the chunk [H, A] it returned.

    `running` has the fields of the `chunking.Running` that it continued; empty if there was none. `generator` is the
    generator's state before the call, recorded at the first sampled decision of an episode.
    """

    stamp_s: float
    observation: dict[str, Array]
    actions: Array
    deterministic: bool
    running: dict[str, Array] = field(default_factory=dict)
    generator: Array | None = None


@dataclass(frozen=True)
class Tick:
    """One control period: the action [A] requested at `now_s`, and safety's verdict."""

    now_s: float
    reading: Reading | None
    proposed_action: Array | None
    verdict: Verdict
    intervention: bool = False


@dataclass(frozen=True)
class Gap:
    """`dropped` items are missing here, the last of them at `stamp_s`: the disk was too slow."""

    dropped: int
    stamp_s: float = 0.0  # in recordings of earlier versions


Item = Episode | Ended | Decided | Tick | Gap


class Recording:
    """Reads a file of `Recorder` up to the first damage, even if the process was killed or the power failed.

    After reading, `complete` is whether the recording ended normally, and `damage` describes unreadable data.

    Raises:
        UserError: if the file is missing or is not a recording.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.complete = False
        self.damage = ""
        self._begins: list[float] = []  # of the episodes, s, once `outcomes` has read them
        expected = f"expected a recording of format {FORMAT}; other MCAP files hold no contract"
        try:
            header = next((each for each in mcap_file.records(self.path) if _kind(each) == METADATA), None)
        except mcap_file.DamagedError as error:
            raise UserError(f"{path}: {expected} ({error})") from error
        except OSError as error:
            raise _unreadable(self.path, error) from error
        if header is None or header.metadata.get("format") != FORMAT:
            raise UserError(f"{path}: {expected}")
        self.contract, self.origin = _header(self.path, header.metadata)

    def __iter__(self) -> Iterator[Item]:
        """Yield the items in the order in which they were recorded."""
        collected: dict[str, Array] = {}
        for channel, schema, record in self._messages():
            name = channel.topic.removeprefix(ROOT + "/")
            try:
                if schema.name == cdr.STRING:
                    item = _item(name, json.loads(cdr.decode_string(record.data)), collected)
                else:
                    item = None
                    collected[name] = cdr.decode_array(record.data, schema.name, channel.metadata["dtype"])
            except Exception as error:  # content that was not written by a recorder fails in many ways
                return self._stop_at(channel.topic, error)
            if item is not None:
                collected = {}
                yield item

    def outcomes(self) -> dict[int, bool]:
        """Outcomes of episodes, True for success, by the number of the episode from 0; unknown ones are missing."""
        number = -1
        outcomes = {}
        self._begins = []
        for channel, _, record in self._messages():
            if channel.topic == f"{ROOT}/episode":
                number += 1
                self._begins.append(record.log_time / 1e9)
            if channel.topic == f"{ROOT}/end":
                try:
                    outcomes[number] = bool(json.loads(cdr.decode_string(record.data))["success"])
                except Exception as error:  # as in __iter__
                    self._stop_at(channel.topic, error)
                    break
        return outcomes

    def next_begin(self, time_s: float) -> float:
        """Time at which the first episode after `time_s` begins; infinity if it is the last."""
        return min((each for each in self._begins if each > time_s), default=math.inf)

    def others(self) -> Iterator[tuple[Any, Any, Any]]:
        """Yield channel, schema and record of every message of others, on topics that are not below /embodied."""
        return (each for each in self._all_messages() if not each[0].topic.startswith(f"{ROOT}/"))

    def _messages(self) -> Iterator[tuple[Any, Any, Any]]:
        """Yield channel, schema and record of every message of ours."""
        return (each for each in self._all_messages() if each[0].topic.startswith(f"{ROOT}/"))

    def _all_messages(self) -> Iterator[tuple[Any, Any, Any]]:
        """Yield channel, schema and record of every message."""
        schemas: dict[int, Any] = {}
        channels: dict[int, Any] = {}
        finished = False
        for record in self._records():
            kind = _kind(record)
            if kind == "Schema":
                schemas[record.id] = record
            elif kind == "Channel":
                channels[record.id] = record
            elif kind == END:
                finished = True  # the last chunk follows this record
            elif kind == "Message":
                channel = channels.get(record.channel_id)
                schema = channel and schemas.get(channel.schema_id)
                if channel is None or schema is None:
                    return self._stop(f"a message on the unknown channel {record.channel_id}")
                yield channel, schema, record
        self.complete = finished and not self.damage

    def _records(self) -> Iterator[Any]:
        """Yield the records of the file up to its end or the first damage."""
        try:
            yield from mcap_file.records(self.path)
        except mcap_file.DamagedError as error:
            size = self.path.stat().st_size
            self._stop(f"the first {error.offset:,} of {size:,} bytes can be read; {error}")
        except OSError as error:
            raise _unreadable(self.path, error) from error

    def _stop_at(self, topic: str, error: Exception) -> None:
        self._stop(f"a message on {topic} is damaged: {type(error).__name__}: {error}")

    def _stop(self, damage: str) -> None:
        """Store the `damage` that ends reading, and log one warning."""
        if not self.damage:
            self.damage = " ".join(damage.split())
            log.warning(f"{self.path} is not whole: {self.damage}")


def _unreadable(path: Path, error: OSError) -> UserError:
    return UserError(f"cannot read {path}: {type(error).__name__}: {error}")


def _header(path: Path, metadata: dict[str, str]) -> tuple[Contract, dict[str, Any]]:
    """Contract and origin of a recording; earlier versions did not write their checksum."""
    try:
        contract = metadata["contract"]
        origin = metadata["origin"]
        if "crc32" in metadata and metadata["crc32"] != header_crc32(contract, origin):
            raise ValueError("its checksum does not match")
        return Contract.from_dict(json.loads(contract)), json.loads(origin)
    except Exception as error:  # a contract of other bytes fails in many ways
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{path}: the contract in its first record is damaged: {reason}") from error


def header_crc32(contract: str, origin: str) -> str:
    """Checksum of the first record, which is outside all chunks."""
    return f"{zlib.crc32((contract + origin).encode()):08x}"


def _item(name: str, fields: dict[str, Any], arrays: dict[str, Array]) -> Item:
    """Build the item of a JSON message on the topic `name`, with the arrays recorded before it."""
    if name == "episode":
        return Episode(**fields)
    if name == "end":
        return Ended(**fields)
    if name == "gap":
        return Gap(**fields)
    if name == "decision":
        observation = _below(arrays, "decision/observation/")
        return Decided(
            **fields,
            observation=observation,
            actions=arrays["decision/actions"],
            running=_below(arrays, "decision/running/"),
            generator=arrays.get("decision/generator"),
        )
    reading = None
    if "sequence" in fields:
        reading = Reading(_below(arrays, "observation/"), fields["stamp_s"], fields["sequence"], fields["frames"])
    verdict = Verdict(State(fields["state"]), arrays.get("action/written"), fields["reason"], fields["limited"])
    return Tick(fields["now_s"], reading, arrays.get("action/asked"), verdict, fields["intervention"])


def _below(arrays: dict[str, Array], prefix: str) -> dict[str, Array]:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def _kind(record: Any) -> str:  # noqa: ANN401 - mcap's
    return record.name if type(record).__name__ == "Metadata" else type(record).__name__
