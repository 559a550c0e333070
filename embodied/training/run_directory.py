"""The directory of a run: one process at a time works in it, and it takes the place of nothing else."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from embodied.command_line.compute import enough_memory
from embodied.errors import UserError
from embodied.saving.checkpoint import FOLDER
from embodied.saving.files import set_aside
from embodied.training.logging import LOG, close_log, log_to

log = logging.getLogger(__name__)
LOCK = ".lock"
"""Held, by the kernel's means, while a process works in the directory; it says which one."""
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def new_run(output: str | None, name: Path) -> Iterator[Path]:
    """Make `output`, or a directory called `name`, for the body to work in; what it refuses at once leaves nothing.

    Raises:
        UserError: where `output` holds other files, or another process works there.
    """
    directory = Path(output) if output else _numbered(name)
    made = not output or not directory.exists()
    _check_empty(directory)
    directory.mkdir(parents=True, exist_ok=True)
    with _at_work(directory):
        _check_empty(directory)  # now that no other process can begin there
        try:
            with enough_memory():
                yield directory
        except UserError:
            if not _others(directory):
                close_log()
                for path in (directory / LOG, directory / LOCK):
                    path.unlink(missing_ok=True)
                if made:
                    directory.rmdir()
            raise


@contextmanager
def resumed_run(path: str | Path) -> Iterator[Path]:
    """The directory of the run that is to go on: of the run at `path`, or of the one whose checkpoint is at `path`.

    A checkpoint becomes the newest of its run: later ones are set aside, and come back where the body refuses.

    Raises:
        UserError: where there is none, or another process works in it.
    """
    directory, given = run_of(path), Path(path).resolve()
    with _at_work(directory):
        folder = (directory / FOLDER).resolve()
        later = [each for each in _checkpoints(directory) if folder == given.parent and each.name > given.name]
        moved = [(each, set_aside(each)) for each in later]
        for before, after in moved:
            log.warning(f"{before} is later than the checkpoint to go on from: it is now {after}")
        try:
            yield directory
        except UserError:
            begun = any(each.name > given.name for each in _checkpoints(directory))
            for before, after in [] if begun else moved:
                after.rename(before)
            raise


def run_of(path: str | Path) -> Path:
    """The directory of the run that `path` is, or is a checkpoint of.

    Raises:
        UserError: where there is none.
    """
    given = Path(path)
    for directory in (given, given.parent, given.parent.parent):
        if given.exists() and (directory / FOLDER).is_dir():
            return directory
    raise UserError(f"no checkpoint in {path}; expected a run's directory, such as outputs/<task>/<run>")


@contextmanager
def _at_work(directory: Path) -> Iterator[None]:
    """Lock `directory`, write the messages into its log, and say what is left where the disk is full."""
    with _locked(directory):
        log_to(directory)
        try:
            yield
        except OSError as error:
            if error.errno not in FULL:
                raise
            saved = _checkpoints(directory)
            kept = (
                f"{saved[-1]} is whole: make room and continue with resume={directory}"
                if saved
                else "nothing is saved yet"
            )
            raise UserError(f"cannot write {error.filename or directory}: {error.strerror}; {kept}") from error


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    with (directory / LOCK).open("a+") as file:  # closing it releases the lock, as does the end of the process
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read().strip()
            raise UserError(
                f"process {holder} works in {directory}; wait until it is done, or end it: kill {holder}"
            ) from error
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def _numbered(name: Path) -> Path:
    """A new directory: `name`, or with a number where others have that already."""
    for number in count(1):
        directory = name if number == 1 else name.with_name(f"{name.name}_{number}")
        try:
            directory.mkdir(parents=True)
        except FileExistsError:
            continue
        return directory
    raise AssertionError


def _check_empty(directory: Path) -> None:
    if directory.exists() and not directory.is_dir():
        raise UserError(f"{directory} is a file; choose another output")
    if _checkpoints(directory):
        raise UserError(f"{directory} holds a run; continue it with resume={directory}, or choose another output")
    if others := _others(directory):
        raise UserError(f"{directory} holds other files ({', '.join(others[:3])}); choose another output, or move them")


def _others(directory: Path) -> list[str]:
    return sorted({path.name for path in directory.glob("*")} - {LOCK, LOG})


def _checkpoints(directory: Path) -> list[Path]:
    return sorted(path for path in (directory / FOLDER).glob("*") if path.name.isdigit())
