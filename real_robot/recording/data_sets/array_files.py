"""Data sets that are arrays in one HDF5 or .npz file, with the interface of LeRobot data sets (`lerobot_files.Source`).

They have neither names of elements nor units; most state no rate. The observation after the last step of a trajectory
is read if it is stored. Otherwise the last step of a trajectory that is not terminated is left out, because its next
observation is its only use: the observation before it is the last that is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from embodied.contract import Contract
from embodied.data import hdf5
from embodied.errors import UserError
from real_robot.recording.data_sets import npz
from real_robot.recording.data_sets.array_layouts import METADATA, PREFIX, layout
from real_robot.recording.data_sets.outcomes import Columns
from real_robot.robots.robot import Array

HDF5 = ".hdf5", ".h5"
SUFFIXES = *HDF5, ".npz"
MINARI = "main_data.hdf5"


def array_file(path: Path) -> Path | None:
    """The file of arrays at `path`, or the only one in that folder, or minari's; None if it is none.

    Raises:
        UserError: if the folder has several.
    """
    if path.is_file() or not path.is_dir():
        return path if path.suffix in SUFFIXES else None
    for minari in (path / MINARI, path / "data" / MINARI):
        if minari.exists():
            return minari
    if (path / "meta").exists():  # a LeRobot data set
        return None
    files = sorted(each for each in path.iterdir() if each.suffix in SUFFIXES)
    if len(files) > 1:
        names = ", ".join(each.name for each in files)
        raise UserError(f"{path} has several data sets, {names}; choose one, such as {files[0]}")
    return files[0] if files else None


def files(file: Path) -> list[Path]:
    """The files of the data set in `file`."""
    metadata = file.with_name(METADATA)
    return [file, metadata] if file.name == MINARI and metadata.exists() else [file]


class ArraySource:
    """The data set in `file`; see `lerobot_files.Source`. `rate_hz` is its rate if it does not state one.

    Raises:
        UserError: if the file cannot be read, has an unknown layout, or states another rate.
    """

    contract: Contract | None = None
    has_final = True
    """Whether it has the observation after the last step of every episode."""

    def __init__(
        self, file: Path, chosen: Mapping[str, Any], rate_hz: float | None = None, selection: str | None = None
    ) -> None:
        self.directory = file
        self._container = hdf5 if file.suffix in HDF5 else npz
        contents = self._container.contents(file)
        parts = layout(file, contents, self._whole, selection)
        self.trajectories = parts.trajectories
        if not self.trajectories:
            raise UserError(f"{file} has no episodes")
        if rate_hz and parts.rate_hz and abs(rate_hz / parts.rate_hz - 1.0) > 1e-4:
            raise UserError(f"{file} states {parts.rate_hz:g} Hz; leave out demonstration_rate_hz={rate_hz:g}")
        self.rate_hz = parts.rate_hz or rate_hz or 0.0
        self.features = {
            name: _feature(contents.shapes[array], contents.dtypes[array])
            for name, (array, *_) in self.trajectories[0].rows.items()
        }
        self.columns = Columns(file, self.features, parts.columns, chosen)
        self.tasks: dict[int, str] = {}
        self.success: dict[int, bool | None] = {}
        self._check_alike(contents.shapes)

    @property
    def identity(self) -> bytes:
        """Bytes that identify the data set without reading all of it."""
        return repr([self.directory.name, self.features, self.trajectories[-1]]).encode()

    def column(self, key: str) -> Array:
        """The values of a column in all rows, [R, ...]."""
        slices = [each.rows[key] for each in self.trajectories]
        return np.concatenate([self._shaped(key, array) for array in self._container.arrays(self.directory, slices)])

    def episodes(
        self, features: set[str], tasks: Callable[[str], int | None] | None = None
    ) -> Iterator[tuple[int, int, dict[str, Any], dict[str, Any] | None]]:
        """Yield number, task 0, `features` [L, ...] and observations after the last step [1, ...] of each trajectory.

        The latter are None if the file does not have all of the `features`' observations.
        """
        names = sorted(features)
        observed = [name for name in names if name.startswith(PREFIX)]
        has_final = all({*observed} <= each.final.keys() for each in self.trajectories)
        finals = observed if has_final else []
        parts = [
            [*(each.rows[name] for name in names), *(each.final[name] for name in finals)] for each in self.trajectories
        ]
        values = self._container.arrays(self.directory, [*chain(*parts)])
        for number in range(len(self.trajectories)):
            rows = {name: self._shaped(name, next(values)) for name in names}
            final = {name: self._shaped(name, next(values)) for name in finals}
            yield number, 0, rows, final if has_final else None

    def _whole(self, name: str) -> Array:
        return next(iter(self._container.arrays(self.directory, [(name, None, None)])))

    def _shaped(self, name: str, values: Array) -> Array:
        return values.reshape(len(values), *self.features[name]["shape"])

    def _check_alike(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise UserError unless all trajectories have the columns of the first, in their shapes."""
        for trajectory in self.trajectories:
            rows = trajectory.rows
            got = {name: _feature(shapes[array], "")["shape"] for name, (array, *_) in rows.items()}
            for name, each in self.features.items():
                if got.get(name) != each["shape"]:
                    raise UserError(
                        f"{self.directory}, {trajectory.name}: expected {name} of shape {each['shape']} as in"
                        f" {self.trajectories[0].name}, got {got.get(name, 'none')}"
                    )


def _feature(shape: tuple[int, ...], dtype: str) -> dict[str, Any]:
    """Feature of an array of rows, as LeRobot describes it."""
    is_picture = dtype == "uint8" and len(shape) == 4
    return {"dtype": "video" if is_picture else dtype, "shape": list(shape[1:]) or [1], "names": None}
