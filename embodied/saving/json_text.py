"""JSON: checks of text from outside, and results in a form that people can read and compare."""

from __future__ import annotations

import json
from typing import Any

DEPTH = 200
"""Largest nesting depth; our files have a few dozen levels, Python's own functions fail beyond about 1,000."""

ROW_HEIGHT = 2
"""Largest nesting depth of a container that `dumps_rows` writes on one line."""


def dumps_rows(value: Any) -> str:  # noqa: ANN401 - JSON
    """Format `value` as JSON in which every evaluation takes one line, so that changed results are changed lines.

    A list or object is written on one line if the containers within it contain only scalars.
    """
    return _rows(value, "") + "\n"


def loads(text: str | bytes) -> Any:  # noqa: ANN401 - JSON
    """Parse JSON, see `json.loads`.

    Raises:
        ValueError: for text that is not JSON, or is nested more than `DEPTH` deep.
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


def _rows(node: Any, indent: str) -> str:  # noqa: ANN401 - JSON
    """Format `node` as text, whose further lines begin with `indent`."""
    if _height(node) <= ROW_HEIGHT:
        return json.dumps(node)
    inner = indent + " "
    if isinstance(node, list):
        lines = [inner + _rows(each, inner) for each in node]
    else:
        lines = [f"{inner}{json.dumps(str(key))}: {_rows(each, inner)}" for key, each in node.items()]
    first, last = "[]" if isinstance(node, list) else "{}"
    return first + "\n" + ",\n".join(lines) + f"\n{indent}{last}"


def _height(node: Any) -> int:  # noqa: ANN401 - JSON
    """Nesting depth of containers: 0 for a scalar."""
    return 1 + max(map(_height, _parts(node)), default=0) if isinstance(node, dict | list) else 0
