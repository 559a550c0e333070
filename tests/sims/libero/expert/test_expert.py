import os

import numpy as np
import pytest
import torch

from sims.libero.assets import find_assets
from sims.libero.environment import LiberoEnvironment
from sims.libero.expert.expert import Expert, Phase
from sims.libero.suite import load_tasks

pytestmark = pytest.mark.assets
ASSETS = find_assets(os.environ.get("LIBERO_ASSETS") or "stand-in")


def environment(tasks, num_envs, distribution="wide", split="eval"):
    return LiberoEnvironment(
        tasks, num_envs, distribution=distribution, split=split, horizon=1, executed=1, assets=ASSETS, threads=1
    )


def run(env, expert, disturb=None, starts=None):
    """Let the expert act until all episodes have ended; returns the last transition."""
    env.reset(starts=starts)
    for step in range(env.step_limit):
        actions = expert.act()
        assert np.abs(actions).max() <= 1
        if disturb is not None:
            disturb(step)
        transition = env.step(torch.from_numpy(actions[:, None]))
        if transition.done.all():
            break
    return transition


@pytest.mark.parametrize("distribution", ["official", "wide"])
def test_it_does_all_ten_object_tasks(distribution):
    env = environment(load_tasks("libero_object"), 20, distribution)
    transition = run(env, Expert(env.simulation))
    failed = [env.task_names[env.task_index[i]] for i in range(20) if not transition.success[i]]
    assert len(failed) <= (0 if distribution == "official" else 1), failed
    assert 60 < env.steps.float().mean() < 140


def test_with_noise_it_still_succeeds_and_differs():
    env = environment(load_tasks("libero_object", [0, 6]), 6)
    clean = run(env, Expert(env.simulation))
    steps = env.steps.tolist()
    env.reset()
    noisy = run(env, Expert(env.simulation, noise=0.15, seed=1))
    assert clean.success.all()
    assert noisy.success.sum() >= 5
    assert env.steps.tolist() != steps


def test_what_slips_out_of_the_hand_is_grasped_again():
    env = environment(load_tasks("libero_object", [0]), 1)
    expert = Expert(env.simulation)
    scene, data = env.simulation.scenes[0], env.simulation.data[0]
    address, start, taken = scene.object_qposadr[0], None, []

    def disturb(step):
        nonlocal start
        if step == 0:
            start = data.qpos[address : address + 7].copy()
        elif not taken and expert.phase[0] == Phase.CARRY and data.qpos[address + 2] > start[2] + 0.05:
            data.qpos[address : address + 7] = start
            taken.append(step)

    assert run(env, expert, disturb).success.all()
    assert taken
    assert env.steps[0] > taken[0] + 30


def test_a_target_that_is_pushed_away_before_the_grasp_is_followed():
    env = environment(load_tasks("libero_object", [2]), 1)
    expert = Expert(env.simulation)
    scene, data = env.simulation.scenes[0], env.simulation.data[0]
    goal = scene.goal[0]
    address = scene.object_qposadr[list(scene.object_body).index(goal.a)]

    def disturb(step):
        if step == 8:
            data.qpos[address] += 0.02

    assert run(env, expert, disturb).success.all()


def test_acting_for_some_is_acting_for_each():
    env = environment(load_tasks("libero_object", [0, 1]), 4)
    env.reset()
    together, apart = Expert(env.simulation), Expert(env.simulation)
    whole = together.act()
    parts = np.concatenate([apart.act(np.array(ids)) for ids in ([0], [1, 2], [3])])
    np.testing.assert_array_equal(whole, parts)


@pytest.mark.skipif(not os.environ.get("LIBERO_ASSETS"), reason="needs LIBERO's official assets in LIBERO_ASSETS")
@pytest.mark.parametrize("distribution", ["official", "wide"])
def test_it_opens_drawers_and_turns_knobs(distribution):
    env = environment(load_tasks("libero_goal", [0, 7]), 2, distribution)
    assert run(env, Expert(env.simulation)).success.all()


@pytest.mark.skipif(not os.environ.get("LIBERO_ASSETS"), reason="needs LIBERO's official assets in LIBERO_ASSETS")
@pytest.mark.parametrize(("suite", "task"), [("libero_spatial", 0), ("libero_spatial", 5), ("libero_goal", 8)])
def test_it_takes_bowls_by_the_rim(suite, task):
    env = environment(load_tasks(suite, [task]), 4, "official")
    assert run(env, Expert(env.simulation)).success.all()


@pytest.mark.skipif(not os.environ.get("LIBERO_ASSETS"), reason="needs LIBERO's official assets in LIBERO_ASSETS")
@pytest.mark.parametrize(
    ("task", "distribution", "starts"),
    [
        (("libero_spatial", 4), "wide", [5, 6, 9]),  # a bowl in a drawer, where an upright hand is out of reach
        (("libero_goal", 5), "official", [1, 3, 9]),  # a plate beside a cabinet, which a hand across it would touch
    ],
)
def test_it_reaches_into_drawers_and_pushes_past_cabinets(task, distribution, starts):
    env = environment(load_tasks(task[0], [task[1]]), len(starts), distribution, split="train")
    assert run(env, Expert(env.simulation), starts=torch.tensor(starts)).success.all()
