"""Directory of a run: used by one process at a time, never overwriting other files."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from itertools import count
from pathlib import Path

from embodied.commands import typed
from embodied.data.demonstrations import INDEX
from embodied.errors import UserError
from embodied.placement.local import Processes
from embodied.runtime.console import LOG, close_log, log_to
from embodied.saving.checkpoint import BEST, FOLDER
from embodied.saving.files import PASSING, make_folder, set_aside
from embodied.saving.metrics import METRICS, read_rows
from embodied.training.compute import enough_memory

log = logging.getLogger(__name__)
LOCK = ".lock"
"""Lock file of the process that uses the directory; contains its id."""
TENSORBOARD = "tensorboard"
BEGINNING = {"config.yaml", INDEX, METRICS, TENSORBOARD}
"""Files of a run that has not learned yet; those of a refused run are removed, so that it can be corrected."""
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""Errors of a full disk."""


@contextmanager
def new_run(output: str | None, name: Path) -> Iterator[Path]:
    """Create `output`, or a directory called `name`, for the body; it is removed if the body fails before learning.

    Raises:
        UserError: if `output` contains other files, or another process uses it.
    """
    directory = Path(output) if output else _numbered(name)
    created = not output or not directory.exists()
    _check_empty(directory)
    make_folder(directory)
    with _at_work(directory):
        _check_empty(directory)  # locked: no other process can write there now
        try:
            with enough_memory():
                yield directory
        except UserError:
            if {*_others(directory)} <= BEGINNING and not read_rows(directory / METRICS):
                close_log()
                shutil.rmtree(directory / TENSORBOARD, ignore_errors=True)
                for path in BEGINNING - {TENSORBOARD} | {LOG, LOCK}:
                    (directory / path).unlink(missing_ok=True)
                if created:
                    directory.rmdir()
            raise


def new_directory(task: str, suffix: str = "", outputs: str = "outputs") -> Path:
    """Directory of a new run or recording of the task called `task`, below `outputs`: the time, and `suffix`.

    Raises:
        UserError: for a task's name that leads to another folder.
    """
    if not re.fullmatch(r"[\w-][\w.-]*", task):
        raise UserError(f"expected task.name of letters, digits, '_', '-' and '.', a folder's name, got {task!r}")
    return Path(outputs) / task / f"{datetime.now():%Y-%m-%d_%H-%M-%S}{suffix}"


def this_run(resume: str | None, output: str | None, name: Path) -> AbstractContextManager[Path]:
    """Directory of the run to `resume`, or of a new one if that is None."""
    return resumed_run(resume) if resume else new_run(output, name)


@contextmanager
def shared_run(world: Processes, resume: str | None, output: str | None, name: Path) -> Iterator[Path]:
    """Directory of `this_run` in each process of `world`; the first one locks it."""
    if world.rank:
        yield Path(world.lead(lambda: ""))
        return
    with this_run(resume, output, name) as directory:
        world.lead(lambda: str(directory))
        yield directory


@contextmanager
def resumed_run(path: str | Path) -> Iterator[Path]:
    """Directory of the run to continue, from `path`, a run or a checkpoint of it.

    A checkpoint becomes the newest of its run: later ones are renamed, and restored if the body fails at once.

    Raises:
        UserError: if there is none, or another process uses it.
    """
    directory = run_of(path)
    checkpoint = Path(path).resolve()
    with _at_work(directory):
        folder = (directory / FOLDER).resolve()
        later = [
            each for each in _checkpoints(directory) if folder == checkpoint.parent and each.name > checkpoint.name
        ]
        moved = [(each, set_aside(each)) for each in later]
        for before, after in moved:
            log.warning(f"{before} is later than the checkpoint to continue from; renamed to {after}")
        try:
            yield directory
        except UserError:
            continued = any(each.name > checkpoint.name for each in _checkpoints(directory))
            for before, after in [] if continued else moved:
                after.rename(before)
            raise


def run_of(path: str | Path) -> Path:
    """Run directory of `path`, which is a run or a checkpoint of one.

    Raises:
        UserError: if there is none.
    """
    source = Path(path)
    for directory in (source, source.parent, source.parent.parent):
        if source.exists() and (directory / FOLDER).is_dir():
            if BEST in source.relative_to(directory).parts:
                commands = typed("resume", directory), typed("start_from", path)
                raise UserError(f"{path} is a policy alone: {commands[0]}, or begin a run with {commands[1]}")
            return directory
    raise UserError(f"no checkpoint in {path}; expected a run's directory, such as outputs/<task>/<run>")


@contextmanager
def _at_work(directory: Path) -> Iterator[None]:
    """Lock `directory`, write messages to its log, and report the last checkpoint if the disk is full or fails."""
    with _locked(directory):
        log_to(directory)
        try:
            yield
        except OSError as error:
            if error.errno not in FULL | PASSING:
                raise
            saved = _checkpoints(directory)
            remedy = "free some space" if error.errno in FULL else "check the disk"
            status = (
                f"{saved[-1]} is complete: {remedy} and continue with {typed('resume', directory)}"
                if saved
                else "nothing is saved yet"
            )
            raise UserError(f"cannot write {error.filename or directory}: {error.strerror}; {status}") from error


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    with (directory / LOCK).open(
        "a+", encoding="utf-8"
    ) as file:  # the lock is released when the file is closed or the process ends
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read().strip()
            raise UserError(
                f"process {holder} is using {directory}; wait until it ends, or stop it with: kill {holder}"
            ) from error
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def _numbered(name: Path) -> Path:
    """Create a directory: `name`, with a number appended if that exists."""
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
        command = typed("resume", directory)
        raise UserError(f"{directory} already has a run; continue it with {command}, or choose another output")
    if others := _others(directory):
        raise UserError(f"{directory} has other files ({', '.join(others[:3])}); choose another output, or move them")


def _others(directory: Path) -> list[str]:
    return sorted({path.name for path in directory.glob("*")} - {LOCK, LOG})


def _checkpoints(directory: Path) -> list[Path]:
    return sorted(path for path in (directory / FOLDER).glob("*") if path.name.isdigit())
