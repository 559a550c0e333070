"""Content of LIBERO's HDF5 files, read in a child process with bounded memory and time.

The HDF5 library crashes or takes gigabytes on some damaged files. In a child process this is an error of one line, and
no foreign file is parsed in the process that trains. The child is this module; it imports neither torch nor
MuJoCo and sends frames: the length of a JSON header, the header, and the arrays that the header describes.
"""

from __future__ import annotations

import json
import math
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from embodied.errors import UserError
from embodied.extras import needs_extra

MEMORY_BYTES = 1 << 30
ARRAY_BYTES = 128 << 20
HEADER_BYTES = 64 << 20
"""Largest memory of the child in addition to its packages, largest array, and largest header."""
CPU_S = 600
"""Longest computing time of the child."""
LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class Attributes:
    """Attributes of a file: the path of its task's BDDL file, and the arguments of its environment as JSON."""

    bddl_file_name: str
    env_args: str


@dataclass(frozen=True)
class RawEpisode:
    """Arrays of one group `name`, of any shape, and its scene as MJCF; empty if it has none."""

    name: str
    states: np.ndarray
    actions: np.ndarray
    model_file: str


def read_attributes(path: Path) -> Attributes:
    """The attributes of the file at `path`.

    Raises:
        UserError: if it cannot be read.
    """
    header, _ = next(_frames(path, "attributes"))
    return Attributes(**header)


def read_episodes(path: Path) -> Iterator[RawEpisode]:
    """The episodes of the file at `path`, in the order of their numbers.

    Raises:
        UserError: if one cannot be read.
    """
    for header, arrays in _frames(path, "episodes"):
        yield RawEpisode(header["name"], arrays["states"], arrays["actions"], header["model_file"])


def _frames(path: Path, part: str) -> Iterator[tuple[dict[str, Any], dict[str, np.ndarray]]]:
    """Headers and arrays that a child process sends of `part` of the file at `path`."""
    with needs_extra("libero"):
        import h5py  # noqa: F401 - the child imports it
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    folders = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, **one_thread, "PYTHONPATH": os.pathsep.join(filter(None, folders))}
    command = [sys.executable, "-m", __name__, str(path), part]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)
    assert child.stdout is not None
    try:
        while (frame := _receive(child.stdout)) is not None:
            header, arrays = frame
            if "error" in header:
                raise UserError(f"cannot read LIBERO demonstrations from {path}: {header['error']}")
            yield header, arrays
        if status := child.wait():
            ending = signal.Signals(-status).name if status < 0 else f"status {status}"
            reason = f"the HDF5 library ended with {ending}: the file is damaged"
            raise UserError(f"cannot read LIBERO demonstrations from {path}: {reason}")
    finally:
        child.kill()
        child.stdout.close()
        child.wait()


def _receive(stream: IO[bytes]) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
    """The next frame; None at the end of the stream, also in the middle of a frame."""
    prefix = stream.read(LENGTH.size)
    if len(prefix) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(prefix)
    data = stream.read(length)
    if len(data) < length:
        return None
    header = json.loads(data)
    arrays = {}
    for name, shape in header.pop("arrays", {}).items():
        length = 8 * math.prod(shape)
        data = stream.read(length)
        if len(data) < length:
            return None
        arrays[name] = np.frombuffer(data, np.float64).reshape(shape).copy()
    return header, arrays


def _send(header: dict[str, Any], arrays: dict[str, np.ndarray] | None = None) -> None:
    arrays = arrays or {}
    if arrays:
        header = header | {"arrays": {name: list(array.shape) for name, array in arrays.items()}}
    data = json.dumps(header).encode()
    if len(data) > HEADER_BYTES:
        raise ValueError(f"attributes of {len(data):,} bytes, expected at most {HEADER_BYTES:,}")
    sys.stdout.buffer.write(LENGTH.pack(len(data)) + data)
    for array in arrays.values():
        sys.stdout.buffer.write(array.tobytes())
    sys.stdout.buffer.flush()


def _member(group: Any, name: str) -> Any:  # noqa: ANN401 - h5py's
    """Member `name` of `group`, which has to be stored in this file."""
    import h5py

    if not isinstance(group.get(name, getlink=True), h5py.HardLink):
        raise KeyError(f"{name} is missing, or is a link to elsewhere")
    return group[name]


def _array(group: Any, name: str) -> np.ndarray:  # noqa: ANN401 - h5py's
    dataset = _member(group, name)
    if dataset.external or dataset.is_virtual:
        raise ValueError(f"{name} is stored in another file")
    if dataset.dtype.kind not in "fiub" or dataset.size is None or 8 * dataset.size > ARRAY_BYTES:
        expected = f"numbers that take at most {ARRAY_BYTES:,} bytes"
        raise ValueError(f"{name}: expected {expected}, got {dataset.dtype} {list(dataset.shape or ())}")
    return np.asarray(dataset[()], np.float64)


def _text(value: Any) -> str:  # noqa: ANN401 - an attribute
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _read(path: str, part: str) -> None:
    """Send `part` of the file at `path`."""
    import h5py

    with h5py.File(path, "r") as file:
        data = _member(file, "data")
        if part == "attributes":
            _send({name: _text(data.attrs[name]) for name in ("bddl_file_name", "env_args")})
            return
        names = sorted((name for name in data if name.startswith("demo_")), key=lambda name: int(name[5:]))
        for name in names:
            group = _member(data, name)
            model = _text(group.attrs.get("model_file", ""))
            arrays = {each: _array(group, each) for each in ("states", "actions")}
            _send({"name": name, "model_file": model}, arrays)


def _limit() -> None:
    """Bound memory and computing time of this process."""
    import resource

    import h5py  # noqa: F401 - its own memory does not count

    memory = Path("/proc/self/statm")
    pages = int(memory.read_text(encoding="utf-8").split()[0]) if memory.exists() else 0
    for limit, value in (
        (resource.RLIMIT_AS, pages * resource.getpagesize() + MEMORY_BYTES),
        (resource.RLIMIT_CPU, CPU_S),
    ):
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


if __name__ == "__main__":
    _limit()
    try:
        _read(*sys.argv[1:])
    except Exception as error:  # h5py raises many kinds for damaged files
        _send({"error": " ".join(f"{type(error).__name__}: {error}".split())})
