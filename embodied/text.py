"""Words as integers, without a vocabulary file: stable hashes that a policy embeds."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from typing import cast

import numpy as np

from embodied.errors import UserError

WORD_BUCKETS = 4096
"""Ids run from 1 to WORD_BUCKETS - 1; 0 is padding."""
WORD_ID = "word id"
"""Unit of the arrays of a contract that hold words: where people or other programs fill them, they take text."""


def hash_words(text: str, length: int = 16) -> list[int]:
    """Ids of the words of `text`, lower-cased, numbers dropped, padded with 0 to `length`.

    `alphabet_soup_1` and `alphabet soup` give the same ids, so object names and instructions share embeddings.

    Raises:
        UserError: where the text has more than `length` words.
    """
    words = re.findall(r"[a-z]+", text.lower())
    if len(words) > length:
        raise UserError(f"expected at most {length} words, got {len(words)}: {text!r}")
    ids = [1 + zlib.crc32(word.encode()) % (WORD_BUCKETS - 1) for word in words]
    return ids + [0] * (length - len(ids))


def word_ids(text: object, shape: Sequence[int]) -> np.ndarray:
    """Ids, int64, of words for an array of `shape`: of one text [L], or of a list of texts [M, L].

    Raises:
        ValueError: where one has more than L words, or a list is given for one text or the other way round.
    """
    one = len(shape) == 1
    texts = [text] if one else text
    if not isinstance(texts, list) or not all(isinstance(each, str) for each in texts):
        raise ValueError(f"expected {'text' if one else 'a list of texts'}, got {text!r:.80}")
    ids = np.array([hash_words(each, shape[-1]) for each in cast(list[str], texts)], np.int64).reshape(-1, shape[-1])
    return ids[0] if one else ids
