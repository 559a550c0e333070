"""What the record of a checkpoint names outside its run is used only if the command line names it, too."""

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import evaluate
import train
from embodied.command_line.config import compose
from embodied.command_line.program import main
from embodied.errors import UserError
from embodied.report.repeating import next_commands, resume_command
from embodied.runtime.foreign_code import named
from train import GROUPS, TrainConfig


def record(*arguments: str) -> dict:
    """The record of a run with `arguments`, as a checkpoint stores it."""
    return json.loads(json.dumps(compose(TrainConfig, "train", arguments, GROUPS)[1]))


def changed(saved: dict, option: str, value) -> dict:
    values = OmegaConf.create(saved["values"])
    OmegaConf.update(values, option, value, force_add=True)
    return saved | {"values": OmegaConf.to_container(values, resolve=False)}


GYM = "task=gym", "task.id=Pendulum-v1"
CODE = [
    (GYM, "task.python", "/tmp/evil/python"),
    (GYM, "task.python", "evil"),
    (GYM, "task.id", "evil:Line-v0"),
    (GYM, "task.options", {"xml_file": "/tmp/evil.xml"}),
    (GYM, "task.options", {"nested": [{"name": "evil:thing"}]}),
    (("task=mjcf_cartpole",), "task.mdp", "/tmp/evil.py"),
    (("task=mjcf_cartpole",), "task.mdp", "evil.py"),
    (("task=isaac_lab_cartpole",), "task.overrides", ["env.func=evil:run"]),
    (("task=libero_pick",), "task.assets", "/tmp/evil"),
]


@pytest.mark.parametrize(("arguments", "option", "value"), CODE)
def test_code_and_files_of_a_record_need_a_yes(arguments, option: str, value):
    saved = changed(record(*arguments), option, value)
    with pytest.raises(UserError, match=rf"if you trust them, repeat '?{option}[=.].* on the command line"):
        compose(TrainConfig, "train", [], GROUPS, saved)


@pytest.mark.parametrize("arguments", [GYM, ("task=mjcf_cartpole",), ("task=libero_pick",), ("task=quadrotor_race",)])
def test_records_of_what_we_ship_need_none(arguments):
    saved = record(*arguments)
    assert compose(TrainConfig, "train", [], GROUPS, saved)[1]["values"]["task"] == saved["values"]["task"]


def test_the_yes_is_the_option_itself():
    saved = changed(record(*GYM), "task.python", "/opt/other/python")
    config, _ = compose(TrainConfig, "train", ["task.python=/opt/other/python"], GROUPS, saved)
    assert config.task.python == "/opt/other/python"


def test_choices_and_interpolations_of_a_record_are_ours():
    saved = record(*GYM)
    with pytest.raises(UserError, match=r"unknown task '../../evil'"):
        compose(TrainConfig, "train", [], GROUPS, saved | {"choices": saved["choices"] | {"task": "../../evil"}})
    with pytest.raises(UserError, match=r"expected plain values, got \$\{"):
        compose(TrainConfig, "train", [], GROUPS, changed(saved, "wandb", "${oc.env:HOME}"))


def test_no_program_runs_what_a_checkpoint_names(tmp_path: Path, monkeypatch, capsys):
    """A task file that leaves a trace would be run by any program that makes the task."""
    evil, trace = tmp_path / "evil.py", tmp_path / "trace"
    evil.write_text(f"open({str(trace)!r}, 'w').close()\n", encoding="utf-8")
    saved = changed(record("task=mjcf_cartpole"), "task.mdp", str(evil))
    monkeypatch.setattr("embodied.saving.checkpoint.load", lambda path: type("Saved", (), {"config": saved})())
    run = tmp_path / "run"
    for program, arguments in ((evaluate, [f"checkpoint={run}"]), (train, [f"resume={run}"])):
        assert main(program.run, program.describe, arguments) == 1
        assert f"repeat task.mdp={evil}" in capsys.readouterr().err
    assert not trace.exists()


def test_printed_commands_repeat_the_options():
    arguments = ["task=gym", "task.id=own:Line-v0", "task.python=/opt/python", "num_envs=4", "task.step_limit=9"]
    assert named(arguments) == ["task.id=own:Line-v0", "task.python=/opt/python"]
    for line in (next_commands(Path("run"), None, arguments)[0], resume_command(Path("run"), arguments)):
        assert line.endswith("=run task.id=own:Line-v0 task.python=/opt/python")
