"""Demonstrations from datasets, recordings, other runs, or files of the task's benchmark."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch

from embodied.configuration import Configuration, PositiveFloat
from embodied.contract import Contract
from embodied.data import episodes as stored
from embodied.data.cache import DataSet
from embodied.data.delayed import with_action_prefix
from embodied.data.demonstrations import NOTES, decoded_once, folder_of
from embodied.data.episodes import RECORD, Episodes, EpisodeWriter
from embodied.data.pictures import Pictures, encode_all
from embodied.errors import UserError
from embodied.task import Task
from real_robot.recording import driven
from real_robot.recording.data_sets import array_files, data_set_reading, lerobot_files
from real_robot.recording.data_sets.array_files import array_file
from real_robot.recording.data_sets.matching import Limits, Match, MatchOptions, match_options
from real_robot.recording.data_sets.outcomes import Rewards, rewarded
from real_robot.recording.lerobot_dataset import ACTION
from real_robot.recording.topics import bag_files

log = logging.getLogger(__name__)
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
"""Pattern of a data set's name on the hub: owner/name."""


def sources(
    option: Any,  # noqa: ANN401 - as typed
    weights: Sequence[float] | None,
    name: str = "demonstrations",
) -> list[str] | None:
    """Paths in `option`, the value of `name`; `weights` are their shares in a minibatch.

    Raises:
        UserError: for anything but a path or a list of paths, and unless there is a weight above 0 for each.
    """
    paths = [option] if isinstance(option, str) else option
    valid = isinstance(paths, list) and all(isinstance(path, str) for path in paths)
    if not (paths is None or (paths and valid)):
        raise UserError(f"expected {name}=DIR or '{name}=[DIR1,DIR2]', got {option!r}")
    if len({Path(path) for path in paths or ()}) < len(paths or ()):
        raise UserError(f"{name}={option} names a folder twice; use demonstration_weights")
    if weights is None:
        return paths
    if len(weights) != len(paths or ()) or not all(weight > 0 and math.isfinite(weight) for weight in weights):
        expected = f"{len(paths or ())} numbers above 0, one for each of demonstrations={option}"
        raise UserError(f"expected demonstration_weights of {expected}; got {list(weights)}")
    return paths


def located(source: str | Path) -> Path:
    """Path of a data set: `source` itself, or where the hub's data set of that name is downloaded to.

    Raises:
        UserError: if there is neither.
    """
    path = Path(source)
    if path.exists() or not HUB_NAME.fullmatch(str(source)):
        return path
    missing = f"demonstrations={source}: there is no such file or folder"
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        advice = "to download a data set of that name, pip install 'embodied-rl[vla]'"
        raise UserError(f"{missing}; {advice}") from error
    try:
        return Path(snapshot_download(str(source), repo_type="dataset"))
    except (OSError, ValueError) as error:  # errors of the hub are OSErrors
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"{missing}, and no data set of that name was downloaded ({reason})") from error


@dataclass
class DemonstrationOptions(Configuration):
    """Demonstrations of a run.

    `demonstrations` replaces the task's own: LeRobot, HDF5, recordings or another run's folder, or several [DIR1,DIR2];
    `demonstration_weights` are their shares in a minibatch, null: proportional to size. For datasets that differ from
    the run, `demonstration_units` adds units that task=dataset lacks, UNIT or {NAME:UNIT}, where * stands for any text;
    `demonstration_names` maps names {OURS:THEIRS}, `demonstration_tasks` maps texts {TASK:[TEXT]}, and
    `demonstration_resampling` skips or repeats rows of another rate. `demonstration_columns` names columns of a data
    set, or topics, with the reward, success, terminated, truncated, human, or a signal of another name, such as
    {reward:NAME,cost:NAME}; ~NAME is the negation, null none, and a success of true is that of all episodes.
    `demonstration_rewards` replaces rewards: by the success at the end of an episode (1, else 0), by steps (-1 each,
    until the success), or by those that the task computes. `demonstration_rate_hz` is the rate of data sets that state
    none, and `demonstration_filter` one of robomimic's filter keys, such as train.
    """

    demonstrations: Any = None
    demonstration_weights: list[PositiveFloat] | None = None
    demonstration_names: Any = None
    demonstration_units: Any = None
    demonstration_tasks: Any = None
    demonstration_resampling: bool = False
    demonstration_columns: Any = None
    demonstration_rewards: Rewards = Rewards.RECORDED
    demonstration_rate_hz: PositiveFloat | None = None
    demonstration_filter: str | None = None

    @property
    def matching(self) -> MatchOptions:
        """The options that match data sets with the run.

        Raises:
            UserError: for impossible ones.
        """
        return match_options(
            self.demonstration_tasks,
            self.demonstration_names,
            self.demonstration_resampling,
            self.demonstration_columns,
            self.demonstration_rewards,
            self.demonstration_rate_hz,
            self.demonstration_filter,
        )


def reader(options: DemonstrationOptions, task: Task) -> Callable[[Contract, Path], Episodes] | None:
    """Return a function that reads the demonstrations of `options` for a run; None without such options.

    Raises:
        UserError: for impossible options.
    """
    weights = options.demonstration_weights
    paths = sources(options.demonstrations, weights)
    matching = options.matching
    return partial(demonstrations, paths, task=task, weights=weights, options=matching) if paths else None


def demonstrations(
    source: str | Path | Sequence[str | Path],
    contract: Contract,
    run: Path,
    task: Task | None = None,
    weights: Sequence[float] | None = None,
    options: MatchOptions | None = None,
) -> Episodes:
    """All episodes of `source` as `contract` reads them, decoded unless the cache has them; `run` keeps an index.

    Each of several sources has its share of `weights` in samples, by default in proportion to its observations. Files
    in the format of the `task`'s benchmark are read by the task, LeRobot datasets of it by the task's convention.
    `options` match names, tasks and rates of datasets with the run's.

    Raises:
        UserError: if a source is no dataset, does not serve the contract, or cannot be mixed with the others; if a task
            has no episodes, or its actions are outside the limits.
    """
    if contract.delay:
        episodes = demonstrations(source, contract.delayed(0), run, task, weights, options)
        return with_action_prefix(episodes, contract.delay)
    paths = [located(each) for each in ([source] if isinstance(source, str | Path) else source)]
    if task and (files := [path for path in paths if task.demonstration_files(path)]):
        if options and (options.columns or options.filter or options.rate_hz):
            raise UserError(f"{files[0]} is read by the task: leave out demonstration_columns, _filter and _rate_hz")
        if len(paths) == 1:
            episodes = task.recorded_demonstrations(paths[0], run)
            return _rewarded(episodes, task, options.rewards if options else Rewards.RECORDED)
        advice = "train on them alone, then use that run's folder in their place"
        raise UserError(f"{files[0]} cannot be mixed with others as it is; {advice}")

    def decode(writer: EpisodeWriter) -> None:
        matches = [Match(path, task, options) for path in paths]
        readings = []
        matches[0].check_names(contract)
        for match in matches:  # all are checked before the first is decoded
            with _errors_of_data_set(paths[0], match.source):
                readings.append(_begun(_read(match, contract, alone=len(paths) == 1)))
        tasks = set()
        notes = []
        for number, (match, episodes) in enumerate(zip(matches, _alike(readings), strict=True)):
            with _errors_of_data_set(paths[0], match.source):
                own_number = number if len(paths) > 1 else None
                tasks |= _write(writer, match, contract, episodes, own_number)
            notes += [[number, note] for note in match.notes]
        names = list(matches[0].task_names) if matches[0].convention else []
        if missing_tasks := [name for index, name in enumerate(names) if index not in tasks]:
            path_list = " and ".join(map(str, paths))
            raise UserError(
                f"no episodes of {', '.join(missing_tasks)} in {path_list}{matches[0].has()}; choose task.tasks=[...]"
            )
        writer.origin |= {NOTES: notes} | ({"tasks": names} if names else {})

    origin: dict[str, Any] = {"source": [str(path) for path in paths] if len(paths) > 1 else str(paths[0])}
    if options is not None and options != MatchOptions():
        origin["options"] = options.recorded()
    task_names = Match(paths[0], task, options).task_names
    settings = {"options": origin.get("options"), "task": type(task).__qualname__, "names": task_names}
    data_sets = [_data_set(path, contract) for path in paths]
    episodes = decoded_once(run, contract, origin, data_sets, decode, settings)
    if options is not None and options.rewards is Rewards.TASK:  # not in the cache: they depend on the task's program
        episodes = _rewarded(episodes, task, options.rewards)
    episodes = replace(episodes, sources=tuple(map(str, paths)))
    if weights is None or len(paths) == 1:
        return episodes
    return replace(episodes, weights=torch.tensor([*weights], dtype=torch.float64))


def _rewarded(episodes: Episodes, task: Task | None, rewards: Rewards) -> Episodes:
    """The same episodes, with `rewards` in place of theirs."""
    if rewards is Rewards.RECORDED:
        return episodes
    if rewards is not Rewards.TASK:
        return rewarded(episodes, rewards)
    if task is None:
        raise UserError("demonstration_rewards=task needs a task with a simulator")
    return replace(episodes, reward=task.recorded_rewards(episodes))


def _begun(reading: Iterator[Episodes]) -> tuple[list[Episodes], Iterator[Episodes]]:
    """The first episode of a `reading`, if there is one, and the others."""
    return [*islice(reading, 1)], reading


def _alike(readings: Sequence[tuple[list[Episodes], Iterator[Episodes]]]) -> Iterator[Iterator[Episodes]]:
    """All of the `readings` with the same optional parts: final observations and signals only if all have them."""
    first = [episode for begin, _ in readings for episode in begin]
    has_final = all(each.final_observation is not None for each in first)
    names = [set(each.signals.keys()) if each.signals is not None else set() for each in first]
    shared = sorted(set[str].intersection(*names)) if names else []

    def alike(episode: Episodes) -> Episodes:
        signals = episode.signals.select(*shared) if episode.signals is not None and shared else None
        return replace(episode, final_observation=episode.final_observation if has_final else None, signals=signals)

    return (map(alike, chain(begin, others)) for begin, others in readings)


def _read(match: Match, contract: Contract, *, alone: bool) -> Iterator[Episodes]:
    """Read the episodes of a source: a run's folder, arrays, recordings, or a LeRobot dataset."""
    rewards = match.options.rewards
    episodes = _recorded(match, contract, alone=alone)
    return episodes if rewards is Rewards.TASK else (_rewarded(each, None, rewards) for each in episodes)


def _recorded(match: Match, contract: Contract, *, alone: bool) -> Iterator[Episodes]:
    path = match.source
    if folder := episode_folder(path):
        if match.options.columns or match.options.filter:
            raise UserError(f"{path} has rewards and outcomes of its own: leave out demonstration_columns and _filter")
        return _collected(folder, contract, match, privileged=alone)
    if recordings := recordings_in(path):
        if match.options.filter:
            raise UserError(f"{path} has no filter keys: leave out demonstration_filter={match.options.filter}")
        cameras = [key for key, spec in contract.observation.items() if spec.is_picture and not spec.privileged]
        return (_with_encoded(episode, cameras) for episode in driven.read(recordings, contract, match))
    return data_set_reading.read(path, contract, match)


def _with_encoded(episode: Episodes, cameras: Sequence[str]) -> Episodes:
    """The same episode with encoded pictures of its `cameras`, as data sets have them."""
    if not cameras:
        return episode
    pictures = Pictures.of({key: encode_all(episode.observation[key].numpy()) for key in cameras})
    return replace(episode, observation=episode.observation.exclude(*cameras), pictures=pictures)


def _data_set(path: Path, contract: Contract) -> DataSet:
    """The data set at `path`, with the files that its episodes are read from."""
    if folder := episode_folder(path):
        return DataSet(path, [folder / RECORD])  # it has the checksums of all others
    if file := array_file(path):
        return DataSet(path, array_files.files(file))
    if recordings := recordings_in(path):
        return DataSet(path, [*recordings, *(file for each in recordings for file in bag_files(each))])
    has_pictures = any(spec.is_picture and not spec.privileged for spec in contract.observation.values())
    return DataSet(path, lerobot_files.data_files(path, videos=has_pictures))


def episode_folder(path: Path) -> Path | None:
    """Folder of an `EpisodeWriter`: `path` itself, or that of the run at `path`; None if it is neither."""
    return path if (path / RECORD).exists() else folder_of(path)


def recordings_in(path: Path) -> list[Path]:
    """The recording at `path`, or all recordings in that folder; none if that is a file of arrays."""
    if path.suffix in array_files.SUFFIXES:
        return []
    return sorted(path.glob("*.mcap")) if path.is_dir() else [path]


def _collected(folder: Path, contract: Contract, match: Match, *, privileged: bool) -> Iterator[Episodes]:
    """The episodes of the run's tasks in a folder, one at a time; with `privileged`, privileged observations too."""
    episodes, own_contract, origin = stored.read(folder)
    if own_contract.delay:
        raise UserError(f"{folder} has actions that were executed {own_contract.delay} steps later; use other episodes")
    match.check_rate(1.0 / own_contract.control_dt_s)
    try:
        binding = contract.bind(own_contract)
    except UserError as error:
        differs = " ".join(str(error).split())
        raise UserError(f"{folder} does not serve the contract: {differs}; choose the task's options so") from error
    first = episodes.part(0, 1).expanded()
    recorded = {*first.observation.keys(), *(first.pictures.data if first.pictures else ())}
    needed = {
        key: spec
        for key, spec in contract.observation.items()
        if key in recorded and (privileged or not spec.privileged)
    }
    _check_shapes(folder, first, own_contract, contract)
    cameras = [key for key, spec in needed.items() if spec.is_picture]
    others = {key: spec for key, spec in needed.items() if key not in cameras}
    names = origin.get("tasks", []) if not match.any_text else []

    def each() -> Iterator[Episodes]:
        for number, index in enumerate(episodes.task_index.tolist()):
            task = match.task_number(names[index]) if names else index
            if task is None:
                continue
            episode = episodes.part(number, number + 1).expanded()
            raw = {key: encode_all(episode.observation[key].numpy()) for key in cameras if key in episode.observation}
            pictures = Pictures.of(raw) if raw else episode.pictures and episode.pictures.only(cameras)
            bound = driven.bound(episode, others, contract.action, binding)
            final = episode.final_observation
            if bound.final_observation is not None and final is not None:
                bound.final_observation.update(final.select(*cameras, strict=False))
            yield replace(
                bound,
                pictures=pictures,
                task_index=torch.tensor([task]),
                dataset_index=None,
            )

    return each()


def _check_shapes(folder: Path, episode: Episodes, own: Contract, contract: Contract) -> None:
    """Raise UserError unless an `episode` has the actions of its `own` contract and what `contract` reads."""
    read = [key for key, spec in contract.observation.items() if not (spec.privileged or spec.is_picture)]
    values = {**episode.observation, ACTION: episode.actions}
    for name, spec in {**{key: own.observation[key] for key in read}, ACTION: own.action}.items():
        got = list(values[name].shape[1:]) if name in values else None
        fits = got is not None and len(got) == len(spec.shape)
        if not fits or any(size not in (-1, have) for size, have in zip(spec.shape, got or [], strict=True)):
            raise UserError(
                f"{folder}: expected {name} of shape {list(spec.shape)} as in its contract, got {got or 'none'}"
            )


def _write(
    writer: EpisodeWriter,
    match: Match,
    contract: Contract,
    episodes: Iterator[Episodes],
    number: int | None,
) -> set[int]:
    """Write the `episodes` of a source, dataset `number` of several; return the set of their tasks."""
    path = match.source
    count = 0
    limits = Limits(contract.action)
    tasks = set[int]()
    for episode in episodes:
        final = {} if episode.final_observation is None else dict(episode.final_observation.items())
        has_actions = not bool(episode.actions.isnan().all())  # else all actions of the episode are unknown
        named = ({"action": episode.actions} if has_actions else {}) | dict(episode.observation.items())
        named |= {f"the last {key}": values for key, values in final.items()}
        named["reward"] = episode.reward.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)  # NaN is unknown
        if wrong := [key for key, values in named.items() if not bool(values.isfinite().all())]:
            message = f"{path} has infinity or not a number in {', '.join(wrong)}"
            raise UserError(f"{message}, from row {count} on; leave out that episode")
        index = None if number is None else torch.full((len(episode.ends),), number)
        writer.add(replace(episode, dataset_index=index))
        count += len(episode)
        if has_actions:
            limits.add(episode.actions)
        tasks |= {*episode.task_index.tolist()}
    match.conclude(contract)
    if not count:
        raise UserError(f"{path} has no episodes")
    match.notes += limits.note(path)
    return tasks


@contextmanager
def _errors_of_data_set(first: Path, path: Path) -> Iterator[None]:
    """Name both datasets in errors of one that is not the `first`."""
    try:
        yield
    except UserError as error:
        if path == first:
            raise
        raise UserError(f"{first} and {path} cannot be mixed: {error}") from error
