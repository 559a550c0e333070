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
    """Encode `text` as bytes, uint8 [length].

    Raises:
        UserError: if there are more than `length` bytes, or a zero byte, which marks the end.
    """
    data = text.encode()
    if len(data) > length or 0 in data:
        problem = f"{len(data)} bytes" if len(data) > length else "a zero"
        raise UserError(f"expected text of at most {length} bytes of UTF-8, none of them zero; got {problem}: {text!r}")
    return np.frombuffer(data.ljust(length, b"\0"), np.uint8).copy()


def decode(data: np.ndarray) -> str:
    """Decode the text in bytes [L]; the inverse of `encode`.

    Raises:
        UserError: if they are not UTF-8.
    """
    content = np.ascontiguousarray(data, np.uint8).tobytes().rstrip(b"\0")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"expected text in UTF-8, got {content[:80]!r}") from error


def encode_as(value: object, shape: Sequence[int]) -> np.ndarray:
    """Encode one text [L] or a list of texts [M, L] as bytes, uint8, of `shape`.

    Raises:
        UserError: see `encode`; also for a list instead of one text and vice versa.
    """
    is_single = len(shape) == 1
    texts = [value] if is_single else value
    if not isinstance(texts, list) or not all(isinstance(each, str) for each in texts):
        raise UserError(f"expected {'text' if is_single else 'a list of texts'}, got {value!r:.80}")
    rows = np.array([encode(each, shape[-1]) for each in cast(list[str], texts)], np.uint8).reshape(-1, shape[-1])
    return rows[0] if is_single else rows
