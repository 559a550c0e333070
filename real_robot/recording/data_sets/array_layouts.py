"""Layouts of data sets that are arrays in one HDF5 or .npz file: robomimic, minari, D4RL and OGBench.

A layout lists the trajectories of a file, each with the rows of arrays that are its columns. Names of columns are those
of LeRobot for observations and actions (`observation.KEY`, `action`), else the array's own, such as `rewards`.
Letters: L steps of a trajectory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from embodied.data.hdf5 import Contents, Slice
from embodied.errors import UserError
from embodied.saving.json_text import loads
from real_robot.recording.data_sets.outcomes import NOT, REWARD, TERMINATED, TRUNCATED
from real_robot.recording.lerobot_dataset import ACTION
from real_robot.robots.robot import Array

PREFIX = "observation."
DEMO = "data/demo_"
EPISODE = "episode_"
MASK = "mask/"
METADATA = "metadata.json"
NO_ROWS = "none; if it is stored column by column, save numpy.ascontiguousarray of it"
Read = Callable[[str], Array]
"""Function that reads a whole array."""


@dataclass(frozen=True)
class Trajectory:
    """Trajectory `name` of `length` steps: rows of its columns, and its observations after the last step if stored."""

    name: str
    length: int
    rows: Mapping[str, Slice]
    final: Mapping[str, Slice] = field(default_factory=dict)


@dataclass(frozen=True)
class Layout:
    """Trajectories of a file, names of columns by meaning, and the rate that the file states, 0 if it does not."""

    trajectories: list[Trajectory]
    columns: Mapping[str, str]
    rate_hz: float = 0.0


def layout(path: Path, contents: Contents, read: Read, selection: str | None) -> Layout:
    """Layout of the file at `path`; `selection` is one of robomimic's filter keys.

    Raises:
        UserError: for another layout, arrays that do not fit together, or an unknown selection.
    """
    if any(name.startswith(DEMO) for name in contents.shapes):
        return _robomimic(path, contents, read, selection)
    if selection is not None:
        raise UserError(f"{path} has no filter keys: leave out demonstration_filter={selection}")
    if any(name.startswith(f"{EPISODE}0/") for name in contents.shapes):
        return _minari(path, contents)
    if {"observations", "actions", "terminals"} <= contents.shapes.keys():
        return _flat(path, contents, read)
    names = ", ".join(sorted({name.split("/")[0] for name in contents.shapes})[:10]) or "nothing"
    raise UserError(
        f"{path}: expected data/demo_N (robomimic), episode_N (minari), or arrays observations, actions and terminals"
        f" (D4RL, OGBench); got {names}"
    )


def _robomimic(path: Path, contents: Contents, read: Read, selection: str | None) -> Layout:
    """Layout of robomimic: groups data/demo_N with obs/KEY, actions, rewards, dones, and next_obs/KEY if stored.

    Its learners read `dones` as terminations.
    """
    groups = _groups(contents, DEMO)
    if selection is not None:
        keys = sorted(name.removeprefix(MASK) for name in contents.shapes if name.startswith(MASK))
        if selection not in keys:
            raise UserError(f"{path} has no filter key {selection}; it has {', '.join(keys) or 'none'}")
        chosen = {bytes(name).decode(errors="replace") for name in read(MASK + selection).tolist()}
        groups = {group: members for group, members in groups.items() if group.rpartition("/")[2] in chosen}
    trajectories = []
    for group, members in groups.items():
        length = _length(f"{path}, {group}", members, "actions")
        required = {name for name in members if name.startswith(("obs/", "next_obs/"))} | {"rewards", "dones"}
        _check_lengths(f"{path}, {group}", {name: members[name] for name in required & members.keys()}, length)
        rows: dict[str, Slice] = {}
        final: dict[str, Slice] = {}
        for name, shape in members.items():
            array = f"{group}/{name}"
            if name.startswith("next_obs/"):
                final[_observed(name)] = array, length - 1, length
            elif shape[:1] == (length,):
                column = ACTION if name == "actions" else name
                column = _observed(name) if name.startswith("obs/") else column
                rows[column] = array, 0, length
        trajectories.append(Trajectory(group, length, rows, final))
    rate_hz = 0.0
    try:
        arguments = json.loads(contents.attributes["data"]["env_args"])
        rate_hz = float(arguments["env_kwargs"]["control_freq"])
    except (KeyError, TypeError, ValueError):  # the file states no rate
        pass
    return Layout(trajectories, {REWARD: "rewards", TERMINATED: "dones"}, rate_hz)


def _minari(path: Path, contents: Contents) -> Layout:
    """Layout of minari: groups episode_N, whose observations and infos have a row more than actions."""
    groups = _groups(contents, EPISODE)
    _check_metadata(path, len(groups))
    trajectories = []
    for group, members in groups.items():
        length = _length(f"{path}, {group}", members, "actions")
        required = {"rewards", "terminations", "truncations"}
        _check_lengths(f"{path}, {group}", {name: members.get(name, ()) for name in required}, length)
        observations = {name: shape for name, shape in members.items() if name.split("/")[0] == "observations"}
        _check_lengths(f"{path}, {group}", observations, length + 1)
        rows: dict[str, Slice] = {}
        final: dict[str, Slice] = {}
        for name, shape in members.items():
            array = f"{group}/{name}"
            if name in observations:
                column = _observed(name)
                rows[column] = array, 0, length
                final[column] = array, length, length + 1
            elif shape[:1] == (length,):
                rows[ACTION if name == "actions" else name] = array, 0, length
            elif shape[:1] == (length + 1,):  # infos, the first from before the first step
                rows[name] = array, 1, length + 1
        trajectories.append(Trajectory(group, length, rows, final))
    columns = {REWARD: "rewards", TERMINATED: "terminations", TRUNCATED: "truncations"}
    return Layout(trajectories, columns)


def _check_metadata(path: Path, episodes: int) -> None:
    """Raise UserError unless the metadata beside minari's file have its number of episodes."""
    place = path.with_name(METADATA)
    try:
        metadata = loads(place.read_text(encoding="utf-8"))
        expected = metadata["total_episodes"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"cannot read {place} of minari's data set: {reason}") from error
    if expected != episodes:
        raise UserError(f"{place} has {expected} episodes, {path.name} {episodes}; it is cut short, copy it again")


def _flat(path: Path, contents: Contents, read: Read) -> Layout:
    """Layouts with all trajectories in the same arrays, which ends separate.

    D4RL: `terminals` and `timeouts`, and next_observations if stored. OGBench: a row for each state, of which
    `terminals` marks the last of a trajectory, where its action means nothing; or, with next_observations, for each
    step. `masks` are zero where it terminates.
    """
    shapes = contents.shapes
    count = _length(str(path), shapes, "actions")
    is_d4rl = "timeouts" in shapes
    required = {"observations", "actions", "terminals", "timeouts", "rewards", "masks", "next_observations"}
    _check_lengths(str(path), {name: shapes[name] for name in required & shapes.keys()}, count)
    if not is_d4rl and (path.suffix != ".npz" or ("rewards" in shapes and "masks" not in shapes)):
        masks = ", or masks (OGBench)" if path.suffix == ".npz" else ""
        raise UserError(
            f"{path} has no array timeouts, without which episodes that a time limit ended are not known; add timeouts"
            f" (D4RL){masks}"
        )
    if wide := [name for name in ("terminals", "timeouts") if math.prod(shapes.get(name, (count,))) != count]:
        raise UserError(f"{path}: expected a number for each step in {wide[0]}, got {list(shapes[wide[0]])}")
    ended = np.asarray(read("terminals")).reshape(-1) > 0.5
    if is_d4rl:
        ended |= np.asarray(read("timeouts")).reshape(-1) > 0.5
    ends = [*(np.flatnonzero(ended) + 1).tolist()]
    ends += [count] if not ends or ends[-1] < count else []
    arrays = {name: name for name, shape in shapes.items() if shape[:1] == (count,) and name != "next_observations"}
    names = {"observations": f"{PREFIX}observation", "actions": ACTION}
    by_state = not is_d4rl and "next_observations" not in shapes
    trajectories = []
    for begin, end in zip([0, *ends[:-1]], ends, strict=True):
        stop = end - 1 if by_state else end
        final: dict[str, Slice] = {}
        if by_state:
            final = {names["observations"]: ("observations", stop, end)}
        elif "next_observations" in shapes:
            final = {names["observations"]: ("next_observations", end - 1, end)}
        if stop > begin:
            rows = {names.get(name, name): (array, begin, stop) for name, array in arrays.items()}
            trajectories.append(Trajectory(f"rows {begin} to {stop - 1}", stop - begin, rows, final))
    d4rl = {REWARD: "rewards", TERMINATED: "terminals", TRUNCATED: "timeouts"}
    return Layout(trajectories, d4rl if is_d4rl else {REWARD: "rewards", TERMINATED: f"{NOT}masks"})


def _observed(path: str) -> str:
    """Name of the observation at `path` in a group: what follows obs/, next_obs/ or observations/, if it is a group."""
    return PREFIX + (path.partition("/")[2].replace("/", ".") or "observation")


def _groups(contents: Contents, prefix: str) -> dict[str, dict[str, tuple[int, ...]]]:
    """Shapes of the arrays in each group of `prefix` and a number, by path within the group; ordered by number."""
    groups: dict[str, dict[str, tuple[int, ...]]] = {}
    for path, shape in contents.shapes.items():
        number, _, name = path.removeprefix(prefix).partition("/")
        if path.startswith(prefix) and number.isdecimal() and name:
            groups.setdefault(prefix + number, {})[name] = shape
    return dict(sorted(groups.items(), key=lambda item: int(item[0].removeprefix(prefix))))


def _length(place: str, members: Mapping[str, tuple[int, ...]], name: str) -> int:
    shape = members.get(name, ())
    if not shape or not shape[0]:
        got = list(shape) if shape else NO_ROWS
        raise UserError(f"{place}: expected an array {name} with a row for each step, got {got}")
    return shape[0]


def _check_lengths(place: str, shapes: Mapping[str, tuple[int, ...]], length: int) -> None:
    """Raise UserError unless all arrays have `length` rows."""
    for name, shape in sorted(shapes.items()):
        if shape[:1] != (length,):
            rows = f"{shape[0]} rows" if shape else NO_ROWS
            raise UserError(f"{place}: expected {length} rows of {name}, as many as the actions need, got {rows}")
