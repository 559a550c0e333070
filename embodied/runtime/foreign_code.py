"""Guard against code and files outside a run that its record names: they must be repeated on the command line.

A checkpoint may come from anybody. Its record may choose among the parts of this installation; an interpreter, a
module, a file or a server of somebody else's choice would run with the rights of the person who evaluates or resumes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from embodied.commands import typed
from embodied.errors import UserError

TASK = "task"
PLACEMENT = "placement"
"""Groups whose options can name code; those of policies name weights, which are read as numbers."""
PROGRAM = "python"
"""Name of options whose value is a program even without a path."""
DATA = "airframe"
"""Name of options whose value may be a file of numbers, which the record contains."""
NAMES_CODE = re.compile(r"[/\\:]|\.(py|so|xml)$")
"""Pattern of a path, an address, "module:name", or a file that is read as code."""


def check(saved: Mapping[str, Any], overrides: Sequence[str], part: str = TASK) -> None:
    """Check that `overrides` ("key=value") name everything outside the run that `part` of the record `saved` names.

    Raises:
        UserError: with the options to repeat.
    """
    values = saved.get("values", {})
    if broken := next((name for name, text in _texts(values, "") if "${" in text), None):
        raise UserError(f"the saved configuration asks for something else in {broken}: expected plain values, got ${{")
    confirmed = {each.partition("=")[0] for each in overrides}
    foreign = [name for name, text in _texts(values.get(part), f"{part}.") if _is_code(name, text)]
    unconfirmed = [name for name in foreign if not _prefixes(name) & confirmed]
    if unconfirmed:
        options = " ".join(dict.fromkeys(typed(name, _value(values, name)) for name in unconfirmed))
        raise UserError(
            f"the saved configuration names code or files outside the run: if you trust them, repeat {options} on the"
            " command line"
        )


def named(arguments: Sequence[str], parts: Sequence[str] = (TASK,)) -> list[str]:
    """Entries of `arguments` ("key=value") in `parts` that name code or files, which a command on the run repeats."""
    last = {each.partition("=")[0]: each for each in arguments}
    return [
        each
        for name, each in last.items()
        if name.partition(".")[0] in parts and "." in name and _is_code(name, each.partition("=")[2])
    ]


def _is_code(name: str, text: str) -> bool:
    if name.endswith(f".{DATA}"):
        return False
    return (name.endswith(f".{PROGRAM}") and text != "null") or bool(NAMES_CODE.search(text))


def _texts(node: Any, prefix: str) -> Iterator[tuple[str, str]]:  # noqa: ANN401 - a tree of JSON values
    """Iterate over all texts in `node`, also keys, with the name of their option; a list is one option."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield prefix.rstrip("."), str(key)
            yield from _texts(value, f"{prefix}{key}.")
    elif isinstance(node, list):
        for value in node:
            for _, text in _texts(value, ""):
                yield prefix.rstrip("."), text
    elif isinstance(node, str):
        yield prefix.rstrip("."), node


def _prefixes(name: str) -> set[str]:
    """Option `name`, and the groups that contain it."""
    words = name.split(".")
    return {".".join(words[:count]) for count in range(1, len(words) + 1)}


def _value(values: Mapping[str, Any], name: str) -> Any:  # noqa: ANN401 - a JSON value
    for word in name.split("."):
        values = values[word]
    return values
