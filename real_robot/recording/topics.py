"""Numbers that others published while a robot was recorded: rewards, costs, successes and endings, by topic.

They are in a bag beside the recording, the folder NAME_bag of NAME.mcap, if both have the same clock; or in the
recording itself. The messages after an action, up to the next one, belong to its step: rewards and signals are summed,
and unknown without a message; terminated, truncated and human are events, true if one of the messages is. A failure is
that of the whole episode.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from embodied.errors import UserError
from real_robot.recording import cdr, mcap_file
from real_robot.recording.data_sets.outcomes import HUMAN, NOT, SUCCESS, TERMINATED, TRUNCATED, Columns
from real_robot.recording.recording import Recording
from real_robot.robots.robot import Array

log = logging.getLogger(__name__)
BAG = "_bag"
"""End of the name of a bag's folder beside a recording."""
FIELD = "data"
"""Field of a message with its number, unless a topic is followed by another one: /judge:score."""
EVENTS = TERMINATED, TRUNCATED, HUMAN


def bag_files(recording: Path) -> list[Path]:
    """Files of the bag beside a `recording`."""
    return sorted(recording.with_name(recording.stem + BAG).glob("*.mcap"))


class Topics:
    """Topics of a `recording` by meaning, see `outcomes.Columns`.

    Raises:
        UserError: for topics that it does not have, and messages without a number.
    """

    def __init__(self, recording: Recording, chosen: Mapping[str, Any]) -> None:
        labels = {name.removeprefix(NOT) for name in chosen.values() if isinstance(name, str)}
        numbers = _numbers(recording, labels)
        self._times = {label: np.array([time for time, _ in values]) for label, values in numbers.items()}
        self._values = {label: np.array([value for _, value in values]) for label, values in numbers.items()}
        features = {label: {"shape": [1], "dtype": "float32"} for label, values in numbers.items() if values}
        self.columns = Columns(recording.path, features, {}, chosen)

    def rows(self, times: Sequence[float], end: float) -> dict[str, Array]:
        """Values [L] by topic of the steps that begin at `times` [L], s; the last one ends at `end`."""
        edges = np.append(np.array(times), end)
        names = self.columns.names.items()
        return {name.removeprefix(NOT): self._steps(name, meaning, edges) for meaning, name in names}

    def _steps(self, name: str, meaning: str, edges: Array) -> Array:
        label = name.removeprefix(NOT)
        step = np.searchsorted(edges, self._times[label], side="right") - 1
        inside = (step >= 0) & (step < len(edges) - 1)
        step, values = step[inside], self._values[label][inside]
        counts = np.bincount(step, minlength=len(edges) - 1)
        sums = np.bincount(step, values, minlength=len(edges) - 1)
        negated = name.startswith(NOT)
        marks = counts - sums if negated else sums
        is_failure = meaning == SUCCESS and len(values) > 0 and not marks.any()
        if meaning in EVENTS or is_failure:
            return 1.0 - marks if negated else marks  # a step without a message has no mark
        return np.where(counts > 0, sums, np.nan)


def _numbers(recording: Recording, labels: set[str]) -> dict[str, list[tuple[float, float]]]:
    """Times, s, and numbers of the messages of each of `labels`, TOPIC or TOPIC:FIELD."""
    fields = {label: tuple(label.partition(":")[::2]) for label in labels}
    numbers: dict[str, list[tuple[float, float]]] = {label: [] for label in labels}
    if not labels:
        return numbers
    bags = (_messages(path) for path in bag_files(recording.path))
    for channel, schema, record in chain(recording.others(), *bags):
        for label, (topic, field) in fields.items():
            if channel.topic == topic:
                try:
                    value = _number(channel, schema, record.data, field or FIELD)
                except UserError as error:
                    raise UserError(f"{recording.path}, topic {topic}: {error}") from error
                numbers[label].append((record.log_time / 1e9, value))
    return numbers


def _messages(path: Path) -> Iterator[tuple[Any, Any, Any]]:
    """Yield channel, schema and record of every message of a bag, up to its end or its first damage."""
    schemas: dict[int, Any] = {}
    channels: dict[int, Any] = {}
    try:
        for record in mcap_file.records(path):
            kind = type(record).__name__
            if kind == "Schema":
                schemas[record.id] = record
            elif kind == "Channel":
                channels[record.id] = record
            elif kind == "Message" and record.channel_id in channels:
                channel = channels[record.channel_id]
                yield channel, schemas.get(channel.schema_id), record
    except mcap_file.DamagedError as error:
        log.warning(f"{path} is not whole: the first {error.offset:,} bytes can be read; {error}")


def _number(channel: Any, schema: Any, data: bytes, field: str) -> float:  # noqa: ANN401 - mcap's
    """Number in the `field` of a message in CDR or JSON."""
    if channel.message_encoding == "json":
        try:
            return float(json.loads(data)[field])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"a message has no number in its field {field}; add TOPIC:FIELD") from error
    return cdr.decode_number(data, schema.name, schema.data.decode(errors="replace"), field)
