"""Renames that a network file system refuses for a moment are tried again."""

import errno
import os
from pathlib import Path

import pytest

from embodied.errors import UserError
from embodied.saving import files
from embodied.saving.files import complete_or_absent
from embodied.training.run_directory import new_run


@pytest.fixture
def refusing(monkeypatch):
    """Makes the next renames fail, as many as are asked for, with an error; returns the number of all calls."""
    monkeypatch.setattr(files, "PAUSES_S", (0.0, 0.0, 0.0, 0.0))
    replace = os.replace

    def refuse(times: int, number: int) -> list[int]:
        calls = []

        def renamed(*paths: Path) -> None:
            calls.append(1)
            if len(calls) <= times:
                raise OSError(number, os.strerror(number))
            replace(*paths)

        monkeypatch.setattr(os, "replace", renamed)
        return calls

    return refuse


def write(path: Path) -> None:
    with complete_or_absent(path) as temporary:
        temporary.write_text("whole", encoding="utf-8")


def test_a_passing_error_is_tried_again(tmp_path: Path, refusing):
    calls = refusing(3, errno.ESTALE)
    write(tmp_path / "file")
    assert (tmp_path / "file").read_text(encoding="utf-8") == "whole"
    assert len(calls) == 4


def test_a_lasting_error_is_not(tmp_path: Path, refusing):
    calls = refusing(9, errno.EACCES)
    with pytest.raises(PermissionError):
        write(tmp_path / "file")
    assert (len(calls), list(tmp_path.iterdir())) == (1, [])


def begin(directory: Path) -> None:
    """A run with a checkpoint, which then cannot write a file."""
    with new_run(str(directory), Path("unused")):
        (directory / "checkpoint" / "000001").mkdir(parents=True)
        write(directory / "file")


def test_an_error_that_does_not_pass_says_how_to_go_on(tmp_path: Path, refusing):
    refusing(99, errno.ESTALE)
    with pytest.raises(UserError, match=r"cannot write .*file: .*; .*000001 is complete: .* continue with resume="):
        begin(tmp_path / "run")
