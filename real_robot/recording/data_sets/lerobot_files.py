"""Reads the files of a LeRobot dataset one episode at a time: rows from parquet, frames from videos."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodied.contract import Contract
from embodied.errors import UserError
from embodied.extras import needs_extra
from embodied.saving.json_text import loads
from real_robot.recording.data_sets.outcomes import HUMAN, REWARD, SUCCESS, TRUNCATED, Columns
from real_robot.robots.robot import Array

VERSIONS = ("v2.0", "v2.1", "v3.0")
TASK = "task_index"
OUTCOME = "success"
"""Column of meta/episodes that our datasets add."""
COLUMNS = {
    REWARD: "next.reward",
    SUCCESS: "next.success",
    TRUNCATED: "next.truncated",
    HUMAN: "complementary_info.is_intervention",
}
"""Features of LeRobot by meaning. Its next.done does not say whether an episode terminated."""
Cells = list[bytes] | Array
"""Pictures of an episode: encoded as a dataset has them, or frames [L, height, width, 3] of a video."""


def data_files(directory: Path, *, videos: bool) -> list[Path]:
    """Files of the dataset in `directory`: metadata, rows and, if required, `videos`."""
    folders = ["meta", "data", *(["videos"] if videos else [])]
    return sorted(path for folder in folders for path in (directory / folder).rglob("[!.]*") if path.is_file())


class Source:
    """A dataset in `directory`; `contract` is None unless our program wrote it.

    `chosen` are columns by meaning, `rate_hz` is its rate if it does not state one.

    Raises:
        UserError: if the folder is no LeRobot dataset, of an unsupported version, or states another rate.
    """

    has_final = False
    """Whether it has the observation after the last step of every episode."""

    def __init__(
        self, directory: Path, chosen: Mapping[str, Any] = MappingProxyType({}), rate_hz: float | None = None
    ) -> None:
        self.directory = directory
        self._chosen = chosen
        try:
            self.info: dict[str, Any] = loads((directory / "meta/info.json").read_text(encoding="utf-8"))
            self.features: dict[str, Any] = self.info["features"]
            version = self.info["codebase_version"]
        except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
            if (directory / "report.json").exists():
                raise UserError(f"{directory} is a run without demonstrations; use one that has some") from error
            raise UserError(f"{directory} is no LeRobot dataset: {type(error).__name__}: {error}") from error
        if version not in VERSIONS:
            raise UserError(f"{directory} has format {version}; expected one of {', '.join(VERSIONS)}")
        if vague := [key for key, feature in self.features.items() if not {"dtype", "shape"} <= {*feature}]:
            raise UserError(f"{directory}/meta/info.json does not tell dtype and shape of {', '.join(vague)}")
        path = directory / "meta/contract.json"
        try:
            self.contract = Contract.from_dict(loads(path.read_text(encoding="utf-8"))) if path.exists() else None
        except ValueError as error:
            raise UserError(f"cannot read {path}: {_line(error)}") from error
        self._films: dict[str, _Film] = {}
        self.rate_hz = float(self.info.get("fps") or rate_hz or 0.0)
        """Rate of the rows; 0 if it is unknown."""
        if rate_hz and abs(rate_hz / self.rate_hz - 1.0) > 1e-4:
            raise UserError(f"{directory} states {self.rate_hz:g} Hz; leave out demonstration_rate_hz={rate_hz:g}")

    @cached_property
    def columns(self) -> Columns:
        """Columns with rewards, outcomes and endings; an outcome in meta/episodes replaces the column of successes."""
        defaults = {key: name for key, name in COLUMNS.items() if key != SUCCESS or not self.success}
        return Columns(self.directory, self.features, defaults, self._chosen)

    @property
    def identity(self) -> bytes:
        """Bytes that identify the data set without reading all of it."""
        return (self.directory / "meta/info.json").read_bytes()

    @cached_property
    def tasks(self) -> dict[int, str]:
        """Task texts by index."""
        path = self.directory / "meta/tasks.jsonl"  # before v3
        if path.exists():
            try:
                rows = map(loads, path.read_text(encoding="utf-8").splitlines())
                return {row[TASK]: row["task"] for row in rows}
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise UserError(f"cannot read the tasks in {path}: {_line(error)}") from error
        with needs_extra("robot"):
            import pyarrow.parquet as pq
        path = self.directory / "meta/tasks.parquet"
        try:
            table = pq.read_table(path).to_pydict()
            numbers = table.pop(TASK)
            return dict(zip(numbers, next(iter(table.values())), strict=True))
        except (OSError, ValueError, KeyError, StopIteration) as error:
            raise UserError(f"cannot read the tasks in {path}: {_line(error)}") from error

    def incompleteness(self) -> str:
        """Note on rows that meta/info.json counts and no file has, as after a broken download; "" if there are all.

        Raises:
            UserError: for files that are missing or damaged.
        """
        with needs_extra("robot"):
            import pyarrow.parquet as pq
        stated = self.info.get("total_frames")
        with self._readable():
            count = sum(pq.read_metadata(path).num_rows for path in self._files())
        if not isinstance(stated, int) or count >= stated:
            return ""
        return f"only {count:,} of the {stated:,} rows that meta/info.json states; copy it again if files are missing."

    def column(self, key: str) -> Array:
        """The values of a feature of numbers in all rows, [R, ...].

        Raises:
            UserError: for files that are missing or damaged.
        """
        with self._readable():
            return np.concatenate([np.asarray(self._column(key, table[key])) for table in self._groups([key], None)])

    def episodes(
        self, features: set[str], tasks: Callable[[str], int | None] | None = None
    ) -> Iterator[tuple[int, int, dict[str, Any], None]]:
        """Yield number, task, `features` and None of each episode: arrays [L, ...], or `Cells` for pictures.

        `tasks` returns the number of a text, None for episodes to skip; without it all episodes have number 0.

        Raises:
            UserError: for files that are missing, damaged or out of order.
        """
        task_numbers = None if tasks is None else {index: tasks(text) for index, text in self.tasks.items()}
        videos = {key for key in features if self.features[key]["dtype"] == "video"}
        for number, rows in self._rows(sorted(features - videos), task_numbers):
            length = len(rows)
            if rows["frame_index"].to_pylist() != list(range(length)):
                raise UserError(f"episode {number} of {self.directory} has rows out of order, or not all of them")
            episode = {key: self._column(key, rows[key]) for key in features - videos}
            episode |= {key: self._frames(key, number, length) for key in videos}
            yield number, (0 if task_numbers is None else task_numbers[rows[TASK][0].as_py()] or 0), episode, None

    def _rows(self, columns: Sequence[str], tasks: dict[int, int | None] | None) -> Iterator[tuple[int, Any]]:
        """Yield number and table of each episode, whose rows may be in several row groups and files."""
        with needs_extra("robot"):
            import pyarrow as pa
        names = list(dict.fromkeys([*columns, "episode_index", "frame_index", *([TASK] if tasks else [])]))
        last = -1
        pending = []
        with self._readable():
            for table in self._groups(names, tasks):
                numbers = table["episode_index"].to_numpy()
                if not len(numbers):
                    continue
                # first row of each run of equal episode numbers in the row group
                begins = np.flatnonzero(np.r_[True, numbers[1:] != numbers[:-1]])
                for begin, end in zip(begins, [*begins[1:], len(numbers)], strict=True):
                    if pending and numbers[begin] != last:
                        yield last, pa.concat_tables(pending)
                        pending = []
                    last = int(numbers[begin])
                    pending.append(table.slice(begin, end - begin))
        if pending:
            yield last, pa.concat_tables(pending)

    def _files(self) -> list[Path]:
        """Files of rows, in order."""
        files = sorted((self.directory / "data").glob("*/*.parquet"))
        if not files:
            raise UserError(f"cannot read the data of {self.directory}: there is no data/*/*.parquet")
        return files

    @contextmanager
    def _readable(self) -> Iterator[None]:
        """Context in which errors of files of rows are a user's."""
        import pyarrow as pa

        try:
            yield
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"cannot read the data of {self.directory}: {_line(error)}") from error

    def _groups(self, names: list[str], tasks: dict[int, int | None] | None) -> Iterator[Any]:
        """Yield the row groups of all files, in order, without rows of skipped tasks."""
        import pyarrow as pa
        import pyarrow.compute
        import pyarrow.parquet as pq

        task_indices = None if tasks is None else pa.array([index for index, task in tasks.items() if task is not None])
        for path in self._files():
            with pq.ParquetFile(path, memory_map=True) as file:
                if missing := [name for name in names if name not in file.schema_arrow.names]:
                    raise UserError(f"{path} lacks {', '.join(missing)}; it has {', '.join(file.schema_arrow.names)}")
                for group in range(file.num_row_groups):
                    if task_indices is None:
                        yield file.read_row_group(group, names)
                        continue
                    mask = pa.compute.is_in(file.read_row_group(group, [TASK])[TASK], task_indices)
                    if pa.compute.any(mask).as_py():
                        yield file.read_row_group(group, names).filter(mask)

    def _column(self, key: str, column: Any) -> Cells:  # noqa: ANN401 - pyarrow's
        import pyarrow as pa

        feature = self.features[key]
        if feature["dtype"] == "image":
            cells = [cell and cell["bytes"] for cell in column.to_pylist()]
            if not all(cells):
                raise UserError(f"{self.directory}: {key} lacks pictures in data/*/*.parquet; write the dataset again")
            return cells
        try:
            dtype = np.dtype(feature["dtype"])
            if column.null_count or pa.types.is_floating(column.type):  # null is unknown: not a number
                dtype = np.promote_types(dtype, np.float32)
            return np.array(column.to_pylist(), dtype).reshape(len(column), *feature["shape"])
        except (ValueError, TypeError, OverflowError) as error:
            expected = f"of shape {feature['shape']} and {feature['dtype']}"
            raise UserError(f"{self.directory}: {key} is not {expected}: {_line(error)}") from error

    def _frames(self, key: str, episode: int, length: int) -> Array:
        """Frames [L, height, width, 3] of an episode."""
        path, first = self._video(key, episode)
        film = self._films.get(key)
        if film is None or (film.path, film.number) != (path, first):
            if film is not None:
                film.close()
            film = self._films[key] = _Film(path, first, self.rate_hz)
        return film.read(length)

    def _video(self, key: str, episode: int) -> tuple[Path, int]:
        """Path of an episode's video file, and the number of its first frame."""
        template = self.info.get("video_path")
        if not template:
            raise UserError(f"{self.directory}/meta/info.json does not tell video_path, where {key} is")
        if "episode_index" in template:  # v2: a file for each episode
            chunk = episode // self.info["chunks_size"]
            return self.directory / template.format(episode_chunk=chunk, video_key=key, episode_index=episode), 0
        row = self._places.get(episode, {})
        try:
            chunk = row[f"videos/{key}/chunk_index"]
            number = row[f"videos/{key}/file_index"]
            path = self.directory / template.format(video_key=key, chunk_index=chunk, file_index=number)
            return path, round(row[f"videos/{key}/from_timestamp"] * self.rate_hz)
        except (KeyError, TypeError) as error:
            message = f"meta/episodes of {self.directory}"
            raise UserError(f"{message} does not locate {key} of episode {episode}") from error

    @cached_property
    def success(self) -> dict[int, bool | None]:
        """Outcomes by episode, None where unknown; empty unless meta/episodes has them, as in our datasets.

        Raises:
            UserError: for other values than true, false, 1, 0 and null.
        """
        import pyarrow.parquet as pq

        outcomes = {}
        for path in sorted((self.directory / "meta/episodes").glob("*/*.parquet")):
            if OUTCOME in pq.read_schema(path).names:
                rows = pq.read_table(path, columns=["episode_index", OUTCOME]).to_pydict()
                for number, value in zip(rows["episode_index"], rows[OUTCOME], strict=True):
                    unknown = value is None or value != value  # not a number, as pandas writes null
                    if not (unknown or value in (True, False)):
                        expected = f"expected true, false or null in {OUTCOME} of episode {number}"
                        raise UserError(f"{path}: {expected}, got {value!r}; write that column again")
                    outcomes[number] = None if unknown else bool(value)
        return outcomes

    @cached_property
    def _places(self) -> dict[int, dict[str, Any]]:
        """Rows of meta/episodes about videos, by episode."""
        import pyarrow.parquet as pq

        rows = {}
        for path in sorted((self.directory / "meta/episodes").glob("*/*.parquet")):
            names = [name for name in pq.read_schema(path).names if name.startswith("videos/")]
            for row in pq.read_table(path, columns=["episode_index", *names]).to_pylist():
                rows[row["episode_index"]] = row
        return rows


class _Film:
    """A video that is read sequentially from frame `number`."""

    def __init__(self, path: Path, number: int, rate_hz: float) -> None:
        import imageio_ffmpeg

        self.path = path
        self.number = number
        # half a frame earlier, so that rounding of the timestamp cannot skip the frame
        seek = ["-ss", f"{(number - 0.5) / rate_hz:.6f}"] if number else []
        self._reader = imageio_ffmpeg.read_frames(str(path), input_params=seek)
        self._size: tuple[int, int] | None = None

    def read(self, count: int) -> NDArray[np.uint8]:
        """The next `count` frames [count, height, width, 3].

        Raises:
            UserError: if the video has fewer frames, or cannot be read.
        """
        frames = []
        first = self.number
        try:
            if self._size is None:
                self._size = next(self._reader)["size"]
            width, height = self._size
            for _ in range(count):
                frames.append(np.frombuffer(next(self._reader), np.uint8).reshape(height, width, 3))
                self.number += 1
        except StopIteration:
            message = f"expected {count} frames from {first} on in {self.path}, got {len(frames)}; it is cut short"
            raise UserError(message) from None
        except (OSError, RuntimeError) as error:
            reason = "there is no such file" if not self.path.exists() else _line(error).partition(" ===")[0]
            raise UserError(f"cannot read {self.path}: {reason}") from error
        return np.stack(frames)

    def close(self) -> None:
        """Stop the decoder."""
        self._reader.close()


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
