"""LIBERO's scenes go on after the end of an episode, and the objects of the goal are back or not."""

import os
from dataclasses import replace

import pytest
import torch

from sims.libero.assets import find_assets
from sims.libero.environment import LiberoEnvironment
from sims.libero.returned import LEVEL_M, NEAR_M, start_condition
from sims.libero.suite import load_tasks
from sims.libero.task import LiberoTask
from tests.sims.libero.test_environment import finish

pytestmark = pytest.mark.assets


def scene(**options) -> LiberoEnvironment:
    assets = find_assets(os.environ.get("LIBERO_ASSETS") or "stand-in")
    tasks = load_tasks("libero_object", [0])
    env = LiberoEnvironment(tasks, 1, assets=assets, threads=1, executed=1, step_limit=3, **options)
    env.reset()
    return env


def moved(env: LiberoEnvironment, name: str, x: float, z: float = 0.0) -> None:
    """Move the object `name` from where it was at the beginning."""
    simulation, scene = env.simulation, env.scenes[0]
    state = env.initial_state(0, int(env.start[0]))
    qpos = state.qpos.copy()
    address = scene.object_qposadr[scene.objects.index(name)]
    qpos[address] += x
    qpos[address + 2] += z
    simulation.write(0, qpos, state.qvel)


def test_the_object_of_the_goal_is_back_near_its_place_whatever_the_others_do() -> None:
    env = scene()
    is_back = start_condition(env)
    target, other = env.scenes[0].task.problem.obj_of_interest[0], env.scenes[0].objects[-1]
    assert target != other
    assert is_back()
    for x, z, expected in ((0.04, 0.0, True), (0.06, 0.0, False), (0.0, 0.03, False)):
        moved(env, target, x, z)
        assert is_back() is expected, (x, z)
    moved(env, other, 0.2)
    assert is_back()
    assert (NEAR_M, LEVEL_M) == (0.05, 0.02)


def test_an_episode_goes_on_in_the_scene_of_the_last_one() -> None:
    env = scene()
    is_back = start_condition(env)
    still = torch.zeros(1, 1, 7)
    for _ in range(3):
        transition = env.step(still)
    assert bool(transition.truncated)
    finish(env, 0)
    env.go_on()
    assert (env.steps.tolist(), env.done.tolist()) == ([0], [False])
    for _ in range(3):
        transition = env.step(still)
    assert bool(transition.success)
    assert not is_back()
    env.go_on()
    assert env.step(still).executed.all()
    env.reset()
    assert is_back()


def test_the_condition_needs_the_simulator_in_this_process_and_objects_to_move() -> None:
    assert LiberoTask().start_condition(object()) is None  # such as an environment in a child process
    env = scene()
    env.scenes = [replace(env.scenes[0], goal=())]  # as of a task that turns a knob
    assert start_condition(env) is None
