"""The constants of an exported network as one C struct of 32-bit fields, covered by a checksum."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

ROWS = 4
"""Number of rows in a block, as in policy_kernels.h."""
PER_LINE = 8


class Constants:
    """Fields in the order of their addition. Each holds float32 or 32-bit words, so there is no padding."""

    def __init__(self) -> None:
        self.fields: dict[str, NDArray] = {}

    def floats(self, name: str, values: Tensor) -> str:
        """Add a field of floats; returns its C expression."""
        return self._add(name, values.detach().cpu().numpy().astype("<f4").reshape(-1))

    def rows(self, name: str, values: Tensor) -> str:
        """Add one number per row, padded with zeros to whole blocks."""
        return self._add(name, _whole_blocks(values.detach().cpu().numpy().astype("<f4")))

    def matrix(self, name: str, weight: Tensor) -> str:
        """Add a matrix [rows, inputs] as [rows / 4][inputs][4]."""
        # four rows are interleaved, so that the kernel reads them with one pass over the inputs
        blocks = _whole_blocks(weight.detach().cpu().numpy().astype("<f4")).reshape(-1, ROWS, weight.shape[1])
        return self._add(name, blocks.transpose(0, 2, 1).reshape(-1))

    def integer_matrix(self, name: str, weight: Tensor) -> str:
        """Add an int16 or int8 matrix [rows, inputs] as [rows / 4][words][4], where a word has two or four weights."""
        blocks = _whole_blocks(weight.cpu().numpy())
        blocks = np.pad(blocks, ((0, 0), (0, -blocks.shape[1] % 4)))
        if blocks.itemsize == 1:
            # the core's SXTB16 takes bytes 0 and 2, which then are two neighbours
            blocks = blocks.reshape(len(blocks), -1, 4)[:, :, [0, 2, 1, 3]].reshape(len(blocks), -1)
        blocks = np.ascontiguousarray(blocks, f"<i{blocks.itemsize}")
        words = blocks.view("<u4").reshape(len(blocks) // ROWS, ROWS, -1)
        return self._add(name, words.transpose(0, 2, 1).reshape(-1))

    @property
    def bytes(self) -> bytes:
        """The struct's bytes on a little-endian machine."""
        return b"".join(np.ascontiguousarray(values).tobytes() for values in self.fields.values())

    @property
    def crc32(self) -> int:
        """Checksum of `bytes`."""
        return zlib.crc32(self.bytes)

    def source(self) -> Iterator[str]:
        """Lines of C that define the struct and its values."""
        yield "static const struct {"
        for name, values in self.fields.items():
            yield f"  {'float' if values.dtype.kind == 'f' else 'uint32_t'} {name}[{len(values)}];"
        yield "} constants = {"
        for name, values in self.fields.items():
            yield f"  .{name} = {{"
            yield from _wrapped([literal(value) if values.dtype.kind == "f" else f"0x{value:08x}u" for value in values])
            yield "  },"
        yield "};"

    def _add(self, name: str, values: NDArray) -> str:
        assert name not in self.fields
        self.fields[name] = values
        return f"constants.{name}"


def whole_blocks(rows: int) -> int:
    """Round `rows` up to whole blocks."""
    return rows + -rows % ROWS


def _whole_blocks(values: NDArray) -> NDArray:
    return np.pad(values, ((0, -len(values) % ROWS), *((0, 0) for _ in values.shape[1:])))


def _wrapped(words: Iterable[str]) -> Iterator[str]:
    words = list(words)
    for start in range(0, len(words), PER_LINE):
        yield "    " + ", ".join(words[start : start + PER_LINE]) + ","


def literal(value: float) -> str:
    """Format `value` as a C float literal: nine digits identify every float32."""
    text = f"{value:.9g}"
    return text + ("f" if set(text) & set(".e") else ".0f")
