"""Files of columns of episodes: .npy files that grow, and are mapped when they are read."""

from __future__ import annotations

import math
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from embodied.errors import UserError
from embodied.saving.files import flush, named


def mapped(path: Path) -> Tensor:
    """Tensor of the file at `path`, mapped, not loaded."""
    array = np.load(path, mmap_mode="c", allow_pickle=False) if _rows(path) else np.load(path, allow_pickle=False)
    return torch.from_numpy(array)


def _rows(path: Path) -> int:
    with path.open("rb") as file:
        np.lib.format.read_magic(file)
        shape, *_ = np.lib.format.read_array_header_1_0(file)
    return math.prod(shape)


class Column:
    """Growing .npy file; its number of rows is written into the header at the end."""

    def __init__(self, path: Path, like: np.ndarray) -> None:
        self.file: BinaryIO = path.open("wb")
        self.rows = 0
        self.like = like[:0]
        self._header()

    def check(self, values: np.ndarray) -> None:
        """Raise UserError for `values` of another type or shape than those before."""
        expected, got = ((each.dtype, each.shape[1:]) for each in (self.like, values))
        if expected != got:
            raise UserError(f"expected rows of {expected} in {Path(self.file.name).name}, got {got}")

    def append(self, values: np.ndarray) -> None:
        """Write `values` after the others."""
        with named(Path(self.file.name)):
            self.file.write(np.ascontiguousarray(values).tobytes())
        self.rows += len(values)

    def close(self) -> None:
        """Complete the file."""
        with named(Path(self.file.name)):
            self.file.seek(0)
            self._header()
            self.file.close()
            flush(Path(self.file.name))

    def _header(self) -> None:
        description = np.lib.format.header_data_from_array_1_0(self.like)
        np.lib.format.write_array_header_1_0(self.file, description | {"shape": (self.rows, *self.like.shape[1:])})
