"""Words as integers, without a vocabulary file: stable hashes, which policies and exported graphs read."""

from __future__ import annotations

import re
import zlib

import numpy as np
import torch
from torch import Tensor

from embodied.errors import UserError

WORD_BUCKETS = 4096
"""Number of word ids: 1 to WORD_BUCKETS - 1, and 0 for padding."""
WORD = re.compile(r"[^\W\d_]+")
"""Pattern of a word: letters of any script."""
REMEMBERED = 1 << 16
"""Largest number of cached texts in a WordTable."""


def hash_words(text: str, length: int = 16) -> list[int]:
    """Ids of the words of `text`, lower-cased, numbers dropped, padded with 0 to `length`.

    `alphabet_soup_1` and `alphabet soup` have the same ids, so object names and instructions share embeddings.

    Raises:
        UserError: if the text has more than `length` words.
    """
    words = WORD.findall(text.lower())
    if len(words) > length:
        raise UserError(f"expected at most {length} words, got {len(words)}: {text!r}")
    ids = [1 + zlib.crc32(word.encode()) % (WORD_BUCKETS - 1) for word in words]
    return ids + [0] * (length - len(ids))


class WordTable:
    """Cache of the word ids of texts, because the same few texts are read at every step.

    `longest` is the largest number of words of a text so far: ids beyond are padding.
    """

    def __init__(self, words: int) -> None:
        self.words = words
        self.longest = 0
        self.rows: dict[bytes, int] = {}
        self.ids = np.zeros((0, words), np.int64)

    def __call__(self, text: Tensor) -> Tensor:
        """Ids [..., words], int64, of texts [..., L] encoded as in the contract (`embodied.text`).

        Raises:
            UserError: for text of more than `words` words, or that is not UTF-8.
        """
        size = text.shape[-1]
        texts = text.cpu().contiguous().numpy().reshape(-1, size).view(f"S{size}").ravel().tolist()
        try:
            rows = self._rows(texts)
        except KeyError:
            self._learn(set(texts))
            rows = self._rows(texts)
        return torch.from_numpy(self.ids.take(rows, 0)).view(*text.shape[:-1], self.words).to(text.device)

    def _rows(self, texts: list[bytes]) -> np.ndarray:
        return np.fromiter(map(self.rows.__getitem__, texts), np.int64, len(texts))

    def _learn(self, texts: set[bytes]) -> None:
        new = texts.difference(self.rows)
        if len(self.rows) + len(new) > REMEMBERED:
            self.rows, self.ids, new = {}, self.ids[:0], texts
        try:
            ids = [hash_words(text.decode(), self.words) for text in new]
        except UnicodeDecodeError as error:
            raise UserError(f"expected text in UTF-8, got {error.object[:80]!r}") from error
        self.rows.update(zip(new, range(len(self.ids), len(self.ids) + len(new)), strict=True))
        self.ids = np.concatenate((self.ids, np.array(ids, np.int64).reshape(-1, self.words)))
        self.longest = int(self.ids.any(0).sum())
