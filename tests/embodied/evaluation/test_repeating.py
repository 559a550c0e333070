"""Commands of a report can be typed."""

import shlex
from pathlib import Path

import torch

from embodied.evaluation.repeating import film_command, machine, train_command


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


def test_the_machine_is_described():
    told = machine("cpu")
    assert told["processor"]
    assert told["cores"] >= 1
    assert told["threads"] == torch.get_num_threads()
