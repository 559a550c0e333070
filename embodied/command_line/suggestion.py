"""Suggestions for mistyped options and choices."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Suffix of an error message on `name`: "; did you mean X?" with similar names of `names`, "" without any.

    Similar names differ in case or by few letters, or have `name` as their initials (lr: learning_rate).
    Names with dots are compared by their last part.
    """
    word = name.rpartition(".")[2].casefold()
    by_word: dict[str, list[str]] = {}
    for each in names:
        by_word.setdefault(each.rpartition(".")[2].casefold(), []).append(each)
    close_words = [word] if word in by_word else [each for each in by_word if "_" in each and word == _initials(each)]
    close_words = close_words or difflib.get_close_matches(word, by_word, n=3, cutoff=0.7)
    suggestions = [each for similar in close_words for each in by_word[similar]]
    return f"; did you mean {' or '.join(suggestions[:3])}?" if suggestions else ""


def _initials(name: str) -> str:
    return "".join(word[:1] for word in name.split("_"))
