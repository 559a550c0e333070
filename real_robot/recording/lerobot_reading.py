"""Reads LeRobot datasets (v2.0, v2.1, v3.0) as demonstrations for a contract.

Our own datasets contain their contract and are checked in full. Other datasets have names at most: their elements are
found by name, and their units and frames are assumed to match, with a warning. Text without a feature, such as the
instruction, is taken from the episode's task.
"""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from embodied.command_line.extras import needs_extra
from embodied.contract import Contract, TensorSpec
from embodied.deployment.network import elements
from embodied.errors import UserError
from embodied.rollout.episodes import Episodes
from embodied.text import encode
from real_robot.recording.lerobot_dataset import ACTION, CAMERA, INTERVENTION, STATE
from real_robot.robots.robot import Array

log = logging.getLogger(__name__)
VERSIONS = ("v2.0", "v2.1", "v3.0")
TASK = "task_index"
OPTIONAL = {
    "human": (INTERVENTION, torch.bool),
    "reward": ("next.reward", torch.float32),
    "success": ("next.success", torch.bool),
}
"""Optional features: whether a human acted, the reward, and success (assumed if missing)."""


def read(directory: str | Path, contract: Contract) -> Iterator[Episodes]:
    """Every episode of a dataset, with the keys and the order of elements of `contract`.

    `OPTIONAL` features are read where the dataset has them.

    Raises:
        UserError: if the folder is no dataset, or does not serve the contract; names what is missing and what is there.
    """
    source = _Source(Path(directory))
    columns = source.plan(contract)
    optional = {name: feature for name, feature in OPTIONAL.items() if feature[0] in source.features}
    features = {column.feature for column in columns.values()} | {feature for feature, _ in optional.values()}
    for episode in source.episodes(features):
        arrays = {key: torch.from_numpy(column.take(episode[column.feature])) for key, column in columns.items()}
        actions = arrays.pop(ACTION)
        more = {name: torch.from_numpy(episode[key]).flatten().to(dtype) for name, (key, dtype) in optional.items()}
        success = bool(more.pop("success", torch.ones(1)).any())
        yield Episodes.of(TensorDict(arrays, [len(actions)]), actions, success=success, **more)


@dataclass(frozen=True)
class _Column:
    """Source of an observation or the action: elements `index` of a feature's last axis (all if None).

    With `texts` the feature is an index into them.
    """

    feature: str
    spec: TensorSpec
    index: list[int] | None = None
    texts: dict[int, str] | None = None

    def take(self, values: Array) -> Array:
        if self.texts is not None:
            said = {number: encode(self.texts[number], self.spec.shape[-1]) for number in set(values.flat)}
            return np.stack([said[number] for number in values.flat])
        taken = values if self.index is None else values[..., self.index]
        if self.spec.is_picture:
            height, width, _ = self.spec.shape
            taken = taken[:, : height if height > 0 else None, : width if width > 0 else None]
        shape = self.spec.shape if taken.ndim < 1 + len(self.spec.shape) else taken.shape[1:]
        return np.ascontiguousarray(taken.reshape(len(taken), *shape).astype(self.spec.dtype))


class _Source:
    """The files of a dataset."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        try:
            self.info: dict[str, Any] = json.loads((directory / "meta/info.json").read_text())
            self.features: dict[str, Any] = self.info["features"]
            version = self.info["codebase_version"]
        except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
            raise UserError(f"{directory} is no LeRobot dataset: {type(error).__name__}: {error}") from error
        if version not in VERSIONS:
            raise UserError(f"{directory} has format {version}; expected one of {', '.join(VERSIONS)}")
        path = directory / "meta/contract.json"
        self.contract = Contract.from_dict(json.loads(path.read_text())) if path.exists() else None

    def plan(self, wanted: Contract) -> dict[str, _Column]:
        """A column for each observation of `wanted` and for its action."""
        needed = {key: spec for key, spec in wanted.observation.items() if not spec.privileged}
        if self.contract is not None:
            return self._own_plan(self.contract, wanted, needed)
        found = {key: self._find(key, spec) for key, spec in [*needed.items(), (ACTION, wanted.action)]}
        rows = [f"{key}: {column}" for key, column in found.items() if isinstance(column, str)]
        fps = self.info.get("fps")
        if not fps or abs(1.0 / fps - wanted.control_dt_s) > 1e-4 * wanted.control_dt_s:
            rows.append(f"rate: expected {1.0 / wanted.control_dt_s:g} Hz, got {fps} Hz")
        if rows:
            has = "; ".join(
                f"{key} {tuple(feature['shape'])} {_names(feature) or 'without names'}"
                for key, feature in self.features.items()
                if key.startswith(("observation", ACTION))
            )
            raise UserError(f"{self.directory} does not serve the contract ({'; '.join(rows)}); it has {has}")
        log.warning(f"{self.directory} has no units and frames; they are assumed to match the contract")
        return {key: column for key, column in found.items() if isinstance(column, _Column)}

    def _own_plan(self, own: Contract, wanted: Contract, needed: dict[str, TensorSpec]) -> dict[str, _Column]:
        try:
            binding = wanted.bind(own)
        except UserError as error:
            raise UserError(f"{self.directory} does not serve the contract: {' '.join(str(error).split())}") from error
        where = {name: place for place, name in enumerate(_names(self.features.get(STATE, {})))}
        columns = {}
        for key in needed:
            spec, order = own.observation[key], binding.observation[key]
            if spec.dtype == "float32":
                names = np.array(elements(key, spec)).reshape(spec.shape)
                names = names if order is None else names[..., order.numpy()]
                shaped = TensorSpec(names.shape, spec.dtype)
                columns[key] = _Column(STATE, shaped, [where[name] for name in names.flatten().tolist()])
            else:
                feature = CAMERA + key if spec.is_picture else f"observation.{key}"
                columns[key] = _Column(feature, spec, None if order is None else order.tolist())
        # scatters a policy's action into the robot's order: here the other way
        index = None if binding.action is None else binding.action.argsort().tolist()
        return columns | {ACTION: _Column(ACTION, wanted.action, index)}

    def _find(self, key: str, spec: TensorSpec) -> _Column | str:
        """Column by the feature's name, else by element names in the state; or an error text."""
        candidates = [key, f"observation.{key}", CAMERA + key] if key != ACTION else [ACTION]
        for feature in (name for name in candidates if name in self.features):
            shape, names = tuple(self.features[feature]["shape"]), _names(self.features[feature])
            if spec.names and names and set(spec.names) <= set(names) and not spec.is_picture:
                return _Column(feature, spec, [names.index(name) for name in spec.names])
            if spec.names and names and not spec.is_picture:
                return f"expected elements {', '.join(spec.names)}, got {', '.join(names)}"
            if len(shape) != len(spec.shape) or any(a not in (-1, b) for a, b in zip(spec.shape, shape, strict=True)):
                return f"expected {spec.shape}, got {shape}"
            return _Column(feature, spec)
        state = _names(self.features.get(STATE, {}))
        for names in ([f"{key}.{name}" for name in spec.names], list(spec.names)):
            if names and set(names) <= set(state):
                return _Column(STATE, spec, [state.index(name) for name in names])
        if spec.is_text and len(spec.shape) == 1 and TASK in self.features:
            return _Column(TASK, spec, texts=self._tasks())
        return f"expected a feature {' or '.join(candidates)}, or its elements in {STATE}"

    def _tasks(self) -> dict[int, str]:
        """Task texts by index."""
        lines = self.directory / "meta/tasks.jsonl"  # before v3
        if lines.exists():
            rows = map(json.loads, lines.read_text().splitlines())
            return {row["task_index"]: row["task"] for row in rows}
        with needs_extra("robot"):
            import pyarrow.parquet as pq
        table = pq.read_table(self.directory / "meta/tasks.parquet").to_pydict()
        numbers = table.pop("task_index")
        return dict(zip(numbers, next(iter(table.values())), strict=True))

    def episodes(self, features: set[str]) -> Iterator[dict[str, Array]]:
        """Arrays [L, ...] of the `features`, episode by episode."""
        with needs_extra("robot"):
            import pyarrow as pa
            import pyarrow.parquet as pq
        videos = {key for key in features if self.features[key]["dtype"] == "video"}
        columns = [*sorted(features - videos), "episode_index", "frame_index"]
        files = sorted((self.directory / "data").glob("*/*.parquet"))
        try:
            table = pa.concat_tables([pq.read_table(file, columns=columns) for file in files])
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"cannot read the data of {self.directory}: {error}") from error
        table = table.sort_by([("episode_index", "ascending"), ("frame_index", "ascending")])
        numbers = table["episode_index"].to_numpy()
        starts = np.flatnonzero(np.r_[True, numbers[1:] != numbers[:-1]])
        for start, stop in zip(starts, [*starts[1:], len(numbers)], strict=True):
            rows = table.slice(start, stop - start)
            episode = {key: self._array(rows[key], self.features[key]) for key in features - videos}
            for key in videos:
                episode[key] = self._frames(key, int(numbers[start]), int(stop - start))
            yield episode

    @staticmethod
    def _array(column: Any, feature: dict[str, Any]) -> Array:  # noqa: ANN401 - pyarrow's
        if feature["dtype"] == "image":
            from PIL import Image

            return np.stack(
                [np.asarray(Image.open(io.BytesIO(cell["bytes"])).convert("RGB")) for cell in column.to_pylist()]
            )
        return np.array(column.to_pylist(), feature["dtype"]).reshape(len(column), *feature["shape"])

    def _frames(self, key: str, episode: int, length: int) -> Array:
        """Images [L, height, width, 3] of an episode."""
        import imageio_ffmpeg

        path, first = self._video(key, episode)
        reader = imageio_ffmpeg.read_frames(str(path))
        try:
            width, height = next(reader)["size"]
            frames = []
            for number, frame in enumerate(reader):
                if number >= first:
                    frames.append(np.frombuffer(frame, np.uint8).reshape(height, width, 3))
                if len(frames) == length:
                    return np.stack(frames)
        except (OSError, StopIteration, RuntimeError) as error:
            raise UserError(f"cannot read {path}: {error}") from error
        finally:
            reader.close()
        raise UserError(f"expected {length} frames from {first} on in {path}, got {len(frames)}; it is cut short")

    def _video(self, key: str, episode: int) -> tuple[Path, int]:
        """The video file of an episode, and the number of its first frame."""
        template = self.info["video_path"]
        if "episode_index" in template:  # v2: a file for each episode
            chunk = episode // self.info["chunks_size"]
            return self.directory / template.format(episode_chunk=chunk, video_key=key, episode_index=episode), 0
        import pyarrow.parquet as pq

        names = [f"videos/{key}/{name}" for name in ("chunk_index", "file_index", "from_timestamp")]
        for file in sorted((self.directory / "meta/episodes").glob("*/*.parquet")):
            for row in pq.read_table(file, columns=["episode_index", *names]).to_pylist():
                if row["episode_index"] == episode:
                    chunk, number, start_s = (row[name] for name in names)
                    path = template.format(video_key=key, chunk_index=chunk, file_index=number)
                    return self.directory / path, round(start_s * self.info["fps"])
        raise UserError(f"meta/episodes of {self.directory} does not locate {key} of episode {episode}")


def _names(feature: dict[str, Any]) -> list[str]:
    """Names of a feature's elements, which LeRobot keeps as a list, as {"motors": [...]}, or not at all."""
    names = feature.get("names")
    if isinstance(names, dict):
        names = next((value for value in names.values() if isinstance(value, list)), list(names))
    return list(names or [])
