"""Demonstrations of a run: its own in its folder, those of data sets where they lie; and their notes in its report.

A task's own demonstrations are recorded into the run's folder once. Data sets are decoded into a cache that all runs
share; the run's folder has an index of them, which says where they are and what they contain.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from embodied.contract import Contract
from embodied.data.cache import DataSet, cache_folder, content_of, decode_once
from embodied.data.episodes import FOLDER, FORMATS, RECORD, UNKNOWN, Episodes, EpisodeWriter, read
from embodied.errors import UserError
from embodied.saving import sealed
from embodied.saving.files import complete_or_absent

log = logging.getLogger(__name__)
INDEX = "demonstrations.json"
INDEX_FORMAT = 2
"""A run's index of its data sets, and its format."""
NOTES = "notes"
"""Notes of a writer: strings in a run's own folder, pairs of a data set's number and a text in the cache."""


def record_once(
    run: Path, contract: Contract, origin: dict[str, Any], make: Callable[[EpisodeWriter], None]
) -> Episodes:
    """Demonstrations of a run in the folder `run`: recorded there by `make` the first time, then read.

    There is an observation of `contract` before every action; `origin`, JSON, identifies their source.

    Raises:
        UserError: if the folder has episodes of another contract or origin, or damaged ones.
    """
    folder = run / FOLDER
    if not folder.exists():
        run.mkdir(parents=True, exist_ok=True)
        with EpisodeWriter(folder, replace(contract, horizon=1, executed=1), origin) as writer:
            make(writer)
    try:
        episodes, stored_contract, stored_origin = read(folder)
    except UserError as error:
        raise UserError(f"{error}; delete {folder} to make them again") from error
    _check_purpose(folder, contract, origin, stored_contract, stored_origin)
    return episodes


def decoded_once(
    run: Path,
    contract: Contract,
    origin: dict[str, Any],
    data_sets: Sequence[DataSet],
    decode: Callable[[EpisodeWriter], None],
    settings: Mapping[str, Any],
) -> Episodes:
    """Demonstrations of a run from `data_sets`: decoded by `decode` unless a run before did, then mapped.

    The first time an index is written into the folder `run`, with `origin`, JSON, which identifies their source; later
    it is compared, and names the folder of the cache that the run read last. `settings`, JSON, are all else that
    `decode` depends on.

    Raises:
        UserError: if the data sets are missing or have changed since, or if the contract or origin is another.
    """
    if (run / FOLDER).exists():  # the copy of a run of an earlier version
        return record_once(run, contract, origin, decode)
    contract = replace(contract, horizon=1, executed=1)
    index = _index(run)
    if index is not None:
        _check_purpose(run / INDEX, contract, origin, Contract.from_dict(index["contract"]), index["origin"])
    content = {str(each.path): _content(each, index, run) for each in data_sets}
    identity = {"content": [*content.values()], "contract": contract.to_dict(), "settings": settings}
    folder, episodes, decoded = decode_once(identity, contract, decode)
    if index is None:
        notes = [f"{data_sets[number].path}: {text}" for number, text in decoded.get(NOTES, [])]
        for note in notes:
            log.warning(note)
        index = {"format": INDEX_FORMAT, "contract": contract.to_dict(), "origin": origin, "content": content}
        index |= {"decoded": content_of(folder), NOTES: notes}
    elif content_of(folder) != index["decoded"]:
        log.warning(f"{run}: its data sets were decoded again, not to the same bytes; minibatches may differ slightly")
    if index.get("folder") != folder.name:  # the first time, or if another release decoded them
        run.mkdir(parents=True, exist_ok=True)
        with complete_or_absent(run / INDEX) as path:
            sealed.write(path, index | {"folder": folder.name}, [])
    return episodes


def folder_of(run: Path) -> Path | None:
    """Folder of a run's demonstrations, in the `run` or in the cache; None if there are none.

    Raises:
        UserError: if the cache no longer has them.
    """
    if (run / FOLDER / RECORD).exists():
        return run / FOLDER
    if (index := _index(run)) is None:
        return None
    folder = cache_folder() / index["folder"]
    if not (folder / RECORD).exists():
        sources = " and ".join(index["content"])
        raise UserError(f"the cache no longer has the demonstrations of {run}; use {sources}, or resume the run first")
    return folder


def notes(run: Path) -> list[str]:
    """Notes by the writer of the demonstrations in the folder `run`, for the report; none if there are none."""
    if (index := _index(run)) is not None:
        return index[NOTES]
    path = run / FOLDER / RECORD
    return sealed.read(path, *FORMATS)["origin"].get(NOTES, []) if path.exists() else []


def report_notes(demonstrations: Episodes, run: Path, *, offline: bool = False) -> list[str]:
    """Notes for the report of the `run`: numbers of failures and unknown outcomes, and the writer's notes.

    With `offline`, an offline learner learns from the failures, too.
    """
    failed = int(demonstrations.failed.sum())
    unknown = int((demonstrations.success == UNKNOWN).sum())
    parts = [f"{failed:,} failed and are not imitated{', but learned from offline' if offline else ''}"] * bool(failed)
    parts += [f"{unknown:,} have an unknown outcome and are imitated"] * bool(unknown)
    counted = [f"Of {len(demonstrations.ends):,} demonstrations {' and '.join(parts)}."] if parts else []
    return counted + notes(run)


def with_privileged(
    observation: TensorDict,
    contract: Contract,
    play: Callable[[torch.Generator], TensorDict],
    generator: torch.Generator,
) -> TensorDict:
    """Observations of demonstrations, with privileged observations from random `play` for the critic."""
    present = set(observation.keys())
    missing = [key for key, spec in contract.observation.items() if spec.privileged and key not in present]
    if not missing:
        return observation
    random_play = play(generator)
    rows = torch.randint(len(random_play), (len(observation),), generator=generator)
    return observation.copy().update(random_play.select(*missing).cpu()[rows])


def _index(run: Path) -> dict[str, Any] | None:
    path = run / INDEX
    return sealed.read(path, INDEX_FORMAT) if path.exists() else None


def _content(data_set: DataSet, index: dict[str, Any] | None, run: Path) -> str:
    """Digest of a data set's content, which is that of the `index`, if the `run` has one."""
    expected = None if index is None else index["content"].get(str(data_set.path))
    if expected is not None and not data_set.path.exists():
        raise UserError(f"{run} was trained on {data_set.path}, which is missing; put it back to resume the run")
    content = data_set.content()
    if expected not in (None, content):
        raise UserError(f"{data_set.path} has changed since {run} began; restore it, or begin another run")
    return content


def _check_purpose(
    path: Path, contract: Contract, origin: Mapping[str, Any], stored_contract: Contract, stored_origin: dict[str, Any]
) -> None:
    """Raise UserError unless the demonstrations at `path` were made for `contract` from `origin`."""
    mismatches = [
        f"{key}: expected {value}, got {stored_origin.get(key)}"
        for key, value in origin.items()
        if stored_origin.get(key) != value
    ]
    if mismatches := mismatches + contract.mismatches(stored_contract):
        raise UserError(f"{path} was made for something else ({'; '.join(mismatches)}); choose another output")
