"""A user's mistake is one line and status 1, a bug keeps its traceback."""

from dataclasses import dataclass

import pytest

from embodied.interrupt import Stopped
from embodied.program import main, options


def failing(error: BaseException):
    def run(arguments: list[str]) -> None:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (ValueError("expected a\n  b"), 1, "error: expected a b"),
        (FloatingPointError("simulation 3 diverged"), 1, "error: simulation 3 diverged"),
        (PermissionError(13, "Permission denied", "/x"), 1, "error: [Errno 13] Permission denied: '/x'"),
        (Stopped("Stopped and saved."), 0, "Stopped and saved."),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_what_a_user_can_put_right_is_one_line(error, status, line, capsys):
    assert main(failing(error), str, []) == status
    assert capsys.readouterr().out == line + "\n"


def test_a_bug_keeps_its_traceback():
    with pytest.raises(RuntimeError):
        main(failing(RuntimeError("bug")), str, [])


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
