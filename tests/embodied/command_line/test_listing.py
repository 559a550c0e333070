"""What train.py list=tasks tells."""

import re
import tomllib
from pathlib import Path

import pytest

import train
from embodied.command_line import program
from embodied.command_line.config import names
from embodied.command_line.listing import Needs, tasks
from sims.registry import NEEDS

ROOT = Path(__file__).parents[3]


@pytest.fixture
def told(capsys) -> str:
    assert program.main(train.run, train.describe, ["list=tasks"]) == 0
    return capsys.readouterr().out


def test_every_task_is_told_on_one_line_under_its_simulator(told):
    for name in names("task", train.GROUPS):
        assert len(re.findall(rf"^  {name}  +[A-Z].{{20,}}$", told, re.MULTILINE)) == 1, name
    assert max(map(len, told.splitlines())) <= 120
    simulator, head = {}, ""
    for line in told.splitlines():
        if line.startswith("  "):
            simulator[line.split()[0]] = head
        else:
            head = line.split(" ")[0]
    assert simulator["gym_pusher"] == "gym"
    assert simulator["quadrotor_swarm"] == "swarm"
    assert simulator["vehicle_race"] == "vehicle"


def test_what_is_needed_is_told_and_whether_it_is_here(told):
    assert "vehicle (needs nothing more)" in told
    assert re.search(r"^libero \(extra libero, installed; (official|stand-in) assets found\)$", told, re.MULTILINE)
    missing = tasks(train.GROUPS["task"], {"libero": Needs("libero", ("nowhere_at_all",), "some tasks")})
    assert "libero (extra libero for some tasks, not installed: pip install 'embodied-rl[libero]'; " in missing


def test_a_simulator_in_an_environment_of_its_own_is_found_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    needs = {"isaac_lab": Needs("isaac-lab", ("nowhere_at_all",), venv="apart", install="make isaac")}
    assert "isaac_lab (extra isaac-lab, not installed: make isaac)" in tasks(train.GROUPS["task"], needs)
    (tmp_path / "apart/bin").mkdir(parents=True)
    (tmp_path / "apart/bin/python").touch()
    listing = tasks(train.GROUPS["task"], needs)
    assert "isaac_lab (extra isaac-lab, installed in apart: task.python=apart/bin/python)" in listing


def test_extras_that_are_named_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {needs.extra for needs in NEEDS.values()} <= extras.keys()
    assert NEEDS.keys() <= {made.__module__.split(".")[1] for made in train.GROUPS["task"].values()}
