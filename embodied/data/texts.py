"""Text observations of episodes: a table of distinct texts, and the number of each observation's text.

An instruction takes 4 bytes of an observation instead of its length. Letters: R observations, K distinct texts, B rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

TABLE = "texts"
NUMBERS = "text_numbers"
"""Columns of a key: its distinct texts as bytes, uint8 [K, ...], and the number of each observation's text, [R]."""


class Texts:
    """Texts of R observations by key: `tables[key]` uint8 [K, ...], `numbers[key]` int32 [R]."""

    def __init__(self, tables: Mapping[str, Tensor], numbers: Mapping[str, Tensor]) -> None:
        self.tables = dict(tables)
        self.numbers = dict(numbers)

    @staticmethod
    def of(observation: Mapping[str, Tensor]) -> Texts:
        """Texts of R observations, uint8 [R, ...] by key."""
        tables = {}
        numbers = {}
        for key, values in observation.items():
            tables[key], numbers[key] = _distinct(values)
        return Texts(tables, numbers)

    @staticmethod
    def join(parts: Sequence[Texts]) -> Texts:
        """Concatenate the texts of `parts`; the texts of the first part keep their numbers."""
        tables = {}
        numbers = {}
        for key in parts[0].tables:
            tables[key], merged = _distinct(torch.cat([part.tables[key] for part in parts]))
            begin = 0
            renumbered = []
            for part in parts:
                renumbered.append(merged[begin + part.numbers[key].long()])
                begin += len(part.tables[key])
            numbers[key] = torch.cat(renumbered)
        return Texts(tables, numbers)

    def continuing(self, existing: Texts | None) -> tuple[Texts, Texts]:
        """Prepare these texts to be appended to files with the texts `existing`.

        Returns all texts, and those to append: the texts that are new, and numbers that count the known ones.
        """
        if existing is None or not self._fits(existing):
            return self, self
        joined = Texts.join([existing.part(0, 0), self])
        new = {key: table[len(existing.tables[key]) :] for key, table in joined.tables.items()}
        return joined, Texts(new, joined.numbers)

    def _fits(self, other: Texts) -> bool:
        shapes, others = ({key: table.shape[1:] for key, table in each.tables.items()} for each in (self, other))
        return shapes == others

    def take(self, rows: Tensor) -> dict[str, Tensor]:
        """Texts as bytes, uint8 [B, ...] by key, of the observations `rows` [B]."""
        return {key: table.index_select(0, self.numbers[key][rows]) for key, table in self.tables.items()}

    def part(self, begin: int, end: int) -> Texts:
        """Texts of the observations from `begin` to `end` - 1, which share the memory of these."""
        return Texts(self.tables, {key: numbers[begin:end] for key, numbers in self.numbers.items()})

    def selected(self, rows: Tensor) -> Texts:
        """Texts of the observations `rows`."""
        return Texts(self.tables, {key: numbers[rows] for key, numbers in self.numbers.items()})

    def columns(self) -> dict[str, Tensor]:
        """Tensors by name."""
        tables = {f"{TABLE}.{key}": values for key, values in self.tables.items()}
        return tables | {f"{NUMBERS}.{key}": values for key, values in self.numbers.items()}

    @staticmethod
    def from_columns(named: Mapping[str, Tensor]) -> Texts | None:
        """Build texts from the tensors of `columns`; None if `named` has none."""
        tables, numbers = (
            {name.partition(".")[2]: values for name, values in named.items() if name.startswith(f"{kind}.")}
            for kind in (TABLE, NUMBERS)
        )
        return Texts(tables, numbers) if tables else None


def _distinct(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Distinct `rows` in the order of their first appearance, and the number of each row, int32."""
    size = rows[0].numel() if len(rows) else 0
    data = rows.cpu().contiguous().numpy().tobytes()
    places: dict[bytes, int] = {}
    cells = [data[row * size : (row + 1) * size] for row in range(len(rows))]
    numbers = [places.setdefault(cell, len(places)) for cell in cells]
    first = np.unique(np.array(numbers, np.int32), return_index=True)[1]
    return rows[torch.from_numpy(first)], torch.tensor(numbers, dtype=torch.int32)
