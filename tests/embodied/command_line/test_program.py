"""A user's mistake is one line and status 1, a bug keeps its traceback."""

from dataclasses import dataclass, field

import pytest
from omegaconf import MISSING

from embodied.command_line.program import main, options
from embodied.errors import UserError
from embodied.runtime.console import log_to
from embodied.runtime.interrupt import Stopped


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


def test_a_run_that_was_stopped_has_the_status_of_the_signal(capsys):
    assert main(failing(Stopped("Stopped and saved.", 2)), str, []) == 130
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
    message = " ".join(str(bug).split())
    line = f"error: {type(bug).__name__}: {message}; the traceback is in {tmp_path / 'run.log'}\n"
    assert capsys.readouterr() == ("", line)
    assert "in run\n    raise bug\n" in (tmp_path / "run.log").read_text()
    assert main(failing(UserError("another")), str, []) == 1  # and a later program does not write there
    assert "another" not in (tmp_path / "run.log").read_text()


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_help_runs_nothing_and_describes_what_is_chosen(word, capsys):
    assert main(failing(AssertionError()), lambda chosen: f"the options of {chosen}", ["seed=1", word]) == 0
    assert capsys.readouterr().out == "the options of ['seed=1']\n"


@dataclass
class Part:
    """How wide: `width` is in m; `names` are those\n    of joints.

    A colour.
    """

    width: float = 0.5
    names: list[str] = field(default_factory=lambda: ["a", "b"])
    colour: str | None = None


@dataclass
class Shared:
    """`seed` draws."""

    seed: int = 0


@dataclass
class Config(Shared):
    """What it does. `speed` is in m/s."""

    speed: float = 1.5
    path: str = MISSING
    part: Part = field(default_factory=Part)
    weights: dict[str, float | None] = field(default_factory=lambda: {"force": None})


def test_help_tells_every_option_as_it_is_typed_with_what_its_docstring_says():
    assert options("A program.\n", Config).splitlines() == [
        *("A program.", "", "What it does. `speed` is in m/s.", ""),
        "seed=0                # `seed` draws",
        "speed=1.5             # `speed` is in m/s",
        "path=...",
        "part.width=0.5        # How wide: `width` is in m",
        'part.names=["a","b"]  # `names` are those of joints',
        "part.colour=null",
        "weights.force=null",
    ]
    assert "speed=2.0 " in options(None, Config(speed=2.0, path="here"))
