"""JSON that shows damage: its own, and that of the files beside it that it lists.

A sealed file holds the SHA-256 of each listed file under "files" and that of all its fields under "sha256". It is
written in one way alone: whichever bit of it changes, it is not what `write` makes of what it says.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from embodied.errors import UserError
from embodied.saving.files import flush

UNSEALED = 1
"""Format of files from before there were checksums."""


def write(path: Path, record: dict[str, Any], files: Iterable[str]) -> dict[str, Any]:
    """Write `record`, which tells its "format", to `path` and seal it and `files` beside it; returns what it says."""
    digests = {name: digest(path.with_name(name)) for name in files}
    path.write_bytes(_sealed(json.loads(json.dumps(record | {"files": digests}))))
    flush(path)
    return json.loads(path.read_bytes())


def read(path: Path, format_: int) -> dict[str, Any]:
    """What `write` wrote to `path` in `format_`; the files that it lists are for `check_files`.

    Raises:
        UserError: on one line, where it is damaged or of another format.
        OSError: where there is none.
    """
    data = path.read_bytes()
    try:
        record = json.loads(data)
    except ValueError as error:
        raise UserError(f"{path.name} is damaged: {error}") from error
    if not isinstance(record, dict):
        raise UserError(f"{path.name} is damaged: expected an object, got {type(record).__name__}")
    if record.get("format") == UNSEALED:
        raise UserError(f"{path.name} is of an earlier version, without the checksums that would show damage")
    if data != _sealed(record):
        raise UserError(f"{path.name} is damaged: its checksum is of another content")
    if record["format"] != format_:
        raise UserError(f"{path.name} is of format {record['format']}, this version reads format {format_}")
    return record


def check_files(path: Path, record: dict[str, Any]) -> None:
    """Compare the files that `record`, as read from `path`, lists with their checksums.

    Raises:
        UserError: on one line, which names the first one that is damaged or missing.
    """
    for name, expected in record["files"].items():
        file = path.with_name(name)
        if not file.is_file():
            raise UserError(f"{name} is missing")
        if digest(file) != expected:
            raise UserError(f"{name} is damaged: its checksum is not the one in {path.name}")


def digest(path: Path) -> str:
    """SHA-256 of the file at `path`, as `sha256sum` prints it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sealed(record: dict[str, Any]) -> bytes:
    content = {name: value for name, value in record.items() if name != "sha256"}
    seal = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return (json.dumps(content | {"sha256": seal}, indent=2) + "\n").encode()
