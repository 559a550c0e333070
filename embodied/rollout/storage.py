"""Storage of a rollout's tensors, and how they are filled."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor


class Storage(Enum):
    """Place where a rollout is stored: the environment's device, CPU memory, or temporary files."""

    DEVICE = "device"
    CPU = "cpu"
    DISK = "disk"


class Rows:
    """Tensors [T, ...] that are filled row by row, so that a growing rollout is in memory only once."""

    def __init__(self, length: int, storage: Storage, folder: Path | None) -> None:
        self.length = length
        self.storage = storage
        self.folder = folder
        self.leaves: dict[tuple[str, ...], Tensor] = {}
        self.rows: dict[tuple[str, ...], tuple[Tensor, ...]] = {}  # views of the leaves, which cost less than indices
        self.batch: dict[str, list[int]] = {}
        self.named: dict[str, Counter[str]] = {}  # rows of each tensor of a dictionary

    def put(self, t: int, row: Mapping[str, Tensor | TensorDict | dict[str, Tensor]]) -> None:
        """Write row `t`: tensors, observations and dictionaries of tensors, by name."""
        for name, value in row.items():
            if isinstance(value, TensorDict):
                self.batch[name] = [self.length, *value.batch_size]
                for key, leaf in value.items(include_nested=True, leaves_only=True):
                    path = key if isinstance(key, tuple) else (key,)
                    tensor = cast(Tensor, leaf)
                    self._row((name, *path), t, tensor).copy_(tensor)
            elif isinstance(value, dict):
                self.named.setdefault(name, Counter()).update(value.keys())
                for key, tensor in value.items():
                    self._row((name, key), t, tensor).copy_(tensor)
            else:
                self._row((name,), t, value).copy_(value)

    def end(self, t: int) -> None:
        """End before row `t`: later rows are left out."""
        self.length = t
        self.leaves = {path: leaf[:t] for path, leaf in self.leaves.items()}
        self.batch = {name: [t, *batch[1:]] for name, batch in self.batch.items()}

    def tensors(self) -> dict[str, Any]:
        """All tensors by name, [T, ...]; of a dictionary, those that every row has."""
        tensors: dict[str, Any] = {name: TensorDict({}, batch) for name, batch in self.batch.items()}
        for name, rows in self.named.items():
            tensors[name] = {key: self.leaves[name, key] for key, count in rows.items() if count == self.length}
        for (name, *path), tensor in self.leaves.items():
            if name in self.named:
                continue
            if path:
                tensors[name].set(tuple(path), tensor)
            else:
                tensors[name] = tensor
        return tensors

    def _row(self, path: tuple[str, ...], t: int, leaf: Tensor) -> Tensor:
        if path not in self.rows:
            self.leaves[path] = self._empty((self.length, *leaf.shape), leaf)
            self.rows[path] = self.leaves[path].unbind(0)
        return self.rows[path][t]

    def _empty(self, shape: tuple[int, ...], leaf: Tensor) -> Tensor:
        if self.storage is Storage.DEVICE:
            return leaf.new_empty(shape)
        if self.storage is Storage.CPU or 0 in shape:
            return torch.empty(shape, dtype=leaf.dtype)
        size = torch.Size(shape).numel()
        with tempfile.NamedTemporaryFile(dir=self.folder) as file:  # the mapping lives as long as the tensor
            return torch.from_file(file.name, shared=True, size=size, dtype=leaf.dtype).view(shape)
