"""Newcomers' walks: files of the tutorials are saved, and commands are run, as printed, but for fewer steps."""

from __future__ import annotations

import re
import shlex
import time
from pathlib import Path

import pytest

from tests.programs import ROOT, Completed, run_program

TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
BLOCK = re.compile(r"^```(\w+)(?: title=\"(\S+)\")?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FEW_STEPS = {
    "train.py": ["env_steps=512", "num_envs=8", "evaluation_starts=4", "evaluation_envs=4", "video=false", "threads=1"],
    "evaluate.py": ["episodes=4", "num_envs=4", "video=false"],
}
"""Options that follow those printed, by program."""
FIRST_RESULT_COMMANDS = 5
"""The largest number of commands that a newcomer types up to the first report."""


def walk(page: Path, folder: Path) -> list[Completed]:
    """Follow the tutorial in `folder`: save files with a title, and run the commands of its programs in order."""
    answers, start_s = [], time.perf_counter()
    for language, title, text in BLOCK.findall(page.read_text()):
        if title:
            (path := folder / title).parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        for program, *arguments in map(shlex.split, commands(text) if language == "bash" else ()):
            assert program == "python", program
            name, options = arguments[0], arguments[1:]
            answers.append(answer := run_program(name, *options, *FEW_STEPS.get(name, ()), cwd=folder))
            assert answer.returncode == 0, f"{name} {options}: {answer.stderr}"
            print(f"{page.name}: command {len(answers)}, {time.perf_counter() - start_s:.1f} s: {name}")
    return answers


def commands(text: str) -> list[str]:
    """Lines of a shell, those that end with a backslash joined."""
    return text.replace("\\\n", "").splitlines()


def first_report(answers: list[Completed]) -> int:
    """Number of the first command that printed where its report is."""
    return 1 + next(number for number, answer in enumerate(answers) if "report.html" in answer.stdout + answer.stderr)


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_tutorials_are_short(page: Path):
    assert len(BLOCK.sub("", page.read_text()).split()) <= 900


def test_a_student_trains_an_own_arm_and_the_same_arm_of_gymnasium(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(tmp_path)  # as `python train.py` does with its folder
    answers = walk(ROOT / "docs" / "tutorials" / "own_model.md", tmp_path)
    assert first_report(answers) <= FIRST_RESULT_COMMANDS
    assert (tmp_path / "outputs" / "my_arm" / "report.html").exists()
    assert "return" in (tmp_path / "outputs" / "my_gym_arm" / "report.md").read_text()
