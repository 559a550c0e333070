"""Reads and writes export.json: the contents of an export and checksums of its files; reading needs no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from embodied.contract import Contract
from embodied.errors import UserError
from embodied.saving import checkpoint, sealed
from embodied.saving.json_text import loads

RECORD = "export.json"
CONTRACT = "contract.json"
FORMAT = 2


def write_record(directory: Path, record: dict[str, Any]) -> dict[str, Any]:
    """Write export.json with checksums of the files in `directory`; returns its contents.

    Subfolders, which hold the examples, have no checksums.
    """
    files = sorted(path.name for path in directory.iterdir() if path.is_file() and path.name != RECORD)
    return sealed.write(directory / RECORD, {"format": FORMAT} | record, files)


def read_record(directory: Path, target: str | None = None) -> dict[str, Any]:
    """Contents of export.json, after checking that all files are intact and the target matches (any if None).

    Raises:
        UserError: if `directory` contains no such export, or one of its files is damaged.
    """
    path = directory / RECORD
    if not path.is_file():
        raise UserError(
            f"{directory} holds no {RECORD}; expected an export written by `python export.py target={target}`"
        )
    try:
        record = sealed.read(path, FORMAT)
        sealed.check_files(path, record)
    except UserError as error:
        raise UserError(f"the export {directory} cannot be used ({error}); export the policy again") from error
    if target not in (None, record["target"]):
        raise UserError(f"{directory} holds an export with target={record['target']}; expected target={target}")
    return record


def exported_contract(directory: Path) -> Contract:
    """The contract of the export in `directory`.

    Raises:
        UserError: see `read_record`.
    """
    read_record(directory)
    return Contract.from_dict(loads((directory / CONTRACT).read_text(encoding="utf-8")))


def read_contract(path: str) -> Contract:
    """The contract of a run, a checkpoint, an export, or a contract.json.

    Raises:
        UserError: if the contract is missing or damaged.
    """
    folder = Path(path)
    file = folder if folder.suffix == ".json" else folder / CONTRACT
    if file.name == CONTRACT and (file.parent / RECORD).is_file():
        return exported_contract(file.parent)
    if not file.is_file():
        return checkpoint.load_contract(folder)
    try:
        return Contract.from_dict(loads(file.read_text(encoding="utf-8")))
    except json.JSONDecodeError as error:
        raise UserError(f"{file} is no JSON ({error}); expected the contract.json of an export") from error
