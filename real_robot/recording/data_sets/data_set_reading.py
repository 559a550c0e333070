"""Reads LeRobot datasets (v2.0, v2.1, v3.0) and files of arrays (`array_layouts.py`) as demonstrations for a contract.

Our own datasets contain their contract and are checked in full. Other datasets have names at most: their elements are
looked up by name, and their units and frames are assumed to match, which a note reports; datasets of a task's benchmark
are read by its `Convention`. Text without a feature, such as the instruction, is taken from the frame's task. Pictures
stay encoded. Files are read in parts; statistics of the dataset are not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.contract import Contract, TensorSpec
from embodied.data.episodes import Episodes
from embodied.data.pictures import Pictures, averaged, decode, encode_all
from embodied.errors import UserError
from embodied.export.network import elements
from embodied.task import Convention
from embodied.text import encode
from real_robot.recording.data_sets.array_files import ArraySource, array_file
from real_robot.recording.data_sets.lerobot_files import TASK, Cells, Source
from real_robot.recording.data_sets.matching import Match, MatchOptions, resampled_reward, resampled_rows
from real_robot.recording.data_sets.outcomes import HUMAN, REWARD, Columns, Part, is_number
from real_robot.recording.lerobot_dataset import ACTION, CAMERA, STATE
from real_robot.robots.robot import Array

DataSource = Source | ArraySource


def source_of(path: Path, options: MatchOptions | None = None) -> DataSource:
    """The data set at `path`: a file of arrays, or a LeRobot dataset.

    Raises:
        UserError: if it is neither, or `options` do not fit it.
    """
    options = options or MatchOptions()
    if file := array_file(path):
        return ArraySource(file, options.columns, options.rate_hz, options.filter)
    if options.filter is not None:
        raise UserError(f"{path} has no filter keys: leave out demonstration_filter={options.filter}")
    return Source(path, options.columns, options.rate_hz)


def read(path: str | Path, contract: Contract, match: Match | None = None) -> Iterator[Episodes]:
    """Yield every episode of a data set, with the keys and the order of elements of `contract`.

    The contract is checked before the first episode is read. With a `match`, only episodes of the run's tasks are read.
    Rewards, outcomes, endings and signals are those of the data set's columns.

    Raises:
        UserError: if there is no data set, or it does not serve the contract; names missing and existing features.
    """
    match = match or Match(Path(path))
    source = source_of(Path(path), match.options)
    convention = match.convention if source.contract is None and isinstance(source, Source) else None
    plan: _Plan = _Named(source, contract, match) if convention is None else _Conventional(source, contract, convention)
    is_resampled = match.options.resampling and convention is None and source.rate_hz
    ratio = source.rate_hz * contract.control_dt_s if is_resampled else 1.0
    if isinstance(source, Source) and (note := source.incompleteness()):
        match.notes.append(note)
    if match.any_text and TASK in source.features:
        for text in source.tasks.values():
            match.task_number(text)
    if not match.any_text and isinstance(source, ArraySource) and len(match.task_names) > 1:
        raise UserError(f"{path} has no texts, and the run has several tasks; choose one with task.tasks=[...]")
    return _episodes(source, plan, None if match.any_text else match.task_number, ratio, match.notes)


def _episodes(
    source: DataSource, plan: _Plan, tasks: Callable[[str], int | None] | None, ratio: float, notes: list[str]
) -> Iterator[Episodes]:
    """Yield the episodes of the `tasks`, converted by `plan`, with `ratio` rows for each action."""
    columns = source.columns
    omitted = 0
    for number, task, rows, final in source.episodes(plan.features | columns.features, tasks):
        length = len(next(iter(rows.values())))
        for part in columns.parts(rows, length, source.success.get(number)):
            end = part.end
            following = None
            if source.has_final:
                following = {key: cells[end : end + 1] for key, cells in rows.items()} if end < length else final
                if following is None:
                    following = {key: cells[end - 1 : end] for key, cells in rows.items()}
                    end -= not part.terminated
                    omitted += not part.terminated
            if end > part.begin:
                cells = {key: each[part.begin : end] for key, each in rows.items()}
                yield _episode(plan, columns, cells, following, part, task, ratio)
    if omitted:
        notes.append(f"the last step of {omitted:,} episodes is left out: the observation after it is not stored.")


def _episode(
    plan: _Plan,
    columns: Columns,
    cells: Mapping[str, Any],
    following: Mapping[str, Any] | None,
    part: Part,
    task: int,
    ratio: float,
) -> Episodes:
    """The episode with the columns `cells`, and the observation `following` its last step if that is known.

    There is an action for `ratio` rows; rewards and signals keep their sums.
    """
    steps = {name: columns.values(name, cells) for name in (REWARD, *columns.signals())}
    if ratio != 1.0:
        steps = {name: each if each is None else resampled_reward(each, ratio) for name, each in steps.items()}
        cells = _resampled(cells, ratio)
    arrays, pictures = plan.take(cells)
    actions = arrays.pop(ACTION)
    final = None
    if following is not None:
        last, last_pictures = plan.take({key: each[-1:] for key, each in cells.items()} | dict(following))
        last.pop(ACTION)
        last |= {key: torch.from_numpy(decode(each[0]).copy()).unsqueeze(0) for key, each in last_pictures.items()}
        final = TensorDict(last, [1])[0]
    human = columns.values(HUMAN, cells)
    reward = steps.pop(REWARD)
    signals = {name: torch.from_numpy(each) for name, each in steps.items()}
    episode = Episodes.of(
        TensorDict(arrays, [len(actions)]),
        actions,
        success=part.success,
        reward=None if reward is None else torch.from_numpy(reward),
        human=None if human is None else torch.from_numpy(human > 0.5),
        terminated=part.terminated,
        task_index=task,
        final_observation=final,
        pictures=Pictures.of(pictures) if pictures else None,
    )
    return replace(episode, signals=TensorDict(signals, [len(actions)])) if signals else episode


def _resampled(cells: Mapping[str, Any], ratio: float) -> dict[str, Any]:
    """Columns of an episode at another rate."""
    rows = resampled_rows(len(next(iter(cells.values()))), ratio)
    return {
        key: each[rows] if isinstance(each, np.ndarray) else [each[row] for row in rows] for key, each in cells.items()
    }


class _Plan(Protocol):
    """Conversion of a dataset's features to observations and actions."""

    features: set[str]

    def take(self, episode: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, list[bytes]]]:
        """Return the observations and "action" [L, ...] of an episode, and its encoded pictures by camera."""
        ...


@dataclass(frozen=True)
class _Column:
    """Source of an observation or the action: elements `index` of a feature's last axis (all if None).

    With `texts` the feature is an index into `texts`.
    """

    feature: str
    spec: TensorSpec
    index: list[int] | None = None
    texts: dict[int, str] | None = None

    def take(self, values: Array) -> Tensor:
        if self.texts is not None:
            encoded = {number: encode(self.texts[number], self.spec.shape[-1]) for number in set(values.flat)}
            return torch.from_numpy(np.stack([encoded[number] for number in values.flat]))
        selected = values if self.index is None else values[..., self.index]
        shape = self.spec.shape if selected.ndim < 1 + len(self.spec.shape) else selected.shape[1:]
        return torch.from_numpy(np.ascontiguousarray(selected.reshape(len(selected), *shape).astype(self.spec.dtype)))


class _Named:
    """Plan that looks up elements by name, or by the contract of one of our own datasets."""

    def __init__(self, source: DataSource, contract: Contract, match: Match) -> None:
        self._source = source
        self._match = match
        self.columns = self.plan(contract)
        self.features = {column.feature for column in self.columns.values()}

    def take(self, episode: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, list[bytes]]]:
        arrays = {}
        pictures = {}
        for key, column in self.columns.items():
            if column.spec.is_picture:
                pictures[key] = _fitted(column.feature, column.spec, episode[column.feature])
            else:
                arrays[key] = column.take(episode[column.feature])
        return arrays, pictures

    def plan(self, contract: Contract) -> dict[str, _Column]:
        """A column for each observation of `contract` and for its action."""
        needed = {key: spec for key, spec in contract.observation.items() if not spec.privileged}
        if self._source.contract is not None:
            return self._own_plan(self._source.contract, contract, needed)
        columns = {key: self._find(key, spec) for key, spec in [*needed.items(), (ACTION, contract.action)]}
        rows = [f"{key}: {column}" for key, column in columns.items() if isinstance(column, str)]
        if rows:
            rows[-1] += "; demonstration_names={OURS:THEIRS} tells other names"
        if row := self._rate(contract):
            rows.append(row)
        if rows:
            raise _unfit(self._source, rows)
        specs = {**needed, ACTION: contract.action}
        units = ", ".join(f"{key} in {spec.unit}" for key, spec in specs.items() if not spec.is_text and spec.unit)
        message = "no units and frames; they are assumed to match the contract"
        self._match.notes.append(f"{message}: {units}." if units else f"{message}.")
        return {key: column for key, column in columns.items() if isinstance(column, _Column)}

    def _rate(self, contract: Contract) -> str:
        """Describe a mismatch of the dataset's rate, and the remedy; "" if rates match or rows are resampled."""
        rate = self._source.rate_hz
        target_hz = 1.0 / contract.control_dt_s
        if abs(rate / target_hz - 1.0) <= 1e-4:
            return ""
        if not rate and isinstance(self._source, ArraySource):
            self._match.notes.append(f"no rate; it is assumed to match the contract's, {target_hz:g} Hz.")
            return ""
        if rate and self._match.options.resampling:
            self._match.notes.append(f"{rate:g} Hz; its rows are skipped or repeated for {target_hz:g} Hz.")
            return ""
        return (
            f"rate: expected {target_hz:g} Hz, got {rate:g} Hz; demonstration_resampling=true skips or repeats its rows"
        )

    def _own_plan(self, own: Contract, contract: Contract, needed: dict[str, TensorSpec]) -> dict[str, _Column]:
        """Columns by the dataset's contract `own`, bound to `contract`."""
        rate = self._rate(contract)
        if not rate:
            own = replace(own, control_dt_s=contract.control_dt_s)
        try:
            binding = contract.bind(own)
        except UserError as error:
            differs = " ".join(str(error).split()) + (f" ({rate})" if rate else "")
            raise UserError(f"{self._source.directory} does not serve the contract: {differs}") from error
        state_indices = {name: place for place, name in enumerate(feature_names(self._source.features.get(STATE, {})))}
        columns = {}
        missing = []
        for key in needed:
            spec = own.observation[key]
            order = binding.observation[key]
            if spec.dtype == "float32":
                names = np.array(elements(key, spec)).reshape(spec.shape)
                names = names if order is None else names[..., order.numpy()]
                shaped = TensorSpec(names.shape, spec.dtype)
                missing += [f"{key}: expected {name} in {STATE}" for name in names.flat if name not in state_indices]
                columns[key] = _Column(STATE, shaped, [state_indices.get(name, 0) for name in names.flatten().tolist()])
            elif spec.is_text and f"observation.{key}" not in self._source.features:
                columns[key] = _Column(TASK, contract.observation[key], texts=self._source.tasks)
            else:
                feature = CAMERA + key if spec.is_picture else f"observation.{key}"
                columns[key] = _Column(feature, spec, None if order is None else order.tolist())
        # binding.action scatters a policy's action into the robot's order; argsort is its inverse
        index = None if binding.action is None else binding.action.argsort().tolist()
        columns |= {ACTION: _Column(ACTION, contract.action, index)}
        features = dict.fromkeys(column.feature for column in columns.values())
        missing += [f"expected a feature {name}" for name in features if name not in self._source.features]
        if missing:
            raise _unfit(self._source, missing)
        return columns

    def _find(self, key: str, spec: TensorSpec) -> _Column | str:
        """Return the column of the feature's name, else of element names in the state; or an error text."""
        dataset_name = self._match.name(key)
        element_names = [self._match.name(name) for name in spec.names]
        candidates = (
            [dataset_name, f"observation.{dataset_name}", CAMERA + dataset_name] if key != ACTION else [dataset_name]
        )
        for feature in (name for name in candidates if name in self._source.features):
            shape = tuple(self._source.features[feature]["shape"])
            names = feature_names(self._source.features[feature])
            dtype = self._source.features[feature]["dtype"]
            if spec.is_picture and dtype not in ("image", "video"):
                return f"expected pictures of uint8, got {dtype}"
            if not spec.is_picture and not is_number(dtype):
                return f"expected numbers, got {dtype}"
            if element_names and names and set(element_names) <= set(names) and not spec.is_picture:
                return _Column(feature, spec, [names.index(name) for name in element_names])
            if element_names and names and not spec.is_picture:
                return f"expected elements {', '.join(element_names)}, got {', '.join(names)}"
            # pictures of another size are averaged, see _fitted
            needed = (-1, -1, *spec.shape[2:]) if spec.is_picture else spec.shape
            if len(shape) != len(needed) or any(a not in (-1, b) for a, b in zip(needed, shape, strict=True)):
                return f"expected {spec.shape}, got {shape}"
            return _Column(feature, spec)
        state = feature_names(self._source.features.get(STATE, {}))
        for names in ([f"{dataset_name}.{name}" for name in element_names], element_names):
            if names and set(names) <= set(state):
                return _Column(STATE, spec, [state.index(name) for name in names])
        if spec.is_text and len(spec.shape) == 1 and TASK in self._source.features:
            return _Column(TASK, spec, texts=self._source.tasks)
        return f"expected a feature {' or '.join(candidates)}, or its elements in {STATE}"


class _Conventional:
    """Plan for a dataset of a task's benchmark, read by the task's convention."""

    def __init__(self, source: Source, contract: Contract, convention: Convention) -> None:
        self.contract = contract
        self.convention = convention
        self._source = source
        needed = {key: spec for key, spec in contract.observation.items() if not spec.privileged}
        self.cameras = {}
        rows = []
        for key in (key for key, spec in needed.items() if spec.is_picture):
            candidates = convention.cameras.get(key, ())
            feature = next((name for name in candidates if name in source.features), None)
            self.cameras[key] = feature or ""
            rows += [] if feature else [f"{key}: expected a feature {' or '.join(candidates)}"]
        rows += [f"expected a feature {name}" for name in (STATE, ACTION, TASK) if name not in source.features]
        if not any(abs(source.rate_hz - rate) < 1e-3 for rate in convention.rates_hz):
            rates = " or ".join(f"{rate:g}" for rate in convention.rates_hz)
            rows.append(f"rate: expected {rates} Hz, got {source.rate_hz:g} Hz")
        if rows:
            raise _unfit(source, rows)
        self.texts = {key: spec for key, spec in needed.items() if spec.is_text}
        self.needed = [key for key, spec in needed.items() if not spec.is_picture and key not in self.texts]
        optional = {name for name in convention.features if name in source.features}
        self.features = {STATE, ACTION, TASK, *self.cameras.values()} | optional

    def take(self, episode: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, list[bytes]]]:
        arrays_by_key = self.convention.convert(episode)
        if absent := [key for key in (*self.needed, *self.texts) if key not in arrays_by_key and key != "instruction"]:
            hints = {self.convention.absent[key] for key in absent if key in self.convention.absent}
            rows = [f"{', '.join(absent)}: not in such datasets", *sorted(hints)]
            raise _unfit(self._source, rows)
        encoded = {key: _Column(TASK, spec, texts=self._source.tasks) for key, spec in self.texts.items()}
        arrays = {key: torch.from_numpy(arrays_by_key[key].astype(np.float32)) for key in (*self.needed, ACTION)}
        arrays |= {key: column.take(episode[TASK]) for key, column in encoded.items()}
        specs = self.contract.observation
        return arrays, {
            key: _fitted(feature, specs[key], episode[feature], mirrored=self.convention.mirrored)
            for key, feature in self.cameras.items()
        }


def _fitted(name: str, spec: TensorSpec, cells: Cells, *, mirrored: bool = False) -> list[bytes]:
    """Encoded pictures of the size in `spec`; larger pictures are averaged over blocks of pixels.

    Raises:
        UserError: for damaged pictures, and for sizes that are no multiple.
    """
    try:
        frames = cells if isinstance(cells, np.ndarray) else np.stack([decode(cell) for cell in cells])
    except ValueError as error:  # damaged, or of several sizes
        raise UserError(f"{name}: {error}") from error
    height, width = (want if want > 0 else have for want, have in zip(spec.shape[:2], frames.shape[1:3], strict=True))
    size = frames.shape[1:3]
    if size == (height, width) and not mirrored and not isinstance(cells, np.ndarray):
        return cells
    if isinstance(cells, np.ndarray) and size == (height + height % 2, width + width % 2):
        frames = frames[:, :height, :width]  # videos have even sizes
    else:
        try:
            frames = averaged(frames, height, width)
        except UserError as error:
            raise UserError(f"{name}: {error}; choose another image_size") from error
    return encode_all(frames[:, :, ::-1] if mirrored else frames)


def _unfit(source: DataSource, rows: list[str]) -> UserError:
    """Error that lists the mismatches `rows` and the dataset's features."""
    features = "; ".join(
        f"{key} {tuple(feature['shape'])} {feature_names(feature) or 'without names'}"
        for key, feature in source.features.items()
        if key.startswith(("observation", ACTION))
    )
    return UserError(f"{source.directory} does not serve the contract ({'; '.join(rows)}); it has {features}")


def feature_names(feature: Mapping[str, Any]) -> list[str]:
    """Names of a feature's elements, which LeRobot stores as a list, as {"motors": [...]}, or not at all."""
    names = feature.get("names")
    if isinstance(names, dict):
        names = next((value for value in names.values() if isinstance(value, list)), list(names))
    return list(names or [])
