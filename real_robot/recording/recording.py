"""Recordings of a robot: MCAP files that ROS 2 tools and Foxglove open, with the contract inside.

A recording is a sequence of items: an episode begins, the policy decides, the loop runs one tick. Arrays are standard
messages (`cdr.py`) on topics under /embodied; their channels' metadata holds units, frames and names. Recordings
contain enough to run a policy again: see `replay.py`.
"""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from embodied.command_line.extras import needs_extra
from embodied.contract import Contract
from embodied.errors import UserError
from real_robot.recording import cdr
from real_robot.robots.robot import Array, Reading
from real_robot.safety.safety import State, Verdict

FORMAT = "1"
METADATA, END = "embodied", "embodied_end"
"""Names of the metadata records at the beginning and at the end."""
ROOT = "/embodied"


@dataclass(frozen=True)
class Episode:
    """An episode begins at `stamp_s`."""

    stamp_s: float
    task: str = ""


@dataclass(frozen=True)
class Ended:
    """The episode ends at `stamp_s`, with the outcome that a person or a simulator told."""

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
    asked: Array | None
    verdict: Verdict
    intervention: bool = False


@dataclass(frozen=True)
class Gap:
    """`dropped` items are missing here, the last of them at `stamp_s`: the disk was too slow."""

    dropped: int
    stamp_s: float = 0.0  # in recordings of earlier versions


Item = Episode | Ended | Decided | Tick | Gap


class Recording:
    """Reads what a `Recorder` wrote, even if the process was killed.

    After reading, `complete` says whether the recording ended normally.

    Raises:
        UserError: if the file is missing or is not a recording.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.complete = False
        header = next((record for record in _records(self.path) if _kind(record) == METADATA), None)
        if header is None or header.metadata.get("format") != FORMAT:
            raise UserError(f"{path}: expected a recording of format {FORMAT}; other MCAP files hold no contract")
        self.contract = Contract.from_dict(json.loads(header.metadata["contract"]))
        self.origin: dict[str, Any] = json.loads(header.metadata["origin"])

    def __iter__(self) -> Iterator[Item]:
        """The items in the order in which they were recorded."""
        collected: dict[str, Array] = {}
        for channel, schema, record in self._messages():
            name = channel.topic.removeprefix(ROOT + "/")
            if schema.name == cdr.STRING:
                yield _item(name, json.loads(cdr.decode_string(record.data)), collected)
                collected = {}
            else:
                collected[name] = cdr.decode_array(record.data, schema.name, channel.metadata["dtype"])

    def outcomes(self) -> dict[int, bool]:
        """Whether episodes were told to be successes, by their number from 0; nothing for others."""
        number, found = -1, {}
        for channel, _, record in self._messages():
            number += channel.topic == f"{ROOT}/episode"
            if channel.topic == f"{ROOT}/end":
                found[number] = json.loads(cdr.decode_string(record.data))["success"]
        return found

    def _messages(self) -> Iterator[tuple[Any, Any, Any]]:
        """Channel, schema and record of every message of ours; earlier versions also recorded topics of ROS."""
        schemas: dict[int, Any] = {}
        channels: dict[int, Any] = {}
        for record in _records(self.path):
            kind = _kind(record)
            if kind == "Schema":
                schemas[record.id] = record
            elif kind == "Channel":
                channels[record.id] = record
            elif kind == END:
                self.complete = True
            elif kind == "Message":
                channel = channels[record.channel_id]
                if channel.topic.startswith(f"{ROOT}/"):
                    yield channel, schemas[channel.schema_id], record


def _item(name: str, fields: dict[str, Any], arrays: dict[str, Array]) -> Item:
    if name == "episode":
        return Episode(**fields)
    if name == "end":
        return Ended(**fields)
    if name == "gap":
        return Gap(**fields)
    if name == "decision":
        read = _below(arrays, "decision/observation/")
        return Decided(
            **fields,
            observation=read,
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


def _records(path: Path) -> Iterator[Any]:
    """Records of an MCAP file; a truncated file ends with its last complete chunk."""
    with needs_extra("robot"):
        from mcap.exceptions import EndOfFile, McapError
        from mcap.stream_reader import StreamReader
        from zstandard import ZstdError
    try:
        with _Whole(io.FileIO(path)) as file:
            yield from StreamReader(file, validate_crcs=True).records
    except EndOfFile:
        return
    except (OSError, ValueError, McapError, ZstdError, struct.error, MemoryError) as error:
        raise UserError(f"cannot read {path}: {type(error).__name__}: {error}") from error


class _Whole(io.BufferedReader):
    """A file that hides its last bytes if fewer are left than requested."""

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        return data if len(data) == size else b""


def _kind(record: Any) -> str:  # noqa: ANN401 - mcap's
    return record.name if type(record).__name__ == "Metadata" else type(record).__name__
