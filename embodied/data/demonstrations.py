"""Demonstrations of a run: recorded once, then read from its folder; and their notes in its report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from embodied.contract import Contract
from embodied.data.episodes import FOLDER, FORMATS, RECORD, UNKNOWN, Episodes, EpisodeWriter, read
from embodied.errors import UserError
from embodied.saving import sealed


def made_once(run: Path, contract: Contract, origin: dict[str, Any], make: Callable[[EpisodeWriter], None]) -> Episodes:
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
    mismatches = [
        f"{key}: expected {value}, got {stored_origin.get(key)}"
        for key, value in origin.items()
        if stored_origin.get(key) != value
    ]
    if mismatches := mismatches + contract.mismatches(stored_contract):
        raise UserError(f"{folder} was made for something else ({'; '.join(mismatches)}); choose another output")
    return episodes


def notes(run: Path) -> list[str]:
    """Notes by the writer of the demonstrations in the folder `run`, for the report; none if there are none."""
    path = run / FOLDER / RECORD
    return sealed.read(path, *FORMATS)["origin"].get("notes", []) if path.exists() else []


def report_notes(demonstrations: Episodes, run: Path) -> list[str]:
    """Notes for the report of the `run`: numbers of failures and unknown outcomes, and the writer's notes.

    Raises:
        UserError: if all failed.
    """
    demonstrations.check_imitable()
    failed, unknown = int(demonstrations.failed.sum()), int((demonstrations.success == UNKNOWN).sum())
    parts = [f"{failed:,} failed and are not imitated"] * bool(failed)
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
