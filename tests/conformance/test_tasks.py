"""Requirements of every Task, checked on all of them."""

import os
from importlib.util import find_spec

import pytest

from embodied.command_line.config import compose, names
from embodied.environments.latency import LatencyConfig, with_latency
from embodied.errors import UserError
from embodied.task import Task, evaluation_distributions
from sims.libero.task import LiberoTask
from train import GROUPS, TrainConfig

OPTIONS = {
    "libero_pick": ["task.assets=stand-in", "task.tasks=[0]", "task.horizon=6", "task.executed=3"],
    "quadrotor_hover": ["task.history=3"],
    "vehicle_navigate": ["task.lidar.beams=31", "task.vehicle.speed_max_m_s=2.5"],
}
"""Of what a contract depends on."""
SIMULATED = [name for name in names("task", GROUPS) if name != "dataset"]
OFFICIAL = ("libero_goal", "libero_spatial")
NEEDS = dict.fromkeys(("isaac_lab", "isaac_lab_cartpole"), find_spec("isaaclab"))
NEEDS |= dict.fromkeys(OFFICIAL, os.environ.get("LIBERO_ASSETS"))
"""Packages and files that tasks need and that may be missing."""
LATE = LatencyConfig(observation_s=[0.0, 0.1], observed=True)


NAMES = [pytest.param(name, marks=[pytest.mark.assets] * (name in OFFICIAL)) for name in SIMULATED]


@pytest.fixture(scope="module", params=NAMES)  # composing all of them takes 8 s
def task(request) -> Task:
    name = request.param
    if not NEEDS.get(name, True):
        pytest.skip("its simulator or its assets are not installed here")
    return compose(TrainConfig, "train", [f"task={name}", *OPTIONS.get(name, [])], GROUPS)[0].task


def test_its_contract_is_that_of_its_environments(task: Task):
    for distribution in evaluation_distributions(task):
        env = task.environment(1, distribution, "eval")
        assert task.contract(distribution) == env.contract
        env.close()
    late = with_latency(task, LATE)
    env = late.environment(1, late.distributions[0], "train")
    assert late.contract(late.distributions[0]) == env.contract
    env.close()


def test_its_contract_is_known_without_an_environment(task: Task, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("an environment was made")

    monkeypatch.setattr(type(task), "environment", refuse)
    monkeypatch.setattr("embodied.environments.engine.EpisodeEngine.__init__", refuse)
    assert task.contract(task.distributions[0]).action.names


def test_its_distributions_have_meanings(task: Task):
    for name in evaluation_distributions(task):
        assert task.meanings.get(name, "").endswith(".") or name == getattr(task, "id", None)
    assert with_latency(task, LATE).meanings == task.meanings


def test_an_unknown_distribution_has_none(task: Task):
    with pytest.raises(UserError, match=r"unknown .*'nowhere'; expected one of"):
        task.contract("nowhere")


def test_the_contract_of_libero_needs_no_assets_and_no_scene(monkeypatch):
    monkeypatch.setattr("sims.libero.environment.build_scene", None)
    task = LiberoTask(assets="/nowhere", horizon=6, executed=3)
    assert (task.contract("wide").horizon, task.contract("wide").executed) == (6, 3)
