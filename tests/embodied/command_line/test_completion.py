"""Completion: what --help lists, continued from where the cursor is, by a script that Bash runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from embodied.command_line.completion import candidates, completion
from embodied.errors import UserError

TEXT = """What it does.

task: hover, pick, pick_all
policy: flow

Options of task=hover:

num_envs=3       # environments
video=true
policy.width=8
policy.wide.depth=9
"""


def describe(arguments: list[str]) -> str:
    if "task=wrong" in arguments:
        raise UserError("unknown task")
    return TEXT


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("python train.py ", "task= policy= num_envs= video= policy."),
        ("python train.py nu", "num_envs="),
        ("python train.py task=wrong po", "policy= policy."),
        ("python train.py policy.", "policy.width= policy.wide."),
        ("embodied train policy.wide.", "policy.wide.depth="),
        ("python train.py task=p", "pick pick_all"),
        ("python train.py video=", "true false"),
        ("python train.py num_envs=", ""),
        ("python train.py nosuch", ""),
    ],
)
def test_words_continue_the_line(line: str, found: str) -> None:
    assert candidates(line, describe) == found.split()


def test_other_shells_are_refused() -> None:
    with pytest.raises(UserError, match=r"expected -sc install=SHELL .* one of bash, zsh, got install=csh"):
        completion("install=csh", describe)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("embodied tr", "train"),
        ("embodied train task=pi", "pick pick_all"),
        ("python train.py task=", "hover pick pick_all"),
        ("python ./train.py vid", "video="),
        ("python other.py vid", ""),
    ],
)
def test_bash_asks_the_program(tmp_path: Path, line: str, found: str) -> None:
    """`python` and `embodied` on the path answer -sc query=bash as the programs do."""
    answer = f"""#!{sys.executable}
import os, sys
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from embodied.command_line.completion import completion
assert sys.argv[2:] == ["-sc", "query=bash"], sys.argv
print(completion("query=bash", lambda _: {TEXT!r}))
"""
    for name in ("python", "embodied"):
        (tmp_path / name).write_text(answer)
        (tmp_path / name).chmod(0o755)
    head, equals, value = line.rpartition("=")
    words = [*head.split(), "=", *([value] if value else [])] if equals else line.split()
    listed = " ".join(f"'{word}'" for word in words)
    script = f"""{completion("install=bash", describe)}
COMP_LINE='{line}' COMP_POINT={len(line)} COMP_WORDS=({listed}) COMP_CWORD={len(words) - 1}
_embodied; echo "${{COMPREPLY[@]}}"; complete -p python"""
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    run = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, env=environment)
    told, registered = run.stdout.splitlines()
    assert told.split() == found.split(), run.stderr
    assert registered.endswith("-F _embodied python")
