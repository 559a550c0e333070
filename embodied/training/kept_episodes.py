"""Folder of a run with what its learner keeps of its episodes, for runs that learn further tasks (offline=oer)."""

from __future__ import annotations

import shutil
from pathlib import Path

from embodied.contract import Contract
from embodied.data.episodes import Episodes, EpisodeWriter, read
from embodied.errors import UserError
from embodied.training.run_directory import run_of

KEPT = "replay"
"""Name of the folder."""


def write_kept(run: Path, episodes: Episodes, contract: Contract) -> None:
    """Write what is kept of `episodes` of `contract` into the directory `run`, in place of an earlier folder."""
    folder = run / KEPT
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was interrupted after it
    with EpisodeWriter(folder, contract) as writer:
        writer.add(episodes)


def read_kept(start_from: str | Path, contract: Contract) -> Episodes:
    """Read what the run of `start_from`, a run or a checkpoint of it, kept for runs of `contract`.

    Raises:
        UserError: if it kept nothing, or for another contract.
    """
    folder = _folder_of(start_from)
    if not folder.exists():
        raise UserError(
            f"{start_from} has no {KEPT}/, which runs of offline=oer write: start_from such a run, or learn the first"
            " task without start_from"
        )
    episodes, stored, _ = read(folder)
    if mismatches := contract.mismatches(stored):
        raise UserError(f"{folder} is of other observations or actions ({'; '.join(mismatches)})")
    return episodes


def _folder_of(start_from: str | Path) -> Path:
    try:
        return run_of(start_from) / KEPT
    except UserError:  # a policy alone
        return Path(start_from) / KEPT
