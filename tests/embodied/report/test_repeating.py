"""Commands of a report can be typed."""

import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch

from embodied.command_line.config import parsed
from embodied.report.repeating import film_command, machine, next_commands, resume_command, train_command


def test_a_run_is_repeated_with_what_it_was_given_last_and_elsewhere():
    given = ["task=libero_pick", "env_steps=1000", "output=here", "resume=here", "env_steps=2000", "task.tasks=[a,b]"]
    words = shlex.split(train_command(given))
    assert words[-4:] == [words[-4], "task=libero_pick", "env_steps=2000", "task.tasks=[a,b]"]
    assert words[-4].endswith("train.py")
    assert train_command([]).endswith("train.py")


def test_a_failed_start_is_filmed_with_its_distribution_and_task():
    words = shlex.split(film_command(Path("a run"), "official:bddl", 7, "pick it"))
    expected = ["checkpoint=a run", "distributions=[official:bddl]", "first_start=7", "episodes=1"]
    assert words[-6:] == [*expected, "task.tasks=[pick it]", "video=true"]
    assert "task.tasks" not in film_command(Path("a run"), "wide", 7)


@pytest.mark.parametrize(
    "name", ["plain/2026-11-27_run", "a b", "it's", "a,b", "x=1", "läuft", "1e3", "12", "null", "a\\b"]
)
def test_commands_name_a_folder_whatever_it_is_called(name: str):
    for told in (*next_commands(Path(name), "c")[:2], resume_command(Path(name))):
        *_, key = (each for each in shlex.split(told) if each.startswith(("checkpoint=", "resume=")))
        assert list(parsed([key]).values()) == [name]
    assert shlex.split(next_commands(Path(name), "c")[-1])[-1] == name
    assert next_commands(Path("plain/2026-11-27_run"), None)[0].endswith(" checkpoint=plain/2026-11-27_run")


def test_commands_run_from_another_folder(monkeypatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    program, interpreter = shlex.split(resume_command(tmp_path / "run"))[1::-1]
    assert Path(program).samefile(Path(__file__).parents[3] / "train.py")
    assert shutil.which(interpreter) == sys.executable
    assert resume_command(tmp_path / "run").endswith(" resume=run")


def test_the_machine_is_described():
    told = machine("cpu")
    assert told["processor"]
    assert told["cores"] >= 1
    assert told["threads"] == torch.get_num_threads()
