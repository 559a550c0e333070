"""Content of HDF5 files, read in a child process with bounded memory and time.

The HDF5 library crashes or takes gigabytes on some damaged files. In a child process this is an error of one line, and
no foreign file is parsed in the process that trains. The child is this module; it imports no torch, takes its requests
as JSON, and sends frames: the length of a JSON header, the header, and the array that the header describes.
"""

from __future__ import annotations

import json
import math
import os
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from embodied.errors import UserError
from embodied.extras import needs_extra

MEMORY_BYTES = 1 << 30
ARRAY_BYTES = 128 << 20
HEADER_BYTES = 64 << 20
"""Largest memory of the child in addition to its packages, largest array that it sends, and largest header."""
CONTENTS, ARRAYS = "contents", "arrays"
"""Parts of a file that the child sends."""
CPU_S = {CONTENTS: 60, ARRAYS: 600}
"""Longest computing time of the child."""
LENGTH = struct.Struct("<Q")
Shapes = Mapping[str, tuple[int, ...]]
Slice = tuple[str, int | None, int | None]
"""Path of an array, and the rows [begin, end) of it; None: from its beginning, to its end."""


@dataclass(frozen=True)
class Contents:
    """Content of a file: shape and dtype of arrays by path, such as data/demo_0/actions, and attributes of groups.

    Paths have no slash at their beginning; that of the root is empty. Attributes are texts, by the path of the group.
    """

    shapes: Shapes
    dtypes: Mapping[str, str]
    attributes: Mapping[str, Mapping[str, str]]


def contents(path: Path) -> Contents:
    """Content of the file at `path`.

    Raises:
        UserError: if it cannot be read.
    """
    header, _ = next(_frames(path, CONTENTS))
    shapes = {name: tuple(shape) for name, shape in header["shapes"].items()}
    return Contents(shapes, header["dtypes"], header["attributes"])


def arrays(path: Path, slices: Sequence[Slice]) -> Iterator[np.ndarray]:
    """The `slices` of arrays of the file at `path`, one after another.

    Raises:
        UserError: if one cannot be read.
    """
    for _, array in _frames(path, ARRAYS, slices):
        yield array


def _frames(path: Path, part: str, slices: Sequence[Slice] = ()) -> Iterator[tuple[dict[str, Any], np.ndarray]]:
    """Headers and arrays that a child process sends of `part` of the file at `path`."""
    with needs_extra("robot"):
        import h5py  # noqa: F401 - the child imports it
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    folders = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, **one_thread, "PYTHONPATH": os.pathsep.join(filter(None, folders))}
    command = [sys.executable, "-m", __name__, str(path), part]
    with tempfile.TemporaryFile() as requests:
        requests.write(json.dumps(slices).encode())
        requests.seek(0)
        child = subprocess.Popen(
            command, stdin=requests, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
        )
    assert child.stdout is not None
    try:
        while (frame := _receive(child.stdout)) is not None:
            if "error" in frame[0]:
                raise UserError(f"cannot read {path}: {frame[0]['error']}")
            yield frame
        if status := child.wait():
            ending = signal.Signals(-status).name if status < 0 else f"status {status}"
            raise UserError(f"cannot read {path}: the HDF5 library ended with {ending}: the file is damaged")
    finally:
        child.kill()
        child.stdout.close()
        child.wait()


def _receive(stream: IO[bytes]) -> tuple[dict[str, Any], np.ndarray] | None:
    """The next frame; None at the end of the stream, also in the middle of a frame."""
    prefix = stream.read(LENGTH.size)
    if len(prefix) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(prefix)
    data = stream.read(length)
    if len(data) < length:
        return None
    header = json.loads(data)
    shape = header.pop("shape", [0])
    dtype = np.dtype(header.pop("dtype", "u1"))
    length = dtype.itemsize * math.prod(shape)
    data = stream.read(length)
    return None if len(data) < length else (header, np.frombuffer(data, dtype).reshape(shape).copy())


def _send(header: dict[str, Any], array: np.ndarray | None = None) -> None:
    if array is not None:
        header = header | {"shape": list(array.shape), "dtype": array.dtype.str}
    data = json.dumps(header).encode()
    if len(data) > HEADER_BYTES:
        raise ValueError(f"names and attributes of {len(data):,} bytes, expected at most {HEADER_BYTES:,}")
    sys.stdout.buffer.write(LENGTH.pack(len(data)) + data)
    if array is not None:
        sys.stdout.buffer.write(array.tobytes())
    sys.stdout.buffer.flush()


def _array(file: Any, name: str, begin: int | None, end: int | None) -> np.ndarray:  # noqa: ANN401 - h5py's
    """Rows of the array `name`, which has to be stored in this file."""
    import h5py

    member = file
    for part in name.split("/"):
        if not isinstance(member, h5py.Group) or not isinstance(member.get(part, getlink=True), h5py.HardLink):
            raise KeyError(f"{name} is missing, or is a link to elsewhere")
        member = member[part]
    if not isinstance(member, h5py.Dataset):
        raise KeyError(f"{name} is no array")
    if member.external or member.is_virtual:
        raise ValueError(f"{name} is stored in another file")
    rows = () if begin is None and end is None else slice(begin, end)
    size = member.size or 0
    if isinstance(rows, slice) and member.shape:
        size = math.prod(member.shape[1:]) * len(range(*rows.indices(member.shape[0])))
    if member.dtype.kind not in "fiubS" or member.size is None or member.dtype.itemsize * size > ARRAY_BYTES:
        expected = f"numbers that take at most {ARRAY_BYTES:,} bytes"
        raise ValueError(f"{name}: expected {expected}, got {member.dtype} {list(member.shape or ())}")
    return np.asarray(member[rows])


def _text(value: Any) -> str:  # noqa: ANN401 - an attribute
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _members(file: Any) -> Iterator[tuple[str, Any]]:  # noqa: ANN401 - h5py's
    """Paths of the groups and arrays that are stored in this file, and the group or array."""
    import h5py

    visited = set()  # a group may contain itself
    remaining: list[tuple[str, Any]] = [("", file)]
    while remaining:
        path, member = remaining.pop()
        yield path, member
        if not isinstance(member, h5py.Group):
            continue
        address = h5py.h5o.get_info(member.id).addr  # pyright: ignore[reportAttributeAccessIssue]
        if address in visited:
            continue
        visited.add(address)
        for name in map(str, member):
            kind = member.get(name, getclass=True, getlink=True)
            if kind is h5py.HardLink and member.get(name, getclass=True) in (h5py.Group, h5py.Dataset):
                remaining.append((f"{path}/{name}" if path else name, member[name]))


def _contents(file: Any) -> dict[str, Any]:  # noqa: ANN401 - h5py's
    import h5py

    header: dict[str, Any] = {"shapes": {}, "dtypes": {}, "attributes": {}}
    for path, member in _members(file):
        if isinstance(member, h5py.Dataset):
            header["shapes"][path] = list(member.shape or ())
            header["dtypes"][path] = member.dtype.name  # float32 in any order of bytes
        else:
            header["attributes"][path] = {name: _text(value) for name, value in member.attrs.items()}
    return header


def _read(path: str, part: str) -> None:
    """Send `part` of the file at `path`."""
    import h5py

    with h5py.File(path, "r") as file:
        if part == CONTENTS:
            _send(_contents(file))
        else:
            for each in json.load(sys.stdin):
                _send({}, _array(file, *each))


def _limit(part: str) -> None:
    """Bound memory and computing time of this process, which sends `part` of a file."""
    import resource

    import h5py  # noqa: F401 - its own memory does not count

    memory = Path("/proc/self/statm")
    pages = int(memory.read_text(encoding="utf-8").split()[0]) if memory.exists() else 0
    for limit, value in (
        (resource.RLIMIT_AS, pages * resource.getpagesize() + MEMORY_BYTES),
        (resource.RLIMIT_CPU, CPU_S[part]),
    ):
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


if __name__ == "__main__":
    _limit(sys.argv[2])
    try:
        _read(*sys.argv[1:])
    except Exception as error:  # h5py raises many kinds for damaged files
        _send({"error": " ".join(f"{type(error).__name__}: {error}".split())})
