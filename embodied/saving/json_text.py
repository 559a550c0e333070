"""JSON that others have written: whatever is wrong with it is a ValueError."""

from __future__ import annotations

import json
from typing import Any

DEPTH = 200
"""Most lists and objects within each other; ours have a few dozen, Python's own functions fail beyond about 1,000."""


def loads(text: str | bytes) -> Any:  # noqa: ANN401 - JSON
    """As `json.loads`.

    Raises:
        ValueError: for text that is no JSON, or is nested more than `DEPTH` deep.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"nested more than {DEPTH} deep") from None
    level = [value]
    for _ in range(DEPTH):
        level = [part for each in level if isinstance(each, dict | list) for part in _parts(each)]
        if not level:
            return value
    raise ValueError(f"nested more than {DEPTH} deep")


def _parts(node: dict[str, Any] | list[Any]) -> list[Any]:
    return list(node.values()) if isinstance(node, dict) else node
