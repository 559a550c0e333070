"""Mistyped options and choices are answered with those that were meant."""

import pytest

import record
import train
from embodied.command_line.program import main
from embodied.command_line.suggestion import did_you_mean
from embodied.errors import UserError

HOVER = "task=quadrotor_hover"


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        ([HOVER, "algorithm=PPO"], "did you mean ppo?"),
        ([HOVER, "algorithm=ppo", "algorithm.lr=1"], "did you mean algorithm.learning_rate"),
        ([HOVER, "algorithm=ppo", "algorithm.learning_rat=1"], "did you mean algorithm.learning_rate"),
        ([HOVER, "lr=1"], "or algorithm.learning_rate or"),
        ([HOVER, "learning_rate=1"], "did you mean algorithm.learning_rate"),
        ([HOVER, "num_env=1"], "did you mean num_envs"),
        (["task=quadrotor_hovr"], "did you mean quadrotor_hover"),
        (["task=LIBERO_PICK"], "did you mean libero_pick?"),
    ],
)
def test_what_was_meant_is_suggested(arguments: list[str], meant: str):
    with pytest.raises(UserError) as caught:
        train.composed(arguments)
    assert meant in str(caught.value)
    assert str(caught.value).startswith("unknown ")


def test_an_option_of_a_group_that_is_not_chosen_says_so():
    with pytest.raises(UserError, match=r"offline\.expectile is an option of offline=, which is not set; use one of"):
        train.composed([HOVER, "offline.expectile=0.8"])


def test_nothing_is_suggested_for_what_is_like_nothing():
    assert did_you_mean("zzz", ["num_envs", "ppo"]) == ""


def test_a_run_needs_a_task(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for program in (train, record):
        for arguments in ([], ["num_envs=4"]):
            if program is record and arguments:
                continue
            assert main(program.run, program.describe, arguments) == 1
            message = capsys.readouterr().err
            assert "task=NAME" in message
            assert "list=tasks" in message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("task", "option"),
    [("gym", "id"), ("mjcf", "mdp"), ("maniskill", "id"), ("isaac_lab", "id"), ("robosuite", "env_name")],
)
def test_tasks_of_any_environment_ask_which_one(task: str, option: str):
    with pytest.raises(UserError, match=rf"^expected task\.{option}=\.\.\., .*--help task={task} describes it"):
        train.composed([f"task={task}"])
    assert f"task.{option}=" in train.describe([f"task={task}"])
