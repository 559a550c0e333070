"""Text in observations: UTF-8 bytes padded with zeros, uint8 [..., L], handled like any other array.

Specs of text have the unit `contract.UTF8`. Policies split it into words or tokens themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np

from embodied.contract import UTF8, TensorSpec
from embodied.errors import UserError


def text_spec(length: int, *rows: int) -> TensorSpec:
    """Spec of a text of up to `length` bytes, or of `rows` texts (-1: any number)."""
    return TensorSpec((*rows, length), dtype="uint8", unit=UTF8)


def encode(text: str, length: int) -> np.ndarray:
    """The bytes of `text`, uint8 [length].

    Raises:
        UserError: if there are more than `length` bytes, or a zero byte, which marks the end.
    """
    data = text.encode()
    if len(data) > length or 0 in data:
        found = f"{len(data)} bytes" if len(data) > length else "a zero"
        raise UserError(f"expected text of at most {length} bytes of UTF-8, none of them zero; got {found}: {text!r}")
    return np.frombuffer(data.ljust(length, b"\0"), np.uint8).copy()


def decode(data: np.ndarray) -> str:
    """The text in bytes [L]; the inverse of `encode`.

    Raises:
        UserError: if they are not UTF-8.
    """
    found = np.ascontiguousarray(data, np.uint8).tobytes().rstrip(b"\0")
    try:
        return found.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"expected text in UTF-8, got {found[:80]!r}") from error


def encode_as(value: object, shape: Sequence[int]) -> np.ndarray:
    """Bytes, uint8, for an array of `shape`: one text [L] or a list of texts [M, L].

    Raises:
        UserError: as `encode`, and for a list in place of one text or the other way round.
    """
    one = len(shape) == 1
    texts = [value] if one else value
    if not isinstance(texts, list) or not all(isinstance(each, str) for each in texts):
        raise UserError(f"expected {'text' if one else 'a list of texts'}, got {value!r:.80}")
    found = np.array([encode(each, shape[-1]) for each in cast(list[str], texts)], np.uint8).reshape(-1, shape[-1])
    return found[0] if one else found
