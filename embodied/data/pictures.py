"""Encoded pictures of episodes, which are decoded when they are sampled.

A few threads decode, one minibatch ahead where its rows can be predicted. Letters: R observations, B sampled rows.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from embodied.errors import UserError

BYTES = "encoded"
ENDS = "encoded_ends"
"""Columns of a camera: its encoded pictures one after the other, uint8, and the byte after the last of each, [R]."""
WORKERS = 4
Frames = NDArray[np.uint8]


class Pictures:
    """Encoded pictures of R observations by camera.

    `data[key]` uint8 [bytes] contains PNG or JPEG files, `ends[key]` [R] the byte after the last of each.
    """

    def __init__(self, data: Mapping[str, Tensor], ends: Mapping[str, Tensor]) -> None:
        self.data = dict(data)
        self.ends = dict(ends)
        self._foreseen: tuple[Tensor, dict[str, Future[Frames]]] | None = None

    @staticmethod
    def of(encoded: Mapping[str, Sequence[bytes]]) -> Pictures:
        """Pictures of one episode, by camera."""
        data = {key: torch.frombuffer(bytearray(b"".join(cells)), dtype=torch.uint8) for key, cells in encoded.items()}
        return Pictures(data, {key: torch.tensor([*map(len, cells)]).cumsum(0) for key, cells in encoded.items()})

    @staticmethod
    def join(parts: Sequence[Pictures]) -> Pictures:
        """Concatenate the pictures of `parts`, in order."""
        parts = [part.packed() for part in parts]
        data = {key: torch.cat([part.data[key] for part in parts]) for key in parts[0].data}
        ends = {}
        for key in data:
            sizes = torch.tensor([0, *(len(part.data[key]) for part in parts)]).cumsum(0)
            ends[key] = torch.cat([part.ends[key] + begin for part, begin in zip(parts, sizes, strict=False)])
        return Pictures(data, ends)

    def shifted(self, begin: Mapping[str, int]) -> Pictures:
        """The same pictures, whose ends are shifted by `begin` bytes of each camera."""
        return Pictures(self.data, {key: ends + begin.get(key, 0) for key, ends in self.ends.items()})

    def part(self, begin: int, end: int) -> Pictures:
        """Pictures of the observations from `begin` to `end` - 1, which share the memory of these."""
        data = {}
        ends = {}
        for key, last in self.ends.items():
            first, stop = (int(last[row - 1]) if row else 0 for row in (begin, end))
            data[key] = self.data[key][first:stop]
            ends[key] = last[begin:end] - first
        return Pictures(data, ends)

    def only(self, keys: Sequence[str]) -> Pictures | None:
        """Pictures of the cameras `keys`; None if there are no keys."""
        return Pictures({key: self.data[key] for key in keys}, {key: self.ends[key] for key in keys}) if keys else None

    def selected(self, rows: Tensor) -> Pictures:
        """Pictures of the observations `rows`, which stay where these are."""
        return _Selected(self, rows)

    def packed(self) -> Pictures:
        """The same pictures, encoded one after the other."""
        return self

    def columns(self) -> dict[str, Tensor]:
        """Tensors by name."""
        data = {f"{BYTES}.{key}": values for key, values in self.data.items()}
        return data | {f"{ENDS}.{key}": values for key, values in self.ends.items()}

    @staticmethod
    def from_columns(named: Mapping[str, Tensor]) -> Pictures | None:
        """Build pictures from the tensors of `columns`; None if `named` has none."""
        data, ends = (
            {name.partition(".")[2]: values for name, values in named.items() if name.startswith(f"{kind}.")}
            for kind in (BYTES, ENDS)
        )
        return Pictures(data, ends) if data else None

    def take(self, rows: Tensor) -> dict[str, Tensor]:
        """Pictures [B, height, width, 3] by camera of the observations `rows` [B].

        Raises:
            UserError: for a picture that cannot be decoded.
        """
        predicted = self._foreseen
        self._foreseen = None
        futures = predicted[1] if predicted is not None and torch.equal(predicted[0], rows) else self._begin(rows)
        return {key: torch.from_numpy(future.result()) for key, future in futures.items()}

    def foresee(self, rows: Tensor) -> None:
        """Start to decode the rows that the next call of `take` probably requests."""
        self._foreseen = rows, self._begin(rows)

    def _begin(self, rows: Tensor) -> dict[str, Future[Frames]]:
        return {key: _threads(1).submit(partial(self._decoded, key, rows)) for key in self.data}

    def _decoded(self, key: str, rows: Tensor) -> Frames:
        """Decode pictures of a camera; runs in a thread of its own, which waits for the decoding threads."""
        stop = self.ends[key][rows].tolist()
        start = [int(self.ends[key][row - 1]) if row else 0 for row in rows.tolist()]
        data = self.data[key].numpy()
        cells = [data[a:b] for a, b in zip(start, stop, strict=True)]
        # two pieces for each thread, so that all finish at about the same time
        share = max(1, -(-len(cells) // (2 * WORKERS)))
        parts = [cells[begin : begin + share] for begin in range(0, len(cells), share)]
        return np.concatenate([*_threads(WORKERS).map(_several, parts)])


class _Selected(Pictures):
    """Pictures of the observations `rows` of `others`, whose data it shares."""

    def __init__(self, others: Pictures, rows: Tensor) -> None:
        super().__init__(others.data, others.ends)
        self._others = others
        self._rows = rows

    def selected(self, rows: Tensor) -> Pictures:
        return self._others.selected(self._rows[rows])

    def part(self, begin: int, end: int) -> Pictures:
        return self._others.selected(self._rows[begin:end])

    def only(self, keys: Sequence[str]) -> Pictures | None:
        others = self._others.only(keys)
        return others and others.selected(self._rows)

    def shifted(self, begin: Mapping[str, int]) -> Pictures:
        return self.packed().shifted(begin)

    def columns(self) -> dict[str, Tensor]:
        return self.packed().columns()

    def packed(self) -> Pictures:
        return Pictures.join([self._others.part(row, row + 1).packed() for row in self._rows.tolist()])

    def _begin(self, rows: Tensor) -> dict[str, Future[Frames]]:
        return self._others._begin(self._rows[rows])


@cache
def _threads(count: int) -> ThreadPoolExecutor:
    """Pool of `count` threads, one that waits or several that decode."""
    return ThreadPoolExecutor(min(count, os.cpu_count() or 1), thread_name_prefix="pictures")


def _several(cells: Sequence[bytes | Frames]) -> Frames:
    return np.stack([decode(cell) for cell in cells])


def decode(data: bytes | Frames) -> Frames:
    """Decode a PNG or JPEG to an RGB picture [height, width, 3].

    Raises:
        UserError: if it is damaged.
    """
    try:
        with Image.open(io.BytesIO(bytes(data))) as picture:
            return np.asarray(picture.convert("RGB"))
    except (OSError, SyntaxError, ValueError) as error:
        reason = str(error).partition(" <")[0]  # the rest is an object
        raise UserError(f"cannot decode a picture: {reason}; it is damaged, or no PNG or JPEG") from error


def averaged(frames: Frames, height: int, width: int) -> Frames:
    """Pictures [L, f height, f width, 3] reduced by the whole factor f: the mean of each block of pixels.

    Raises:
        UserError: for sizes that are no multiple.
    """
    size = frames.shape[1:3]
    if (factor := size[0] // height) < 1 or size != (factor * height, factor * width):
        raise UserError(f"expected pictures of {height}x{width}, or of a multiple, got {size[0]}x{size[1]}")
    # [L, f H, f W, 3] -> [L, H, f, W, f, 3], averaged over both f, rounded to the nearest integer
    blocks = frames.reshape(len(frames), height, factor, width, factor, 3)
    return (blocks.mean((2, 4), dtype=np.float32) + 0.5).astype(np.uint8)


def encode(picture: Frames) -> bytes:
    """Encode `picture` [height, width, 3] as PNG, which is lossless."""
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(picture)).save(file, "png", compress_level=1)
    return file.getvalue()


def encode_all(frames: Sequence[Frames]) -> list[bytes]:
    """Encode all `frames` with several threads."""
    return [*_threads(WORKERS).map(encode, frames)]
