"""Words as integers, without a vocabulary file: stable hashes that a policy embeds."""

from __future__ import annotations

import re
import zlib

from embodied.errors import UserError

WORD_BUCKETS = 4096
"""Ids run from 1 to WORD_BUCKETS - 1; 0 is padding."""


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
