"""Converts recordings and episodes to LeRobot datasets (format v3.0): measurements and the robot's commands.

    python -m real_robot.recording.lerobot_dataset SOURCE... DATASET [pictures=video|image]

A SOURCE is a recording, or the folder of a run's demonstrations (RUN/demonstrations). Floats become one
"observation.state" with named elements, cameras become videos (H.264, lossy) or images (PNG within parquet), the
instruction becomes the frame's task, and every other observation becomes its own feature. Two additions are ours:
meta/contract.json stores names, units and frames, which `data_set_reading.py` checks in `data_sets/`, and a column of
meta/episodes stores the outcome, empty where it is unknown. Source of the format: github.com/huggingface/lerobot, v0.4.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch

from embodied.command_line import program
from embodied.contract import Contract, TensorSpec
from embodied.data import episodes as stored
from embodied.data.episodes import SUCCEEDED, UNKNOWN, Episodes
from embodied.data.pictures import encode_all
from embodied.errors import UserError
from embodied.export.network import elements
from embodied.extras import needs_extra
from embodied.saving.files import rename
from embodied.text import decode
from real_robot.recording import driven
from real_robot.recording.data_sets import outcomes
from real_robot.recording.data_sets.lerobot_files import COLUMNS, OUTCOME
from real_robot.recording.recording import Recording
from real_robot.robots.robot import Array

VERSION = "v3.0"
DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
EPISODES_PATH = "meta/episodes/chunk-000/file-000.parquet"
FILES_PER_CHUNK = 1000
DATA_MB = 100
VIDEO_MB = 200
STATE = "observation.state"
ACTION = "action"
CAMERA = "observation.images."
INTERVENTION, REWARD, SUCCESS = (COLUMNS[meaning] for meaning in (outcomes.HUMAN, outcomes.REWARD, outcomes.SUCCESS))
QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
"""Quantiles of each element, by name in the statistics."""


class Store(Enum):
    """Storage format of a dataset's pictures."""

    VIDEO = "video"
    IMAGE = "image"


def write(
    recordings: Sequence[Recording], directory: str | Path, *, robot: str | None = None, pictures: Store = Store.VIDEO
) -> int:
    """Write a dataset of all `recordings` into the new folder `directory`; returns the number of episodes.

    Recordings are split into episodes by `driven.episodes`.

    Raises:
        UserError: if `directory` exists, contracts differ, an observation changes its shape, or no action was written.
    """
    for other in recordings[1:]:
        if other.contract != recordings[0].contract:
            raise UserError(f"{other.path} and {recordings[0].path} have different contracts; make a dataset of each")
    pairs = (pair for recording in recordings for pair in driven.episodes(recording))
    return _write(pairs, recordings[0].contract, Path(directory), robot, pictures)


def write_episodes(folder: str | Path, directory: str | Path, *, pictures: Store = Store.VIDEO) -> int:
    """Write a dataset of the episodes in `folder` into the new folder `directory`; returns the number of episodes.

    An episode's task is the instruction in its first observation, else the task's name if the folder records it.

    Raises:
        UserError: if `folder` has no episodes, not all steps were observed, or `directory` exists.
    """
    episodes, contract, origin = stored.read(folder)
    if len(episodes) != episodes.steps:
        raise UserError(
            f"{folder} has no observation before every action, as LeRobot datasets need;"
            " LIBERO's with pictures have one with task.executed=1"
        )
    outcomes = episodes.success.tolist()

    def each() -> Iterator[tuple[str, Episodes]]:
        for number, end in enumerate(episodes.ends.tolist()):
            rows = torch.arange(int(episodes.ends[number - 1]) if number else 0, end)
            observation = episodes.chunks(rows, 1)["observation"]
            index = int(episodes.task_index[number])
            names = origin.get("tasks", [])[index : index + 1]
            yield (
                "".join(names).replace("_", " "),
                Episodes.of(
                    observation,
                    episodes.actions[rows],
                    reward=episodes.reward[rows],
                    human=episodes.human[rows],
                    success=None if outcomes[number] == UNKNOWN else bool(outcomes[number]),
                ),
            )

    unknown = {REWARD: bool(episodes.reward.isnan().any()), SUCCESS: UNKNOWN in outcomes}
    signals = {key for key, missing in unknown.items() if not missing}
    return _write(each(), contract, Path(directory), None, pictures, signals)


def _write(
    episodes: Iterator[tuple[str, Episodes]],
    contract: Contract,
    directory: Path,
    robot: str | None,
    pictures: Store,
    signals: Collection[str] = (),
) -> int:
    """Write `episodes` with their tasks into a temporary folder, then rename it; returns the number of episodes."""
    if directory.exists():
        raise UserError(f"{directory} exists; choose another folder for the dataset")
    temporary = directory.with_name(f".{directory.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        writer = _Writer(temporary, contract, robot, pictures, signals)
        for task, episode in episodes:
            writer.add(task, episode)
        writer.finish()
        rename(temporary, directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return len(writer.episodes)


def instruction(contract: Contract) -> str | None:
    """Key of the observation that becomes the frame's task in a dataset: the first text."""
    specs = contract.observation.items()
    return next((key for key, spec in specs if spec.is_text and len(spec.shape) == 1 and not spec.privileged), None)


def parts(contract: Contract) -> tuple[dict[str, TensorSpec], dict[str, TensorSpec], dict[str, TensorSpec]]:
    """Observations of the state, cameras, and observations with a feature of their own, without the instruction."""
    specs = {key: spec for key, spec in contract.observation.items() if not spec.privileged}
    cameras = {key: spec for key, spec in specs.items() if spec.is_picture}
    state = {key: spec for key, spec in specs.items() if spec.dtype == "float32"}
    assigned = {*cameras, *state, instruction(contract)}
    return state, cameras, {key: spec for key, spec in specs.items() if key not in assigned}


class _Writer:
    """Writes episodes into the files of one dataset; the first episode determines the shapes.

    REWARD and SUCCESS are written if they are `signals`.
    """

    def __init__(
        self, directory: Path, contract: Contract, robot: str | None, pictures: Store, signals: Collection[str]
    ) -> None:
        with needs_extra("robot"):
            import pyarrow as pa
            import pyarrow.parquet as pq
        self.pa = pa
        self.pq = pq
        self.directory = directory
        self.contract = contract
        self.robot = robot
        self.pictures = pictures
        self.signals = signals
        self.rate = _rate(contract.control_dt_s)
        self.features: dict[str, dict[str, Any]] = {}
        self.tasks: dict[str, int] = {}
        self.episodes: list[dict[str, Any]] = []
        self.stats: list[dict[str, dict[str, Array]]] = []
        self.frames = self.file_index = self.file_bytes = 0
        self.file: Any = None

    def add(self, task: str, episode: Episodes) -> None:
        """Append an episode of `task`."""
        observation = {key: value.numpy() for key, value in episode.observation.items()}
        shapes = {key: value.shape[1:] for key, value in observation.items()}
        key = instruction(self.contract)
        texts = [task] * len(episode) if key is None else [decode(row) for row in observation[key]]
        columns, cameras = self._columns(texts, episode, observation)
        features = _features(self.contract, shapes, self.rate, self.pictures, self.signals)
        if self.features and features != self.features:
            changed = [key for key, feature in features.items() if feature != self.features[key]]
            raise UserError(f"{', '.join(changed)} has another shape than in the first episode")
        if not self.features:
            self.features = features
            specs = {key: replace(self.contract.observation[key], shape=shape) for key, shape in shapes.items()}
            self.contract = replace(self.contract, observation=specs, horizon=1, executed=1)
        number = len(self.episodes)
        length = len(episode)
        row: dict[str, Any] = {"episode_index": number, "tasks": list(dict.fromkeys(texts)), "length": length}
        outcome = int(episode.success)
        row[OUTCOME] = None if outcome == UNKNOWN else bool(outcome)
        row |= {"dataset_from_index": self.frames, "dataset_to_index": self.frames + length}
        embedded = cameras if self.pictures is Store.IMAGE else {}
        row |= self._write_rows(columns, embedded) | {"meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0}
        for key in cameras.keys() - embedded.keys():
            row |= self._write_video(key, cameras[key], number)
        stats = {key: _statistics(value) for key, value in columns.items()}
        stats |= {key: _picture_statistics(frames) for key, frames in cameras.items()}
        row |= {
            f"stats/{key}/{name}": value.tolist() for key, values in stats.items() for name, value in values.items()
        }
        self.episodes.append(row)
        self.stats.append(stats)
        self.frames += length

    def finish(self) -> None:
        """Write the dataset's metadata."""
        if not self.episodes:
            raise UserError(driven.NOTHING)
        self.file.close()
        table = self.pa.Table.from_pylist(self.episodes)
        outcomes = table[OUTCOME].cast(self.pa.bool_())  # a column without any known outcome has no type
        table = table.set_column(table.schema.get_field_index(OUTCOME), OUTCOME, outcomes)
        self._parquet(EPISODES_PATH, table)
        self._parquet("meta/tasks.parquet", self._task_table())
        info = {
            "codebase_version": VERSION,
            "robot_type": self.robot,
            "total_episodes": len(self.episodes),
            "total_frames": self.frames,
            "total_tasks": len(self.tasks),
            "chunks_size": FILES_PER_CHUNK,
            "data_files_size_in_mb": DATA_MB,
            "video_files_size_in_mb": VIDEO_MB,
            "fps": self.rate,
            "splits": {"train": f"0:{len(self.episodes)}"},
            "data_path": DATA_PATH,
            "video_path": VIDEO_PATH if (self.directory / "videos").exists() else None,
            "features": self.features,
        }
        self._json("info", info)
        merged = {key: self._dataset_statistics(key) for key in self.stats[0]}
        self._json(
            "stats", {key: {name: v.tolist() for name, v in statistics.items()} for key, statistics in merged.items()}
        )
        (self.directory / "meta/contract.json").write_text(self.contract.to_json() + "\n", encoding="utf-8")

    def _dataset_statistics(self, key: str) -> dict[str, Array]:
        """Statistics of all rows of a feature; statistics of pictures are merged from the episodes'."""
        if key.startswith(CAMERA):
            return _merged([stats[key] for stats in self.stats])
        files = sorted((self.directory / "data").glob("*/*.parquet"))
        values = [row for path in files for row in self.pq.read_table(path, columns=[key])[key].to_pylist()]
        return _statistics(np.array(values))

    def _columns(
        self, texts: Sequence[str], episode: Episodes, observation: dict[str, Array]
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """Columns [L, ...] of an episode by feature, and its pictures by feature."""
        length = len(episode)
        state, cameras, others = parts(self.contract)
        for text in texts:
            self.tasks.setdefault(text, len(self.tasks))
        columns: dict[str, Array] = {}
        if state:
            # [L, S]: all float observations, flattened and concatenated
            columns[STATE] = np.concatenate([observation[key].reshape(length, -1) for key in state], 1)
        columns |= {f"observation.{key}": observation[key] for key in others}
        columns |= {ACTION: episode.actions.numpy(), INTERVENTION: episode.human.numpy()}
        # next.success is true in the last frame of a successful episode only
        success = (np.arange(length) == length - 1) & (int(episode.success) == SUCCEEDED)
        columns |= {
            key: value for key, value in ((REWARD, episode.reward.numpy()), (SUCCESS, success)) if key in self.signals
        }
        columns["timestamp"] = (np.arange(length) / self.rate).astype(np.float32)
        columns["frame_index"] = np.arange(length)
        columns["episode_index"] = np.full(length, len(self.episodes))
        columns["index"] = self.frames + np.arange(length)
        columns["task_index"] = np.array([self.tasks[text] for text in texts])
        return columns, {CAMERA + key: observation[key] for key in cameras}

    def _write_rows(self, columns: Mapping[str, Array], images: Mapping[str, Array]) -> dict[str, int]:
        """Append an episode to the current or a new parquet file; returns the file's place for meta/episodes."""
        flat = {key: value[:, 0] if value.shape[1:] == (1,) else value for key, value in columns.items()}
        arrays = {
            key: self.pa.array(list(value) if value.ndim == 2 else value.tolist(), self._type(value))
            for key, value in flat.items()
        }
        cell = self.pa.struct({"bytes": self.pa.binary(), "path": self.pa.string()})
        for key, frames in images.items():
            cells = [
                {"bytes": data, "path": f"frame-{number:06d}.png"} for number, data in enumerate(encode_all(frames))
            ]
            arrays[key] = self.pa.array(cells, cell)
        table = self.pa.table(arrays)
        if self.file is None or self.file_bytes + table.nbytes > DATA_MB << 20:
            if self.file is not None:
                self.file.close()
                self.file_index += 1
            indices = {
                "chunk_index": self.file_index // FILES_PER_CHUNK,
                "file_index": self.file_index % FILES_PER_CHUNK,
            }
            path = self.directory / DATA_PATH.format(**indices)
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file = self.pq.ParquetWriter(path, table.schema)
            self.file_bytes = 0
        self.file.write_table(table)
        self.file_bytes += table.nbytes
        chunk, file = divmod(self.file_index, FILES_PER_CHUNK)
        return {"data/chunk_index": chunk, "data/file_index": file}

    def _type(self, value: Array) -> Any:  # noqa: ANN401 - pyarrow's
        kind = self.pa.from_numpy_dtype(value.dtype)
        for _ in value.shape[1:]:
            kind = self.pa.list_(kind)
        return kind

    def _write_video(self, key: str, frames: Array, episode: int) -> dict[str, Any]:
        """Write a video of one episode; returns its place for meta/episodes."""
        from embodied.evaluation.video import write_video

        chunk, file = divmod(episode, FILES_PER_CHUNK)  # a file for each episode
        path = self.directory / VIDEO_PATH.format(video_key=key, chunk_index=chunk, file_index=file)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_video(path, frames, self.rate)
        row = {"chunk_index": chunk, "file_index": file, "from_timestamp": 0.0, "to_timestamp": len(frames) / self.rate}
        return {f"videos/{key}/{name}": value for name, value in row.items()}

    def _task_table(self) -> Any:  # noqa: ANN401 - pyarrow's
        """The task table as pandas writes an indexed frame, which LeRobot reads."""
        table = self.pa.table({"task_index": list(range(len(self.tasks))), "__index_level_0__": list(self.tasks)})
        column = {"field_name": "task_index", "name": "task_index", "pandas_type": "int64", "numpy_type": "int64"}
        index = {"field_name": "__index_level_0__", "name": None, "pandas_type": "unicode", "numpy_type": "object"}
        metadata = {"index_columns": ["__index_level_0__"], "columns": [column, index], "column_indexes": []}
        return table.replace_schema_metadata({"pandas": json.dumps(metadata)})

    def _parquet(self, path: str, table: Any) -> None:  # noqa: ANN401 - pyarrow's
        (self.directory / path).parent.mkdir(parents=True, exist_ok=True)
        self.pq.write_table(table, self.directory / path)

    def _json(self, name: str, content: dict[str, Any]) -> None:
        (self.directory / f"meta/{name}.json").write_text(json.dumps(content, indent=4) + "\n", encoding="utf-8")


def _features(
    contract: Contract, shapes: dict[str, tuple[int, ...]], rate: float, pictures: Store, signals: Collection[str]
) -> dict[str, dict[str, Any]]:
    state, cameras, others = parts(contract)
    features: dict[str, dict[str, Any]] = {}
    if state:
        resolved = {key: replace(spec, shape=shapes[key]) for key, spec in state.items()}
        names = [name for key, spec in resolved.items() for name in elements(key, spec)]
        features[STATE] = {"dtype": "float32", "shape": [len(names)], "names": names}
    for key in cameras:
        names = ["height", "width", "channels"]
        if pictures is Store.IMAGE:
            features[CAMERA + key] = {"dtype": "image", "shape": list(shapes[key]), "names": names}
            continue
        height, width = (size + size % 2 for size in shapes[key][:2])  # as the video has it
        about = {"video.height": height, "video.width": width, "video.codec": "h264", "video.pix_fmt": "yuv420p"}
        about |= {"video.fps": rate, "video.channels": 3, "video.is_depth_map": False, "has_audio": False}
        features[CAMERA + key] = {"dtype": "video", "shape": [height, width, 3], "names": names, "info": about}
    for key, spec in others.items():
        shape = list(shapes[key])
        names = list(spec.names) or None
        features[f"observation.{key}"] = {"dtype": spec.dtype, "shape": shape, "names": names}
    action = contract.action
    features[ACTION] = {"dtype": action.dtype, "shape": list(action.shape), "names": list(action.names) or None}
    features[INTERVENTION] = {"dtype": "bool", "shape": [1], "names": None}
    for key, dtype in ((REWARD, "float32"), (SUCCESS, "bool")):
        features |= {key: {"dtype": dtype, "shape": [1], "names": None}} if key in signals else {}
    features["timestamp"] = {"dtype": "float32", "shape": [1], "names": None}
    counters = ("frame_index", "episode_index", "index", "task_index")
    return features | {key: {"dtype": "int64", "shape": [1], "names": None} for key in counters}


def _statistics(values: Array) -> dict[str, Array]:
    rows = np.asarray(values, np.float64).reshape(len(values), *(values.shape[1:] or (1,)))
    statistics = {"min": rows.min(0), "max": rows.max(0), "mean": rows.mean(0), "std": rows.std(0)}
    statistics |= dict(zip(QUANTILES, np.quantile(rows, list(QUANTILES.values()), axis=0), strict=True))
    return statistics | {"count": np.array([len(rows)])}


def _picture_statistics(frames: Array) -> dict[str, Array]:
    """Colour statistics of a sample of images, [3, 1, 1] each, in [0, 1]."""
    # fewer than 100 frames [n, H, W, 3] -> [pixels, 3]
    pixels = frames[:: max(1, len(frames) // 50)].reshape(-1, 3) / 255.0
    statistics = {name: value.reshape(3, 1, 1) for name, value in _statistics(pixels).items() if name != "count"}
    return statistics | {"count": np.array([len(frames)])}


def _merged(episodes: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """Merge the statistics of episodes, weighted by their lengths; quantiles are averaged, as in LeRobot."""
    counts = np.array([stats["count"][0] for stats in episodes], np.float64)
    weights = (counts / counts.sum()).reshape(-1, *([1] * episodes[0]["mean"].ndim))
    means, stds = (np.stack([stats[name] for stats in episodes]) for name in ("mean", "std"))
    mean = (weights * means).sum(0)
    # law of total variance: E[std^2 + (mean_i - mean)^2]
    std = np.sqrt((weights * (stds**2 + (means - mean) ** 2)).sum(0))
    low, high = (np.stack([stats[name] for stats in episodes]) for name in ("min", "max"))
    quantiles = {name: (weights * np.stack([stats[name] for stats in episodes])).sum(0) for name in QUANTILES}
    bounds = {"min": low.min(0), "max": high.max(0)}
    return bounds | {"mean": mean, "std": std, "count": np.array([int(counts.sum())])} | quantiles


def _rate(control_dt_s: float) -> int | float:
    # an integer up to rounding of the period
    rate = 1.0 / control_dt_s
    return round(rate) if abs(rate - round(rate)) < 1e-6 else rate


def main(arguments: list[str]) -> None:
    """SOURCE... DATASET [pictures=video|image]."""
    options = [each.partition("=")[2] for each in arguments if each.startswith("pictures=")]
    *sources, directory = [each for each in arguments if not each.startswith("pictures=")] or [""]
    stores = [store.value for store in Store]
    if not sources or any(option not in stores for option in options):
        raise UserError(f"expected SOURCE... DATASET [pictures={'|'.join(stores)}]")
    store = Store(options[0]) if options else Store.VIDEO
    folders = [source for source in sources if Path(source).is_dir()]
    if folders and len(sources) > 1:
        raise UserError(f"expected recordings, or one folder of episodes; got {', '.join(sources)}")
    if folders:
        episodes = write_episodes(folders[0], directory, pictures=store)
    else:
        episodes = write([Recording(path) for path in sources], directory, pictures=store)
    program.log.info(f"wrote {directory}: {episodes} episodes")


if __name__ == "__main__":
    sys.exit(program.main(main, lambda _: str(__doc__), sys.argv[1:]))
