"""JSON files with checksums of themselves and of the files that they list.

A sealed file has the SHA-256 of each listed file under "files" and that of all its fields under "sha256". Its
formatting is fixed, so that a change of any bit is detected.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from embodied.errors import UserError
from embodied.saving.files import flush
from embodied.saving.json_text import loads

UNSEALED = 1
"""Format of files without checksums, from earlier versions."""


def write(path: Path, record: dict[str, Any], files: Iterable[str]) -> dict[str, Any]:
    """Write `record`, which has a "format", to `path` with checksums of `files` in the same folder; return it."""
    digests = {name: digest(path.with_name(name)) for name in files}
    path.write_bytes(_sealed(json.loads(json.dumps(record | {"files": digests}))))
    flush(path)
    return json.loads(path.read_bytes())


def read(path: Path, *formats: int) -> dict[str, Any]:
    """Read the record that `write` wrote to `path` in one of the `formats`; `check_files` checks the listed files.

    Raises:
        UserError: on one line, if it is damaged or of another format.
        OSError: if it cannot be read.
    """
    data = path.read_bytes()
    try:
        record = loads(data)
    except ValueError as error:
        raise UserError(f"{path.name} is damaged: {error}") from error
    if not isinstance(record, dict):
        raise UserError(f"{path.name} is damaged: expected an object, got {type(record).__name__}")
    if record.get("format") == UNSEALED:
        raise UserError(f"{path.name} was written by an earlier version, without checksums")
    if data != _sealed(record):
        raise UserError(f"{path.name} is damaged: its checksum does not match")
    if record["format"] not in formats:
        expected = " or ".join(map(str, formats))
        raise UserError(f"{path.name} has format {record['format']}, this version reads format {expected}")
    return record


def check_files(path: Path, record: dict[str, Any]) -> None:
    """Compare the files listed in `record`, read from `path`, with their checksums.

    Raises:
        UserError: on one line, with the first file that is damaged or missing.
    """
    for name, expected in record["files"].items():
        file = path.with_name(name)
        if not file.is_file():
            raise UserError(f"{name} is missing")
        if digest(file) != expected:
            raise UserError(f"{name} is damaged: its checksum differs from the one in {path.name}")


def digest(path: Path) -> str:
    """SHA-256 of the file at `path`, as `sha256sum` prints it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def combined(digests: Mapping[str, str]) -> str:
    """Combine several files' `digests` by name into one SHA-256."""
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


def _sealed(record: dict[str, Any]) -> bytes:
    content = {name: value for name, value in record.items() if name != "sha256"}
    seal = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return (json.dumps(content | {"sha256": seal}, indent=2) + "\n").encode()
