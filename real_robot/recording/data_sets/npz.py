"""Arrays of .npz files, read in parts: a file may be larger than memory. Nothing in it is unpickled."""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np

from embodied.data.hdf5 import Contents, Slice
from embodied.errors import UserError
from real_robot.robots.robot import Array

SUFFIX = ".npy"


def contents(path: Path) -> Contents:
    """Shapes and dtypes of the arrays of the file at `path`.

    Raises:
        UserError: if it cannot be read.
    """
    with _opened(path) as file:
        heads = {name.removesuffix(SUFFIX): _head(file, name) for name in file.namelist() if name.endswith(SUFFIX)}
    dtypes = {name: dtype.name for name, (_, dtype) in heads.items()}
    return Contents({name: shape for name, (shape, _) in heads.items()}, dtypes, {})


def arrays(path: Path, slices: Sequence[Slice]) -> Iterator[Array]:
    """The `slices` of arrays of the file at `path`; fast if those of each array are in order.

    Raises:
        UserError: if one cannot be read.
    """
    with _opened(path) as file:
        streams: dict[str, _Stream] = {}
        for name, begin, end in slices:
            stream = streams.get(name)
            first = begin or 0
            if stream is None or stream.row > first:
                stream = streams[name] = _Stream(file, name)
            yield stream.read(first, stream.rows if end is None else end)


class _Stream:
    """An array of a file that is read from its beginning to its end; `row` is the next."""

    def __init__(self, file: zipfile.ZipFile, name: str) -> None:
        self._name = name
        (self.rows, *self._shape), self._dtype = _head(file, name + SUFFIX)
        self._bytes = self._dtype.itemsize * math.prod(self._shape)
        self._file = file.open(name + SUFFIX)
        _header(self._file)
        self.row = 0

    def read(self, begin: int, end: int) -> Array:
        self._file.seek((begin - self.row) * self._bytes, 1)
        data = self._file.read((end - begin) * self._bytes)
        self.row = end
        if len(data) < (end - begin) * self._bytes:
            raise ValueError(f"{self._name} ends before its row {end}")
        return np.frombuffer(data, self._dtype).reshape(end - begin, *self._shape).copy()


def _head(file: zipfile.ZipFile, name: str) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and dtype of the array in the member `name`; no rows if it is not read by rows."""
    with file.open(name) as member:
        shape, fortran, dtype = _header(member)
    return (() if fortran and len(shape) > 1 else shape), dtype


def _header(member: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    version = np.lib.format.read_magic(member)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(member)
    if dtype.hasobject:
        raise ValueError(f"{getattr(member, 'name', 'an array')} has Python objects, which are never read")
    return shape, fortran, dtype


@contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    """The file at `path`, whose errors are a user's."""
    try:
        with zipfile.ZipFile(path) as file:
            yield file
    except (OSError, ValueError, EOFError, NotImplementedError, zipfile.BadZipFile, zlib.error) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"cannot read {path}: {' '.join(f'{type(error).__name__}: {error}'.split())}") from error
