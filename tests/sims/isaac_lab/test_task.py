"""What tells about Isaac Lab's tasks without Isaac Lab."""

import sys
from types import SimpleNamespace

import pytest

from embodied.errors import UserError
from sims.isaac_lab import worlds
from sims.isaac_lab.task import IsaacLabTask


def test_where_it_is_not_installed_one_line_says_how_to(monkeypatch):
    monkeypatch.setitem(sys.modules, "isaaclab_tasks", None)
    with pytest.raises(UserError, match=r"is not installed in .*: make isaac, then add task.python=.venv-isaac/bin"):
        IsaacLabTask().environment(2, "Isaac-Cartpole-Direct", "train")


def test_a_version_that_hides_last_observations_is_refused(monkeypatch):
    # 2.3.2 resets worlds before it observes them, and cannot even be imported without Isaac Sim.
    monkeypatch.setattr(worlds, "version", lambda name: "2.3.2")
    said = r"isaaclab 2.3.2 hides the last observations of episodes; expected 3.0.0"
    with pytest.raises(UserError, match=said):
        IsaacLabTask().environment(2, "Isaac-Cartpole-Direct", "train")
    cfg = SimpleNamespace(seed=None, decimation=2, episode_length_s=5.0, sim=SimpleNamespace(dt=0.01))
    with pytest.raises(UserError, match=said):
        worlds._adapt(cfg, worlds.Options("Isaac-Cartpole-Direct"), "cpu", 0, worlds.Path())


@pytest.mark.parametrize(("option", "said"), [({"assets": "mine"}, "stock, own"), ({"executed": 0}, "executed")])
def test_impossible_options_are_refused(option, said):
    with pytest.raises(UserError, match=said):
        IsaacLabTask(**option)


def test_another_distribution_is_refused():
    with pytest.raises(UserError, match="unknown distribution 'Isaac-Ant'; expected one of Isaac-Cartpole-Direct"):
        IsaacLabTask().contract("Isaac-Ant")
