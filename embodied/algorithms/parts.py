"""What a learner is made of: its networks, optimisers and replays, wherever in it they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def reached(part: object, kinds: tuple[type, ...], seen: set[int] | None = None) -> Iterator[Any]:
    """Everything of `kinds` that `part` of a learner has, each once."""
    seen = set() if seen is None else seen
    if id(part) in seen:
        return
    seen.add(id(part))
    if isinstance(part, kinds):
        yield part
    elif isinstance(part, dict | list | tuple):
        for each in part.values() if isinstance(part, dict) else part:
            yield from reached(each, kinds, seen)
    elif type(part).__module__.startswith("embodied."):
        yield from reached(vars(part) if hasattr(part, "__dict__") else {}, kinds, seen)
