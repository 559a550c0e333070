"""Data sets that are decoded once and shared by all runs of a machine.

Minibatches are random rows, for which data sets are too slow where they lie: ffmpeg finds 3 frames/s of a video, and a
picture of a parquet file, which is read with its row group of 89, takes five times as long as a picture alone (31 kB).
The cache is $EMBODIED_CACHE, else $XDG_CACHE_HOME/embodied, else ~/.cache/embodied. It may be deleted at any time:
running programs keep the files that they have mapped, and later runs decode again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embodied.contract import Contract
from embodied.data.episodes import FORMATS, RECORD, Episodes, EpisodeWriter, read
from embodied.errors import UserError
from embodied.saving import sealed
from embodied.saving.files import named
from embodied.saving.versions import versions

log = logging.getLogger(__name__)
VARIABLE = "EMBODIED_CACHE"
READING = 2
"""Number of the way in which data sets are read: the next one where the same files are read otherwise."""


@dataclass(frozen=True)
class DataSet:
    """A data set at `path`, and those of its files that are read."""

    path: Path
    files: Sequence[Path]

    def content(self) -> str:
        """SHA-256 of the files and of their names within `path`.

        Raises:
            UserError: for a file that cannot be read.
        """
        try:
            return sealed.combined({self._name(file): sealed.digest(file) for file in self.files})
        except OSError as error:
            raise UserError(f"cannot read {error.filename or self.path}: {error.strerror}") from error

    def _name(self, file: Path) -> str:
        """Name of a file within `path`; a run's demonstrations may be elsewhere, in the cache."""
        return file.relative_to(self.path).as_posix() if file.is_relative_to(self.path) else file.name


def decode_once(
    identity: Mapping[str, Any], contract: Contract, decode: Callable[[EpisodeWriter], None]
) -> tuple[Path, Episodes, dict[str, Any]]:
    """Return the episodes that `decode` writes, their folder and origin.

    They are those in the cache if it has some of the same `identity`, JSON.

    A damaged folder is decoded again, with a warning.

    Raises:
        UserError: for errors of `decode`, and where nothing can be written.
    """
    readers = {"version": versions().get("embodied-rl"), "format": FORMATS[-1], "reading": READING}
    complete = json.dumps({**readers, **identity}, sort_keys=True)
    folder = cache_folder() / hashlib.sha256(complete.encode()).hexdigest()[:32]
    with _locked(folder), _written(folder):
        if folder.exists():
            try:
                episodes, _, origin = read(folder)
                return folder, episodes, origin
            except UserError as error:
                log.warning(f"{error}; the data set is decoded again")
                shutil.rmtree(folder)
        with EpisodeWriter(folder, contract) as writer:
            decode(writer)
        episodes, _, origin = read(folder)
        return folder, episodes, origin


def cache_folder() -> Path:
    """Folder of decoded data sets.

    Raises:
        UserError: if it cannot be created.
    """
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(os.environ.get(VARIABLE) or Path(base) / "embodied") / "data_sets"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot create a cache of decoded data sets: {reason}; set {VARIABLE} to a folder") from error
    return folder


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Wait for other processes that decode the same data set."""
    path = folder.with_suffix(".lock")
    with _written(folder), named(path):
        file = path.open("ab")
        fcntl.flock(file, fcntl.LOCK_EX)
    with file:
        yield


@contextmanager
def _written(folder: Path) -> Iterator[None]:
    """Context in which errors of files of the cache, which has the `folder`, are a user's."""
    try:
        yield
    except OSError as error:
        if error.filename is None or not Path(error.filename).is_relative_to(folder.parent):
            raise
        raise UserError(f"cannot write {error.filename}: {error.strerror}; set {VARIABLE} to a folder") from error


def content_of(folder: Path) -> str:
    """SHA-256 of the decoded episodes in `folder`."""
    return sealed.digest(folder / RECORD)
