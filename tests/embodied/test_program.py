"""A user's mistake is one line and status 1, a bug keeps its traceback."""

from dataclasses import dataclass

import pytest

from embodied.errors import UserError
from embodied.interrupt import Stopped
from embodied.logging import log_to
from embodied.program import main, options


def failing(error: BaseException):
    def run(arguments: list[str]) -> None:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (UserError("expected a\n  b"), 1, "error: expected a b"),
        (
            PermissionError(13, "No", "/x"),
            1,
            "error: PermissionError: [Errno 13] No: '/x'",
        ),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_what_a_user_can_put_right_is_one_line(error, status, line, capsys):
    assert main(failing(error), str, []) == status
    assert capsys.readouterr() == ("", line + "\n")


def test_a_run_that_was_stopped_is_no_error(capsys):
    assert main(failing(Stopped("Stopped and saved.")), str, []) == 0
    assert capsys.readouterr() == ("Stopped and saved.\n", "")


BUGS = [
    ValueError("no\n broadcast"),
    FloatingPointError("diverged"),
    FileNotFoundError(2, "No", "x"),
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: type(bug).__name__)
def test_a_bug_keeps_its_traceback(bug, capsys):
    assert main(failing(bug), str, []) == 1
    assert "in run\n    raise error\n" in capsys.readouterr().err


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: type(bug).__name__)
def test_a_bug_in_a_run_is_one_line_that_names_the_log_with_its_traceback(bug, tmp_path, capsys):
    def run(arguments: list[str]) -> None:
        log_to(tmp_path)
        raise bug

    assert main(run, str, []) == 1
    told = " ".join(str(bug).split())
    line = f"error: {type(bug).__name__}: {told}; the traceback is in {tmp_path / 'run.log'}\n"
    assert capsys.readouterr() == ("", line)
    assert "in run\n    raise bug\n" in (tmp_path / "run.log").read_text()
    assert main(failing(UserError("another")), str, []) == 1  # and a later program does not write there
    assert "another" not in (tmp_path / "run.log").read_text()


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_help_runs_nothing(word, capsys):
    assert main(failing(AssertionError()), lambda: "the options", ["seed=1", word]) == 0
    assert capsys.readouterr().out == "the options\n"


def test_help_explains_the_options_and_those_that_are_inherited():
    @dataclass
    class Shared:
        """`seed` draws."""

        seed: int = 0

    @dataclass
    class Config(Shared):
        """`speed` is in m/s."""

        speed: float = 1.5

    assert (
        options("A program.\n", Config) == "A program.\n\n`speed` is in m/s.\n\n`seed` draws.\n\nseed: 0\nspeed: 1.5\n"
    )
